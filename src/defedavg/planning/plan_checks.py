"""Every invariant of a plan, checked on the records alone, one after the other.

1. An update is merged in at most one round, after it was uploaded and arrived.
2. 0 ≤ start version ≤ the version merged into; no client starts two jobs from one version (unless its algorithm lets
   it); a client does one job at a time, from a version that was there.
3. Versions count 1, 2, 3, …; past coefficients sum to one; no update pushes away from its client's work; a round merges
   as many updates as it should, fewer only where a wait ran out.
4. Nothing later needs a version that was freed.

What is remembered is bounded by the clients and by the versions that are still needed, not by the length of the plan:
whatever concerns a freed version is forgotten with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn

from .plan import Absence, Header, Job, Record, Replacement, Round, Sent, Uploaded

if TYPE_CHECKING:
    from .plan import Plan


class PlanError(Exception):
    """A plan that breaks an invariant."""


def _fail(what: str) -> NoReturn:
    """For ``good or _fail(…)``: the words of a failure are made only when there is one, since plans are long."""
    raise PlanError(what)


def _name(job: Job) -> str:
    return f"job {job.index} of client {job.client}"


def check(plan: Plan) -> None:
    """Raise ``PlanError`` at the first invariant that does not hold."""
    for _ in checked(plan.header, plan.records):
        pass


def checked(header: Header, records: Iterable[Record]) -> Iterator[Record]:
    """The same records, each checked before it is given on; raises ``PlanError``."""
    state = _Check(header)
    for record in records:
        state.take(record)
        yield record


class _FinishedJobs:
    """What is known of the jobs that started from one version, by (client, index)."""

    __slots__ = ("arrivals", "clients", "jobs", "merged")

    def __init__(self) -> None:
        self.clients: set[int] = set()
        self.jobs: dict[tuple[int, int], Job] = {}
        self.arrivals: dict[tuple[int, int], float] = {}
        self.merged: set[tuple[int, int]] = set()


class _Check:
    def __init__(self, header: Header) -> None:
        self.header = header
        self.now = 0.0
        self.version = 0
        self.made = {0: 0.0}  # versions that exist, with the time they were made
        self.done = {0: _FinishedJobs()}  # by start version, as long as it exists
        self.last: dict[int, tuple[int, int, float]] = {}  # by client: index, version and end of the last job
        self.short = False

    def take(self, record: Record) -> None:
        if isinstance(record, Job):
            self._job(record)
        elif isinstance(record, Uploaded):
            self._uploaded(record)
        elif isinstance(record, Round):
            self._round(record)
        elif isinstance(record, Sent):
            self._clock(record.time)
            record.version in self.made or _fail(f"version {record.version} was sent, but is not there")
        elif isinstance(record, Replacement):
            self._clock(record.time)
            self.short = True
        elif isinstance(record, Absence):
            self._clock(record.time)
            self._absence(record)
        else:
            self._clock(record.time)

    def _absence(self, record: Absence) -> None:
        """What was lost with a client may be done again from the same version."""
        record.back >= record.time or _fail(f"client {record.client} is back before it left")
        index, version, _ = self.last.get(record.client, (-1, -1, 0.0))
        own = self.done.get(version)
        if own is not None and own.arrivals.get((record.client, index), math.inf) >= record.time:
            own.clients.discard(record.client)

    def _clock(self, time: float) -> None:
        (math.isfinite(time) and time >= self.now) or _fail(f"time runs backwards: {time} after {self.now}")
        self.now = time

    def _job(self, job: Job) -> None:
        0 <= job.client < self.header.num_clients or _fail(f"{_name(job)}: no such client")
        if job.fate == "running":
            job.end >= self.now or _fail(f"{_name(job)} still runs after its end")
        elif self.header.lean:  # recorded with its upload, some time after its end
            math.isfinite(job.end) or _fail(f"{_name(job)} ends at {job.end}")
        else:
            self._clock(job.end)
        job.start <= job.end or _fail(f"{_name(job)} ends before it starts")
        job.version in self.made or _fail(f"{_name(job)} starts from version {job.version}, which is not there")
        job.start >= self.made[job.version] or _fail(f"{_name(job)} starts before version {job.version} was made")
        full = job.fate in ("ended", "running")
        not full or job.steps == self.header.local_steps or _fail(f"{_name(job)} has {job.steps} steps")
        job.steps <= self.header.local_steps or _fail(f"{_name(job)} has more than {self.header.local_steps} steps")
        job.fate != "interrupted" or self.header.interruptible or _fail(f"{_name(job)} was interrupted")
        index, _, end = self.last.get(job.client, (-1, -1, -math.inf))
        job.index == index + 1 or (self.header.lean and job.index > index) or _fail(f"{_name(job)} is out of order")
        job.start >= end or _fail(f"{_name(job)} starts while the one before is running")
        own = self.done[job.version]
        self.header.repeats or job.client not in own.clients or _fail(f"{_name(job)} repeats version {job.version}")
        own.clients.add(job.client)
        own.jobs[job.client, job.index] = job
        self.last[job.client] = (job.index, job.version, job.end)

    def _uploaded(self, upload: Uploaded) -> None:
        key = (upload.client, upload.index)
        self._clock(upload.start)
        own = self._found(key)
        if own is None:
            known = upload.index <= self.last.get(upload.client, (-1, -1, 0.0))[0]
            why = "a second upload, or one that nobody needs: its version was freed" if known else "no finished job"
            raise PlanError(f"an upload of {key}, which is {why}")
        job = own.jobs[key]
        job.fate in ("ended", "interrupted") or _fail(f"an upload of {key}, which was lost")
        upload.start >= job.end or _fail(f"an upload of {key} before its end")
        upload.end >= upload.start or _fail(f"an upload of {key} that arrives before it leaves")
        key not in own.arrivals or _fail(f"a second upload of {key}")
        own.arrivals[key] = upload.end

    def _found(self, key: tuple[int, int]) -> _FinishedJobs | None:
        """Where a job is remembered: mostly with its client's last."""
        index, version, _ = self.last.get(key[0], (-1, -1, 0.0))
        own = self.done.get(version) if index == key[1] else None
        if own is not None:
            return own
        return next((own for own in self.done.values() if key in own.jobs), None)

    def _round(self, record: Round) -> None:
        self._clock(record.time)
        merge = record.merge
        name = f"round {merge.version}"
        merge.version == self.version + 1 or _fail(f"{name} follows round {self.version}")
        for version, _ in merge.past:
            version in self.made or _fail(f"{name} needs version {version}, which is not there")
        abs(math.fsum(a for _, a in merge.past) - 1.0) < 1e-9 or _fail(f"{name}: past coefficients do not sum to one")
        for update, weight in merge.updates:
            key = (update.client, update.index)
            own = self.done.get(update.version)
            job = None if own is None else own.jobs.get(key)
            if own is None or job is None:
                self._found(key) is None or _fail(f"{name} merges {key} not as it was trained")
                0 <= update.version <= self.version or _fail(f"{name}: start version {update.version} is out of range")
                update.version in self.made or _fail(f"{name} needs version {update.version}, which was freed")
                raise PlanError(f"{name} merges {key}, which is no finished job")
            job.steps == update.steps or _fail(f"{name} merges {key} not as it was trained")
            own.arrivals.get(key, math.inf) <= record.time or _fail(f"{name} merges {key} before it arrived")
            key not in own.merged or _fail(f"{key} is merged twice")
            (weight < 0.0 and math.isfinite(weight)) or _fail(f"{name}: coefficient {weight} of {key}")
            own.merged.add(key)
        limit = self.header.updates_per_round
        len(merge.updates) <= limit or _fail(f"{name} merges {len(merge.updates)} updates; {limit} are asked for")
        bool(merge.updates) or _fail(f"{name} merges nothing")
        if not self.header.interruptible:  # there a weight also evens out unequal numbers of steps
            total = -math.fsum(weight for _, weight in merge.updates)
            total <= 1.0 + 1e-9 or _fail(f"{name}: the weights of its updates sum to {total}")
            full = len(merge.updates) == limit or abs(total - 1.0) < 1e-9
            full or self.short or _fail(f"{name} merges fewer updates than it should")
        self.short = False
        self.version = merge.version
        self.made[merge.version] = record.time
        self.done[merge.version] = _FinishedJobs()
        for version in record.freed:
            (version in self.made and version != self.version) or _fail(f"{name} frees version {version}")
            del self.made[version], self.done[version]
