"""Executors compute a plan: they train the jobs that some merge uses, and apply the merges. They know no algorithm."""

from .batched import BatchedRun, drive_batched
from .minibatches import positions
from .reference import LocalTraining, Reference
from .run_state import RunState
from .stacking.layers import CannotStack
from .stopping import CheckpointHook, EvalCounters, EvalSchedule, Evaluation, RunProgress, Status, StoppingRule, drive
from .trainer import Trainer

__all__ = [
    "BatchedRun",
    "CannotStack",
    "CheckpointHook",
    "EvalCounters",
    "EvalSchedule",
    "Evaluation",
    "LocalTraining",
    "Reference",
    "RunProgress",
    "RunState",
    "Status",
    "StoppingRule",
    "Trainer",
    "drive",
    "drive_batched",
    "positions",
]
