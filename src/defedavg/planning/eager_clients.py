"""Eager clients as arrays: all of them are advanced at once, from one moment at which the server acts to the next.

What an eager client trains, from which version and when depends on its speed and on the broadcasts, not on requests. So
jobs that end between two moments need no events: they are computed together and sorted. Every number results from the
same arithmetic operations as in ``Simulator``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .devices import BLOCK, Fleet
from .intervals import Floats, Ints


class EndedJobs(NamedTuple):
    """Jobs that ended, in the order of events; ``requested`` marks those whose update is uploaded at once."""

    clients: Ints
    indices: Ints
    versions: Ints
    starts: Floats
    ends: Floats
    requested: NDArray[np.bool_]


class EagerClients:
    """The running job, the send buffer and the next start of every client.

    ``ends`` is infinite while a client is idle. ``next_starts`` is infinite while it trains, or waits for a version
    that has not been broadcast. ``held`` is the start version of the update in the send buffer, or −1.
    """

    def __init__(self, fleet: Fleet, local_steps: int) -> None:
        size = fleet.num_clients
        blocks = [fleet.steps_between(first, first + BLOCK) for first in range(0, size, BLOCK)]
        self._steps = np.concatenate(blocks)
        self._local_steps = local_steps
        self._fleet = fleet
        self._down = fleet.down_times
        self._equal_links = fleet.equal_links
        self._times = np.full(16, np.inf)  # of broadcasts; the last entry stays infinite
        self._arrivals = np.full(16, np.inf)  # at clients with equal links
        self._count = 0
        self.jobs = np.zeros(size, np.int64)  # that were started
        self.versions = np.full(size, -1)
        self.starts = np.zeros(size)
        self.ends, self.next_starts = np.full(size, np.inf), np.full(size, np.inf)
        self.held = np.full(size, -1)
        self.requested = np.zeros(size, np.bool_)
        self.users: list[tuple[Ints, int]] = []  # versions of jobs that started (1) and of updates that are lost (−1)

    def broadcast(self, time: float) -> None:
        """Record the broadcast of the next version; idle clients start when it arrives."""
        if self._count + 1 >= len(self._times):
            more = np.full(len(self._times), np.inf)
            self._times, self._arrivals = np.append(self._times, more), np.append(self._arrivals, more)
        self._times[self._count] = time
        self._arrivals[self._count] = time + float(self._down[0])
        self._count += 1
        idle = np.flatnonzero(np.isinf(self.ends) & np.isinf(self.next_starts))
        self.next_starts[idle] = time + self._down[idle]

    def newest(self, clients: Ints, moments: Floats) -> Ints:
        """Return the newest version that has arrived at each client by its moment."""
        if self._equal_links:
            return self._arrivals[: self._count].searchsorted(moments, "right") - 1
        links = self._down[clients]
        count = self._times[: self._count].searchsorted(moments - links, "right")
        while True:  # moments − links is rounded; an arrival is time + link, as ``Simulator`` computes it
            more = self._times[count] + links <= moments
            less = (count > 0) & (self._times[np.maximum(count - 1, 0)] + links > moments)
            if not (more.any() or less.any()):
                return count - 1
            count = count + more - less

    def lengths(self, clients: Ints, indices: Ints) -> Floats:
        """Return the durations of jobs."""
        steps = self._steps[clients]
        if self._fleet.jitter:  # NumPy's cosine may differ from that of ``Simulator`` in the last bit
            pace = self._fleet.pace
            steps = steps * [pace(*job) for job in zip(clients.tolist(), indices.tolist(), strict=True)]
        return np.asarray(steps * self._local_steps)

    def advance(self, now: float, first_client: int) -> EndedJobs | None:
        """Start jobs before ``now``; end those that end before ``now``, or at ``now`` on clients below the first."""
        ended: list[EndedJobs] = []
        while True:
            due = np.flatnonzero(self.next_starts < now)
            if len(due):
                self._start(due)
            over = self.ends < now
            if first_client:
                over[:first_client] |= self.ends[:first_client] == now
            due = np.flatnonzero(over)
            if not len(due):
                return _in_order(ended) if ended else None
            ended.append(self._end(due))

    def _start(self, clients: Ints) -> None:
        starts, indices = self.next_starts[clients], self.jobs[clients]
        versions = self.newest(clients, starts)
        self.users.append((versions, 1))
        self.versions[clients], self.starts[clients] = versions, starts
        self.ends[clients] = starts + self.lengths(clients, indices)
        self.next_starts[clients] = np.inf
        self.jobs[clients] = indices + 1

    def _end(self, clients: Ints) -> EndedJobs:
        ends, versions, requested = self.ends[clients], self.versions[clients], self.requested[clients]
        replaced = self.held[clients]
        self.users.append((replaced[replaced >= 0], -1))
        self.held[clients] = np.where(requested, -1, versions)
        self.requested[clients] = False
        self.next_starts[clients] = np.maximum(ends, self._times[versions + 1] + self._down[clients])
        self.ends[clients] = np.inf
        return EndedJobs(clients, self.jobs[clients] - 1, versions, self.starts[clients], ends, requested)

    def next_end(self, client: int) -> tuple[int, float]:
        """Return the index and the end of the job that a client trains, or will start next (inf: not known yet)."""
        index, end = int(self.jobs[client]), float(self.ends[client])
        if np.isfinite(end):
            return index - 1, end
        length = self.lengths(np.array([client]), np.array([index]))
        return index, float(self.next_starts[client] + length[0])

    def version_of(self, client: int, index: int) -> int:
        """Return the start version of a job that ends now and may not have been started in the arrays."""
        if index < self.jobs[client]:
            return int(self.versions[client])
        return int(self.newest(np.array([client]), self.next_starts[[client]])[0])

    def take_users(self) -> list[tuple[int, int]]:
        """Return by how much the users of each version changed since the last call, increases first."""
        changes: list[tuple[int, int]] = []
        for sign in (1, -1):
            parts = [versions for versions, kind in self.users if kind == sign]
            found, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *parts]), return_counts=True)
            changes += zip(found.tolist(), (sign * counts).tolist(), strict=True)
        self.users.clear()
        return changes


def _in_order(ended: list[EndedJobs]) -> EndedJobs:
    columns = EndedJobs(*(np.concatenate(parts) for parts in zip(*ended, strict=True)))
    order = np.lexsort((columns.clients, columns.ends))
    return EndedJobs(*(column[order] for column in columns))
