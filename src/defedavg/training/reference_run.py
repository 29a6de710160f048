"""Run a plan with the reference executor: compute a round, evaluate its version if it is due, stop by the rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..planning.records import Record, Round
from .eval_schedule import EvalSchedule, PendingEval
from .evaluation import evaluate_version
from .reference import Reference
from .stopping import Evaluation, StoppingRule

CheckpointHook = Callable[[], None]
"""Called whenever all computed versions are evaluated and reported: here a run can be checkpointed."""


def run_reference(
    records: Iterable[Record],
    executor: Reference,
    rule: StoppingRule,
    schedule: EvalSchedule,
    checkpoint_hook: CheckpointHook = lambda: None,
) -> Iterator[Evaluation]:
    """Compute rounds one after the other until the rule stops the run, and yield every evaluation."""
    for pending in _pending_evaluations(records, executor, rule, schedule):
        evaluation = schedule.record(pending, evaluate_version(executor, schedule, pending))
        if evaluation is not None:
            yield evaluation
        if not schedule.running:
            return
        checkpoint_hook()


def _pending_evaluations(
    records: Iterable[Record], executor: Reference, rule: StoppingRule, schedule: EvalSchedule
) -> Iterator[PendingEval]:
    newest = executor.versions[schedule.counters.newest[0]]
    if not schedule.started:
        yield schedule.start(newest)
    for record in records:
        if rule.ended_by(record):
            yield schedule.ended(record, newest)
        elif isinstance(record, Round):
            newest = executor.apply(record)
            yield schedule.round(record, newest)
