"""Plans of runs in progress: written to disk as the rounds are computed, with their statistics and hash."""

from __future__ import annotations

from pathlib import Path

from ..planning.devices import Fleet
from ..planning.plan_stats import PlanStats, PlanStatsCollector
from ..planning.plan_writer import PlanWriter
from ..planning.records import Header, Record
from .simulation import Simulation


class PlanFile:
    """Receives the records of one run's plan."""

    def __init__(self, path: Path, header: Header, fleet: Fleet) -> None:
        self._writer = PlanWriter(path, header)
        self._stats = PlanStatsCollector(header, fleet)

    def add(self, record: Record) -> None:
        """Write a record of a round that was computed."""
        self._writer.add(record)
        self._stats.add(record)

    def finish(self, run: Simulation) -> tuple[PlanStats, str]:
        """Write what remains of the plan; return its statistics and its hash."""
        run.finish_plan()
        return self._stats.stats(), self._writer.close()

    def discard(self) -> None:
        """Remove the incomplete file of a run that did not finish."""
        self._writer.discard()
