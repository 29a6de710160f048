"""Executors compute a plan: they train the jobs that merges use, and apply the merges. They know no algorithm."""

from .batched import BatchedRun, run_batched
from .evaluation import EvalCounters, EvalResult, EvalSchedule, PendingEval
from .local_training import LocalTraining, TrainingJob, positions
from .reference import CheckpointHook, Reference, evaluate_version, run_reference
from .run_state import RunState
from .stacking.layer_registry import LayerSite, StackedLayer, StackedPass, StackingError, samplewise, stacked_layer
from .stopping import Evaluation, RunProgress, Status, StoppingRule, hit_times
from .trainer import Trainer

__all__ = [
    "BatchedRun", "CheckpointHook", "EvalCounters", "EvalResult", "EvalSchedule", "Evaluation", "LayerSite",
    "LocalTraining", "PendingEval", "Reference", "RunProgress", "RunState", "StackedLayer", "StackedPass",
    "StackingError", "Status", "StoppingRule", "Trainer", "TrainingJob", "evaluate_version", "hit_times",
    "positions", "run_batched", "run_reference", "samplewise", "stacked_layer",
]  # fmt: skip
