"""Eager clients that are advanced only when the server requests them, many at once.

Between two requests an eager client trains from the newest version that has reached it, again and again, and waits only
if it has already trained from that version. Its state at any time follows from its speed and the times of the
broadcasts, so a client that is never requested costs nothing. Jobs are counted and timed with the same arithmetic
operations as in ``Simulator``, so that every number is identical.
"""

from __future__ import annotations

import numpy as np

from ..rng import extend_all, key, normal_all, portable_all
from .devices import Fleet
from .intervals import Floats, Ints


class LazyClients:
    """The last job of every eager client, running or finished, and the job before it."""

    def __init__(self, fleet: Fleet, local_steps: int) -> None:
        self._fleet = fleet
        self._steps = local_steps
        self._jitter = key(fleet.seed, "jitter")
        self._equal_links = fleet.equal_links
        self._times = np.full(16, np.inf)
        self._count = 0
        # Pages of zeros that are never written take no memory, so versions and jobs are stored plus one.
        size = fleet.num_clients
        self.jobs, self._trained, self._trained_before, self._uploaded = (np.zeros(size, np.int64) for _ in range(4))
        self.start, self.end, self._start_before, self._end_before = (np.zeros(size) for _ in range(4))

    def broadcast(self, time: float) -> None:
        """Record the broadcast of the next version."""
        if self._count + 1 >= len(self._times):  # the last entry stays infinite: an unsent version never arrives
            self._times = np.concatenate([self._times, np.full(len(self._times), np.inf)])
        self._times[self._count] = time
        self._count += 1

    def advance(self, clients: Ints, now: float) -> None:
        """Advance distinct clients to ``now``: jobs that end now have ended, jobs that start now have not started."""
        ids = clients
        jobs, trained, trained_before = self.jobs[ids], self._trained[ids], self._trained_before[ids]
        start, end = self.start[ids], self.end[ids]
        start_before, end_before = self._start_before[ids], self._end_before[ids]
        links, lengths = self._links(ids), self._lengths(ids)
        while len(ids):
            next_start = np.maximum(end, self._times[trained] + links)
            if self._fleet.schedule is not None:
                next_start = self._next_open_start(ids, end, trained, links)
            starts = next_start < now
            if not starts.all():
                stays = ~starts
                done = ids[stays]
                self.jobs[done], self._trained[done] = jobs[stays], trained[stays]
                self.start[done], self.end[done] = start[stays], end[stays]
                self._trained_before[done] = trained_before[stays]
                self._start_before[done], self._end_before[done] = start_before[stays], end_before[stays]
                ids, jobs, trained = ids[starts], jobs[starts], trained[starts]
                start, end, next_start, lengths = start[starts], end[starts], next_start[starts], lengths[starts]
                links = links if self._equal_links else links[starts]
            trained_before, start_before, end_before = trained, start, end
            trained, start = self._arrived_count(next_start, links), next_start
            end = start + (lengths if self._fleet.jitter == 0.0 else self._jittered_lengths(ids, jobs))
            jobs = jobs + 1

    def send_buffer(self, client: int, now: float) -> tuple[int, int, float, float] | None:
        """Return (job, version, start, end) of the update that a client, advanced to ``now``, holds."""
        last = int(self.jobs[client]) - 1
        if last >= 0 and self.end[client] > now:
            last -= 1
            job = (self._trained_before[client], self._start_before[client], self._end_before[client])
        else:
            job = (self._trained[client], self.start[client], self.end[client])
        if last < self._uploaded[client]:
            return None
        return last, int(job[0]) - 1, float(job[1]), float(job[2])

    def trained(self, client: int) -> int:
        """Return the start version of the last job, or −1."""
        return int(self._trained[client]) - 1

    def start_job(self, client: int, version: int, start: float) -> float:
        """Start a job; return when it ends."""
        self._trained_before[client], self._start_before[client], self._end_before[client] = (
            self._trained[client],
            self.start[client],
            self.end[client],
        )
        ids = np.array([client])
        lengths = self._lengths(ids) if self._fleet.jitter == 0.0 else self._jittered_lengths(ids, self.jobs[ids])
        self._trained[client], self.start[client], self.end[client] = version + 1, start, start + lengths[0]
        self.jobs[client] += 1
        return float(self.end[client])

    def uploaded(self, client: int, job: int) -> None:
        """Record that the update of a job has left the send buffer."""
        self._uploaded[client] = job + 1

    def _links(self, clients: Ints) -> Floats:
        return self._fleet.down_times[:1] if self._equal_links else self._fleet.down_times[clients]

    def _lengths(self, clients: Ints) -> Floats:
        return self._fleet.step_times[clients] * self._steps

    def _jittered_lengths(self, clients: Ints, jobs: Ints) -> Floats:
        """Return the job lengths of ``Simulator``."""
        sigma = self._fleet.jitter
        z = normal_all(extend_all(extend_all(self._jitter, clients), jobs))
        pace = portable_all(np.exp(sigma * z - 0.5 * sigma**2))
        return np.asarray(self._fleet.step_times[clients] * pace * self._steps)

    def _arrival(self, version: Ints, links: Floats) -> Floats:
        return self._times[version] + links

    def _arrived_count(self, moments: Floats, links: Floats) -> Ints:
        """Return how many broadcasts have arrived by then."""
        times = self._times[: self._count]
        if self._equal_links:
            return (times + links).searchsorted(moments, "right").astype(np.int64)
        count = times.searchsorted(moments - links, "right").astype(np.int64)
        while True:  # moments − links is rounded; an arrival is time + link, as ``Simulator`` computes it
            more = self._arrival(count, links) <= moments
            less = (count > 0) & (self._arrival(np.maximum(count - 1, 0), links) > moments)
            if not (more.any() or less.any()):
                return count
            count = count + more - less

    def _next_open_start(self, clients: Ints, free: Floats, trained: Ints, links: Floats) -> Floats:
        """Return when clients that are not always reachable, free at ``free``, start from a version new to them."""
        opening = self._fleet.opens_all(clients, free)
        reachable = np.isfinite(opening)  # again: the intervals of a client may have ended
        waits = reachable & (self._arrived_count(np.where(reachable, opening, 0.0), links) <= trained)
        arrival = self._arrival(trained, links)
        return np.where(waits, self._fleet.opens_all(clients, arrival), opening)
