"""Executors compute a plan: they train the jobs that some merge uses, and apply the merges. They know no algorithm."""

from .batched import Lane, drive_batched
from .batches import positions
from .drive import Evaluation, Goal, Meter, Progress, Rest, Status, Tally, drive
from .layers import CannotStack
from .reference import Recipe, Reference
from .standing import Standing
from .trainer import Trainer

__all__ = [
    "CannotStack",
    "Evaluation",
    "Goal",
    "Lane",
    "Meter",
    "Progress",
    "Recipe",
    "Reference",
    "Rest",
    "Standing",
    "Status",
    "Tally",
    "Trainer",
    "drive",
    "drive_batched",
    "positions",
]
