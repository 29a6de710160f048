"""Executors compute a plan: they train the jobs that some merge uses, and apply the merges. They know no algorithm."""

from .batches import SAMPLING, positions
from .drive import Evaluation, Goal, Status, drive
from .reference import Recipe, Reference

__all__ = ["SAMPLING", "Evaluation", "Goal", "Recipe", "Reference", "Status", "drive", "positions"]
