"""What every client of a plan did: merged updates, messages and energy, in a few numbers per client.

A message counts in full when it is sent, to whatever client. An upload counts whether its update is merged or not. A
job counts with the local steps that its client completed, whether its update is uploaded, merged, lost or still being
trained; a step takes the same energy on every client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .devices import Fleet
from .records import Job, Record, Round, Sent, Uploaded

COVERAGE_AT = (0.1, 0.5, 1.0)
"""The shares of the simulated time at which the clients heard so far are counted."""
FLUSH = 1 << 14


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the 95th percentile and the maximum over all clients."""

    median: float
    p95: float
    most: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Spread:
        """Return the spread of one value per client."""
        median, p95 = np.percentile(values, (50.0, 95.0)).tolist()
        return cls(median, p95, float(values.max()))


@dataclass(frozen=True, slots=True)
class Energy:
    """The joules of a local step, and of a byte that a client sends or receives; the same for every client."""

    joules_per_step: float = 0.0
    joules_per_byte: float = 0.0

    def __bool__(self) -> bool:
        return self.joules_per_step > 0.0 or self.joules_per_byte > 0.0


def gini(counts: NDArray[Any]) -> float:
    """Return the Gini coefficient: 0 if all counts are equal, 1 − 1/N if one client has everything; 0 if all are 0."""
    total = float(counts.sum())
    if not total:
        return 0.0
    ordered, size = np.sort(counts).astype(np.float64), len(counts)
    return float((2.0 * np.arange(1, size + 1) - size - 1) @ ordered) / (size * total)


class ClientTotals:
    """Collects the records of a plan: five numbers per client, whatever the length of the plan."""

    def __init__(self, fleet: Fleet, energy: Energy) -> None:
        self._fleet = fleet
        self._energy = energy
        self.merged = np.zeros(fleet.num_clients, np.int64)
        self._first = np.full(fleet.num_clients, np.inf)  # time of the first merge of an update of the client
        self._uploads = _Counter(fleet.num_clients)
        self._downloads = _Counter(fleet.num_clients)
        self._broadcasts = 0
        self._steps = np.zeros(fleet.num_clients if energy.joules_per_step else 0)
        self._running: list[Job] = []

    def add(self, record: Record) -> None:
        """Count the next record."""
        if isinstance(record, Uploaded):
            self._uploads.add(record.client)
        elif isinstance(record, Sent):
            if record.client is None:
                self._broadcasts += 1
            else:
                self._downloads.add(record.client)
        elif isinstance(record, Round):
            clients = np.array([update.client for update, _ in record.merge.updates], np.int64)
            np.add.at(self.merged, clients, 1)
            self._first[clients] = np.minimum(self._first[clients], record.time)
        elif isinstance(record, Job) and self._energy.joules_per_step:
            if record.outcome == "running":
                self._running.append(record)
            else:
                self._steps[record.client] += self._completed(record, record.end)

    def _completed(self, job: Job, until: float) -> float:
        """Return the local steps that a client completed by a time; a job that was lost has no steps on record."""
        if job.outcome in ("ended", "interrupted"):
            return job.steps
        step = float(self._fleet.step_times[job.client]) * self._fleet.pace(job.client, job.index)
        return float(int(max(0.0, min(job.end, until) - job.start) / step + 1e-9))

    @property
    def messages(self) -> tuple[int, int]:
        """The number of uploads, and of downloads."""
        return self._uploads.total, self._downloads.total + self._broadcasts * self._fleet.num_clients

    def traffic(self) -> tuple[Spread, Spread]:
        """Return the bytes per client, up and down."""
        return Spread.of(self._bytes(up=True)), Spread.of(self._bytes(up=False))

    def _bytes(self, *, up: bool) -> NDArray[np.float64]:
        messages = self._uploads.counts() if up else self._downloads.counts() + self._broadcasts
        return messages.astype(np.float64) * np.float64(self._fleet.model_megabytes * 1e6)

    def joules(self, seconds: float) -> NDArray[np.float64]:
        """Return the energy of every client up to a time at which the plan ends."""
        total = self._energy.joules_per_byte * (self._bytes(up=True) + self._bytes(up=False))
        if self._energy.joules_per_step:
            total += self._energy.joules_per_step * self._steps
            for job in self._running:
                total[job.client] += self._energy.joules_per_step * self._completed(job, seconds)
        return total

    @property
    def never_heard(self) -> int:
        """The number of clients of which no update was merged."""
        return int(np.count_nonzero(self.merged == 0))

    def coverage(self, seconds: float) -> tuple[float, ...]:
        """Return the shares of the clients of which an update was merged by 10, 50 and 100 % of the time."""
        return tuple(float(np.mean(self._first <= share * seconds)) for share in COVERAGE_AT)


class _Counter:
    """Counts by client; clients are collected in a list first, since NumPy is slow for single numbers."""

    def __init__(self, num_clients: int) -> None:
        self._counts = np.zeros(num_clients, np.int64)
        self._new: list[int] = []
        self.total = 0

    def add(self, client: int) -> None:
        """Count one more for a client."""
        self.total += 1
        self._new.append(client)
        if len(self._new) >= FLUSH:
            self.counts()

    def counts(self) -> NDArray[np.int64]:
        """Return the counts of all clients."""
        if self._new:
            np.add.at(self._counts, np.array(self._new, np.int64), 1)
            self._new.clear()
        return self._counts
