"""Separates the part of a plan that was computed from what an executor has read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .availability_checks import available
from .plan_checks import checked_for_use
from .records import Job, Record, Round
from .running_job import RunningJob
from .simulator import Simulator


class _Started(NamedTuple):
    client: int
    job: RunningJob


class PlanRecorder:
    """Iterate to read the records of a simulator; ``commit`` passes them on to ``sink``, round by round.

    A run is planned once: the executor that reads ahead and the sink share one simulator. Each record is checked before
    the executor reads it.
    """

    def __init__(self, simulator: Simulator, sink: Callable[[Record], None]) -> None:
        self._simulator = simulator
        self._sink = sink
        self._pending: deque[Record | _Started] = deque()
        self._running: dict[int, RunningJob] = {}
        self._rounds = 0
        if not simulator.sparse:  # a sparse plan has no unfinished jobs
            simulator.on_start = lambda client, job: self._pending.append(_Started(client, job))
        self._source = self._read()

    def __iter__(self) -> Iterator[Record]:
        return self._source

    def _read(self) -> Iterator[Record]:
        for record in checked_for_use(self._simulator.header, available(self._simulator.fleet, self._simulator)):
            self._pending.append(record)
            yield record

    def commit(self, rounds: int) -> None:
        """Pass on the records until that round; read those that no executor has read."""
        while self._rounds < rounds and (self._pending or next(self._source, None) is not None):
            item = self._pending.popleft()
            if isinstance(item, _Started):
                self._running[item.client] = item.job
                continue
            if isinstance(item, Job):
                running = self._running.get(item.client)
                if running is not None and running.index == item.index:  # the next one may have been reported before
                    del self._running[item.client]
            elif isinstance(item, Round):
                self._rounds = item.merge.version
            self._sink(item)

    def finish(self, rounds: int) -> None:
        """Pass on the records until that round, then the jobs that were running after it."""
        self.commit(rounds)
        for client, job in sorted(self._running.items()):
            steps = self._simulator.steps
            self._sink(Job(client, job.index, job.version, steps, job.start, job.end, "running"))
