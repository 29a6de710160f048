"""Clients that train on by themselves, brought up to date only when somebody asks, many at once.

The law of this file: between two requests an eager client trains from the newest version that has reached it, again and
again, and waits only where it has trained from that one already. So where it stands at any moment follows from its
speed and from the times of the broadcasts, and a client that is never asked costs nothing. Jobs are counted and timed
as by the plain clock, operation by operation, so that every number is the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..rng import extend_all, key, normal_all
from .devices import Fleet, Floats

Ints = NDArray[np.int64]


class LazyClients:
    """What eager clients have done: by client, the job it is at or was last at, and the one before that."""

    def __init__(self, fleet: Fleet, local_steps: int) -> None:
        self._fleet = fleet
        self._steps = local_steps
        self._jitter = key(fleet.seed, "jitter")
        self._alike = fleet.trace is None  # all links are
        self._times = np.full(16, np.inf)
        self._count = 0
        # Pages of zeros that nobody touches take no memory, hence numbers that begin at one.
        size = fleet.num_clients
        self.jobs, self._trained, self._trained_before, self._sent = (np.zeros(size, np.int64) for _ in range(4))
        self.start, self.end, self._start_before, self._end_before = (np.zeros(size) for _ in range(4))

    def broadcast(self, time: float) -> None:
        """The next version was sent to everyone."""
        if self._count + 1 >= len(self._times):  # the last stays infinite: what has not been sent never arrives
            self._times = np.concatenate([self._times, np.full(len(self._times), np.inf)])
        self._times[self._count] = time
        self._count += 1

    def advance(self, clients: Ints, now: float) -> None:
        """Bring different clients to this moment: what ends at it has ended, what starts at it has not started."""
        own = clients
        jobs, trained, trained_before = self.jobs[own], self._trained[own], self._trained_before[own]
        start, end = self.start[own], self.end[own]
        start_before, end_before = self._start_before[own], self._end_before[own]
        links, lengths = self._links(own), self._lengths(own)
        while len(own):
            coming = np.maximum(end, self._times[trained] + links)
            if self._fleet.availability is not None:
                coming = self._open(own, end, trained, links)
            goes = coming < now
            if not goes.all():
                stay = ~goes
                done = own[stay]
                self.jobs[done], self._trained[done] = jobs[stay], trained[stay]
                self.start[done], self.end[done] = start[stay], end[stay]
                self._trained_before[done] = trained_before[stay]
                self._start_before[done], self._end_before[done] = start_before[stay], end_before[stay]
                own, jobs, trained = own[goes], jobs[goes], trained[goes]
                start, end, coming, lengths = start[goes], end[goes], coming[goes], lengths[goes]
                links = links if self._alike else links[goes]
            trained_before, start_before, end_before = trained, start, end
            trained, start = self._reached(coming, links), coming
            end = start + (lengths if self._fleet.jitter == 0.0 else self._paced(own, jobs))
            jobs = jobs + 1

    def outbox(self, client: int, now: float) -> tuple[int, int, float, float] | None:
        """What is in the send buffer of a client that was advanced to now: (job, version, start, end)."""
        last = int(self.jobs[client]) - 1
        if last >= 0 and self.end[client] > now:
            last -= 1
            found = (self._trained_before[client], self._start_before[client], self._end_before[client])
        else:
            found = (self._trained[client], self.start[client], self.end[client])
        if last < self._sent[client]:
            return None
        return last, int(found[0]) - 1, float(found[1]), float(found[2])

    def trained(self, client: int) -> int:
        """The version from which the last job was started, or −1."""
        return int(self._trained[client]) - 1

    def begin(self, client: int, version: int, start: float) -> float:
        """Start a job; gives its end."""
        self._trained_before[client], self._start_before[client], self._end_before[client] = (
            self._trained[client],
            self.start[client],
            self.end[client],
        )
        own = np.array([client])
        lengths = self._lengths(own) if self._fleet.jitter == 0.0 else self._paced(own, self.jobs[own])
        self._trained[client], self.start[client], self.end[client] = version + 1, start, start + lengths[0]
        self.jobs[client] += 1
        return float(self.end[client])

    def sent(self, client: int, job: int) -> None:
        """The update of a job was uploaded: it is in the send buffer no more."""
        self._sent[client] = job + 1

    # Pieces of the clock, for many clients.

    def _links(self, clients: Ints) -> Floats:
        return self._fleet.down_times[:1] if self._alike else self._fleet.down_times[clients]

    def _usual(self, clients: Ints) -> Floats:
        return self._fleet.step_times[clients]

    def _lengths(self, clients: Ints) -> Floats:
        return self._usual(clients) * self._steps

    def _paced(self, clients: Ints, jobs: Ints) -> Floats:
        """Lengths with jitter, by the keys of the plain clock (NumPy's cosine may differ from C's in the last bit)."""
        sigma = self._fleet.jitter
        z = normal_all(extend_all(extend_all(self._jitter, clients), jobs))
        return np.asarray(self._usual(clients) * np.exp(sigma * z - 0.5 * sigma**2) * self._steps)

    def _arrival(self, version: Ints, links: Floats) -> Floats:
        return self._times[version] + links

    def _reached(self, moments: Floats, links: Floats) -> Ints:
        """How many broadcasts have arrived by then."""
        times = self._times[: self._count]
        if self._alike:
            return (times + links).searchsorted(moments, "right").astype(np.int64)
        count = times.searchsorted(moments - links, "right").astype(np.int64)
        while True:  # moments − links is rounded; arrival is time + link, as the clock computes it
            more = self._arrival(count, links) <= moments
            less = (count > 0) & (self._arrival(np.maximum(count - 1, 0), links) > moments)
            if not (more.any() or less.any()):
                return count
            count = count + more - less

    def _open(self, clients: Ints, free: Floats, trained: Ints, links: Floats) -> Floats:
        """When clients that can be reached in their windows only start from something new, once they are free."""
        opening = self._fleet.opens_all(clients, free)
        waits = self._reached(opening, links) <= trained
        arrives = self._arrival(trained, links)
        return np.where(waits, self._fleet.opens_all(clients, arrives), opening)
