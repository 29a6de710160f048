"""The rows of the clients of a run that has ended."""

from __future__ import annotations

from ..algorithms import algorithm
from ..planning.plan_stats import PlanStatsCollector
from ..runstore.client_results import Row, client_rows
from ..tasks import LazyPartition
from .simulation import Simulation


def client_rows_of(run: Simulation, totals: PlanStatsCollector) -> list[Row]:
    """Return a row per client; none if clients were neither evaluated nor have an energy."""
    scores, joules = run.client_scores(), totals.joules()
    if scores is None and joules is None:
        return []
    steps = algorithm(run.settings.algorithm).steps_per_job(run.settings.training.local_steps)
    clients = run.task.clients
    return client_rows(
        scores,
        train_samples=None if isinstance(clients, LazyPartition) else [len(samples) for samples in clients],
        answer_seconds=run.simulator.fleet.answer_times(steps),
        updates=totals.clients.merged,
        joules=joules,
    )
