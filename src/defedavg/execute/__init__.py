"""Executors compute a plan: they train the jobs that some merge uses, and apply the merges. They know no algorithm."""

from .batched import Lane, drive_batched
from .batches import positions
from .drive import Evaluation, Goal, Progress, Status, drive
from .layers import CannotStack
from .reference import Recipe, Reference
from .trainer import Trainer

__all__ = [
    "CannotStack",
    "Evaluation",
    "Goal",
    "Lane",
    "Progress",
    "Recipe",
    "Reference",
    "Status",
    "Trainer",
    "drive",
    "drive_batched",
    "positions",
]
