"""Plans of runs in progress: written to disk as the rounds are computed, with their statistics and hash."""

from __future__ import annotations

from pathlib import Path

from ..config.build import energy_of
from ..planning.plan_stats import PlanStats, PlanStatsCollector
from ..planning.plan_writer import PlanWriter
from ..planning.records import Record
from .simulation import Simulation


class PlanFile:
    """Receives the records of one run's plan; ``totals`` collects them."""

    def __init__(self, path: Path, run: Simulation) -> None:
        self._run = run
        self._writer = PlanWriter(path, run.simulator.header)
        energy = energy_of(run.settings)
        self.totals = PlanStatsCollector(run.simulator.header, run.simulator.fleet, energy=energy)
        run.record_plan(self._add)

    def _add(self, record: Record) -> None:
        self._writer.add(record)
        self.totals.add(record)

    def commit(self) -> None:
        """Write the records of the rounds that were computed since the last call, so that few are in memory."""
        self._run.commit_plan()

    def finish(self) -> tuple[PlanStats, str]:
        """Write what remains of the plan; return its statistics and its hash."""
        self._run.finish_plan()
        return self.totals.stats(), self._writer.close()

    def discard(self) -> None:
        """Remove the incomplete file of a run that did not finish."""
        self._writer.discard()
