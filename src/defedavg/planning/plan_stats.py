"""Statistics of a plan, without training: speed, staleness, participation, idle time, timeouts, bytes, energy.

They are collected record by record, so that a plan need not be stored.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..algorithms.protocol import Merge, StateVector
from .client_totals import ClientTotals, Energy, Spread, gini
from .devices import Fleet
from .plan import Plan
from .ready_jobs import ReadyJobs
from .records import Absence, Header, Job, Record, Round, Stall, Timeout, Uploaded

QUARTERS = 4
NO_ENERGY = Energy()
NOTHING = Spread(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PlanStats:
    """Statistics of one plan; ``participation`` is per quarter of the clients, fastest first; 1 is an equal share.

    ``jobs_trained`` are the merged ones with at least one local step: what an executor must compute, so it is at most
    ``jobs_merged``, which is at most ``jobs_started``. None marks what a sparse plan does not contain, since it omits
    the jobs that no merge uses. ``state_vectors`` are those that are declared, ``state_peak`` those that have a value
    of their own at the same time, at most, and ``state_bytes`` is their size.

    ``horizon_seconds`` is the simulated time that was planned: the one that was asked for, or else that of the last
    merge. ``replacements`` counts the moments at which clients timed out, ``timed_out`` these clients and
    ``substitutes`` those drawn for them. ``coverage`` is the share of the clients of which an update was merged by 10,
    50 and 100 % of the horizon, ``never_heard`` the number of the others at its end, and ``gini`` the Gini coefficient
    of the merged updates per client. Bytes and joules per client are explained in ``client_totals``; ``energy`` is None
    if steps and bytes take none, and in sparse plans. ``batches_least``, ``ready_jobs_mean`` and ``ready_jobs_most``
    say how many jobs an executor of this plan can train at once (see ``ReadyJobs``).
    """

    algorithm: str
    updates_per_round: int
    seed: int
    rounds: int
    seconds: float
    seconds_per_round: float
    staleness_mean: float
    staleness_p95: float
    staleness_max: int
    participation: tuple[float, ...]
    idle_share: float | None
    jobs_started: int | None
    jobs_merged: int
    jobs_trained: int
    merged_share: float | None
    uplink_bytes: float
    downlink_bytes: float
    absences: int
    replacements: int
    stalled: bool
    state_vectors: int = 0
    state_peak: int = 0
    state_bytes: float = 0.0
    horizon_seconds: float = 0.0
    timeout_seconds: float | None = None
    timed_out: int = 0
    substitutes: int = 0
    coverage: tuple[float, ...] = (0.0, 0.0, 0.0)
    never_heard: int = 0
    gini: float = 0.0
    uplink_per_client: Spread = NOTHING
    downlink_per_client: Spread = NOTHING
    energy_joules: float | None = None
    energy_per_client: Spread | None = None
    batches_least: int = 0
    ready_jobs_mean: float = 0.0
    ready_jobs_most: int = 0


def summarise(plan: Plan, fleet: Fleet) -> PlanStats:
    """Return the statistics of a plan that was made for this fleet."""
    collector = PlanStatsCollector(plan.header, fleet)
    for record in plan.records:
        collector.add(record)
    return collector.stats()


class PlanStatsCollector:
    """Collects the records of a plan in order; its statistics are available at any time.

    ``vector_megabytes`` is the size of a state vector, where messages have another, and ``server_vectors`` is the
    number of those that the server optimiser keeps. ``horizon_seconds`` is the simulated time of the plan, where the
    plan does not end with its last merge.
    """

    def __init__(
        self,
        header: Header,
        fleet: Fleet,
        *,
        vector_megabytes: float | None = None,
        server_vectors: int = 0,
        horizon_seconds: float | None = None,
        timeout_seconds: float | None = None,
        energy: Energy = NO_ENERGY,
    ) -> None:
        self._vector_bytes = 1e6 * (fleet.model_megabytes if vector_megabytes is None else vector_megabytes)
        self._server_vectors = server_vectors
        self._state = _StateVectorCount(header)
        self._header = header
        self._fleet = fleet
        self._rounds = 0
        self._seconds = 0.0
        self._staleness: Counter[int] = Counter()
        self._clients = ClientTotals(fleet, energy)
        self._energy = energy
        self._horizon = horizon_seconds
        self._timeout = timeout_seconds
        self._timed_out = self._substitutes = 0
        self._ready = ReadyJobs()
        self._jobs = 0
        self._jobs_take_energy = energy.joules_per_step > 0.0
        self._counts: Counter[type[Record]] = Counter()  # of other records
        self._busy = None if header.sparse else _BusyTime()

    def add(self, record: Record) -> None:
        """Count the next record."""
        if type(record) is Job:
            self._jobs += 1
            if self._busy is not None:
                self._busy.recent.append(record)
            if self._jobs_take_energy:  # the only thing that the totals count of a job
                self._clients.add(record)
            return
        self._counts[type(record)] += 1
        self._clients.add(record)
        if isinstance(record, Uploaded):
            if self._busy is not None:
                self._busy.recent.append(record)
        elif isinstance(record, Round):
            self._rounds += 1
            self._seconds = record.time
            self._staleness.update(record.merge.staleness)
            self._ready.add(record)
            self._state.add(record.merge)
            if self._busy is not None:
                self._busy.merged()
        elif isinstance(record, Timeout):
            self._timed_out += len(record.missing)
            self._substitutes += len(record.drawn)

    @property
    def clients(self) -> ClientTotals:
        """What every client did in the records so far."""
        return self._clients

    def joules(self) -> NDArray[np.float64] | None:
        """Return the energy of every client; None if steps and bytes take none, and in sparse plans."""
        horizon = self._seconds if self._horizon is None else self._horizon
        return self._clients.joules(horizon) if self._energy and not self._header.sparse else None

    def stats(self) -> PlanStats:
        """Return the statistics of the records so far."""
        header, fleet, seen = self._header, self._fleet, self._counts
        values = np.array(sorted(self._staleness), dtype=np.int64)
        counts = np.array([self._staleness[value] for value in values.tolist()], dtype=np.int64)
        merged = int(counts.sum())
        started = None if header.sparse else self._jobs
        vectors = self._state.peak + (self._server_vectors if self._rounds else 0)
        horizon = self._seconds if self._horizon is None else self._horizon
        return PlanStats(
            algorithm=header.algorithm,
            updates_per_round=header.updates_per_round,
            seed=header.seed,
            rounds=self._rounds,
            seconds=self._seconds,
            seconds_per_round=self._seconds / self._rounds if self._rounds else float("nan"),
            staleness_mean=float(values @ counts) / merged if merged else 0.0,
            staleness_p95=_percentile(values, counts, 95) if merged else 0.0,
            staleness_max=int(values[-1]) if merged else 0,
            participation=_participation(self._clients.merged, fleet),
            idle_share=None if self._busy is None else self._busy.idle_share(horizon, fleet.num_clients),
            jobs_started=started,
            jobs_merged=merged,
            jobs_trained=self._ready.jobs,
            merged_share=None if started is None else merged / started if started else 0.0,
            absences=seen[Absence],
            replacements=seen[Timeout],
            stalled=seen[Stall] > 0,
            state_vectors=header.state_vectors + self._server_vectors,
            state_peak=vectors,
            state_bytes=vectors * self._vector_bytes,
            horizon_seconds=horizon,
            timeout_seconds=self._timeout,
            timed_out=self._timed_out,
            substitutes=self._substitutes,
            batches_least=self._ready.batches,
            ready_jobs_mean=self._ready.mean,
            ready_jobs_most=self._ready.most,
            **self._of_clients(horizon),
        )

    def _of_clients(self, horizon: float) -> dict[str, Any]:
        """Return the statistics over clients."""
        clients, size = self._clients, self._fleet.model_megabytes * 1e6
        joules = self.joules()
        (uploads, downloads), (up, down) = clients.messages, clients.traffic()
        return {
            "uplink_bytes": uploads * size,
            "downlink_bytes": downloads * size,
            "coverage": clients.coverage(horizon),
            "never_heard": clients.never_heard,
            "gini": gini(clients.merged),
            "uplink_per_client": up,
            "downlink_per_client": down,
            "energy_joules": None if joules is None else float(joules.sum()),
            "energy_per_client": None if joules is None else Spread.of(joules),
        }


def _percentile(values: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], share: float) -> float:
    """Return NumPy's linear percentile of values that occur ``counts`` times each."""
    ends = np.cumsum(counts)
    position = share / 100 * float(ends[-1] - 1)
    low, high = (float(values[np.searchsorted(ends, i, "right")]) for i in (math.floor(position), math.ceil(position)))
    return low + (high - low) * (position - math.floor(position))


def _participation(counts: np.ndarray[Any, Any], fleet: Fleet) -> tuple[float, ...]:
    order = np.argsort(fleet.step_times, kind="stable")
    parts = np.array_split(counts[order], min(QUARTERS, fleet.num_clients))
    mean = counts.mean()
    return tuple(float(part.mean() / mean) if mean else 0.0 for part in parts)


class _StateVectorCount:
    """The state vectors with a value of their own: those that have their initial value take no memory."""

    def __init__(self, header: Header) -> None:
        self._models = {spec.name for spec in header.state if spec.initial == "model"}
        self._live: set[StateVector] = set()
        self.peak = 0

    def add(self, merge: Merge) -> None:
        """Count the vectors after every assignment."""
        for assignment in merge.assignments:
            states = (c for vector, c in assignment.states if vector in self._live or vector.name in self._models)
            updates = (b for update, b in assignment.updates if update.steps)
            if assignment.target.name in self._models or any((*(a for _, a in assignment.past), *updates, *states)):
                self._live.add(assignment.target)
            else:
                self._live.discard(assignment.target)
            self.peak = max(self.peak, len(self._live))


class _BusyTime:
    """The time that clients spend training or sending up to the last merge; overlaps count once."""

    def __init__(self) -> None:
        self._total = 0.0
        self._reach: dict[int, float] = {}  # client -> time up to which it is counted
        self._open: dict[int, list[tuple[float, float]]] = {}  # client -> uploads since its last job
        self.recent: list[Job | Uploaded] = []  # since the last merge

    def merged(self) -> None:
        """Count the time of the records before this merge."""
        for record in self.recent:
            client, start, end = record.client, record.start, record.end
            spans = self._open.get(client)
            if type(record) is not Job:
                self._open.setdefault(client, []).append((start, end))
            elif spans:  # later records of its client start at its end or later
                total, self._reach[client] = self._sum(client, [*spans, (start, end)], end)
                self._total += total
                self._open[client] = [(end, other) for _, other in spans if other > end]
            else:  # the same sum, without uploads
                reach = self._reach.get(client, 0.0)
                if start < end and end > reach:
                    self._total += end - (start if start > reach else reach)
                    self._reach[client] = end
        self.recent.clear()

    def _sum(self, client: int, spans: list[tuple[float, float]], horizon: float) -> tuple[float, float]:
        total, reach = 0.0, self._reach.get(client, 0.0)
        for start, end in sorted(spans):
            stop = min(end, horizon)
            if start < horizon and stop > reach:
                total += stop - max(start, reach)
                reach = stop
        return total, reach

    def idle_share(self, horizon: float, clients: int) -> float:
        """Return the share of the clients' time up to the horizon in which they neither train nor send."""
        if not horizon:
            return 0.0
        spans = {client: list(uploads) for client, uploads in self._open.items()}
        for record in self.recent:
            spans.setdefault(record.client, []).append((record.start, record.end))
        recent = sum(self._sum(client, busy, horizon)[0] for client, busy in spans.items())
        return max(0.0, 1.0 - (self._total + recent) / (horizon * clients))  # rounding may exceed the time
