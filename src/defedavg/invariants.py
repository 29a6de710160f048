"""Every invariant of a plan, checked on the records alone.

1. An update is merged in at most one round, after it was uploaded and arrived.
2. 0 ≤ start version ≤ the version merged into; no client starts two jobs from one version (unless its algorithm lets
   it); a client does one job at a time, from a version that was there.
3. Versions count 1, 2, 3, …; past coefficients sum to one; no update pushes away from its client's work; a round merges
   as many updates as it should, fewer only where a wait ran out.
4. Nothing later needs a version that was freed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .plan import Absence, Job, Replacement, Round, Sent, Uploaded

if TYPE_CHECKING:
    from .plan import Plan


class PlanError(Exception):
    """A plan that breaks an invariant."""


def _need(good: bool, what: str) -> None:
    if not good:
        raise PlanError(what)


def check(plan: Plan) -> None:
    """Raise ``PlanError`` at the first invariant that does not hold."""
    _Check(plan).run()


class _Check:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.header = plan.header
        self.now = 0.0
        self.version = 0
        self.made = {0: 0.0}  # versions that exist, with the time they were made
        self.jobs: dict[tuple[int, int], Job] = {}
        self.arrivals: dict[tuple[int, int], float] = {}
        self.merged: set[tuple[int, int]] = set()
        self.last: dict[int, Job] = {}
        self.starts: set[tuple[int, int]] = set()
        self.short = False

    def run(self) -> None:
        for record in self.plan.records:
            if isinstance(record, Job):
                self._job(record)
            elif isinstance(record, Uploaded):
                self._uploaded(record)
            elif isinstance(record, Round):
                self._round(record)
            elif isinstance(record, Sent):
                self._clock(record.time)
                _need(record.version in self.made, f"version {record.version} was sent, but is not there")
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
        _need(record.back >= record.time, f"client {record.client} is back before it left")
        job = self.last.get(record.client)
        if job is not None and self.arrivals.get((job.client, job.index), math.inf) >= record.time:
            self.starts.discard((job.client, job.version))

    def _clock(self, time: float) -> None:
        _need(math.isfinite(time) and time >= self.now, f"time runs backwards: {time} after {self.now}")
        self.now = time

    def _job(self, job: Job) -> None:
        name = f"job {job.index} of client {job.client}"
        _need(0 <= job.client < self.header.num_clients, f"{name}: no such client")
        if job.fate == "running":
            _need(job.end >= self.now, f"{name} still runs after its end")
        else:
            self._clock(job.end)
        _need(job.start <= job.end, f"{name} ends before it starts")
        _need(job.version in self.made, f"{name} starts from version {job.version}, which is not there")
        _need(job.start >= self.made[job.version], f"{name} starts before version {job.version} was made")
        full = job.fate in ("ended", "running")
        _need(not full or job.steps == self.header.local_steps, f"{name} has {job.steps} steps")
        _need(job.steps <= self.header.local_steps, f"{name} has more than {self.header.local_steps} steps")
        _need(job.fate != "interrupted" or self.header.interruptible, f"{name} was interrupted")
        before = self.last.get(job.client)
        _need(job.index == (before.index + 1 if before else 0), f"{name} is out of order")
        _need(before is None or job.start >= before.end, f"{name} starts while the one before is running")
        _need(
            self.header.repeats or (job.client, job.version) not in self.starts, f"{name} repeats version {job.version}"
        )
        self.starts.add((job.client, job.version))
        self.last[job.client] = job
        self.jobs[job.client, job.index] = job

    def _uploaded(self, upload: Uploaded) -> None:
        key = (upload.client, upload.index)
        self._clock(upload.start)
        _need(key in self.jobs, f"an upload of {key}, which is no finished job")
        _need(self.jobs[key].fate in ("ended", "interrupted"), f"an upload of {key}, which was lost")
        _need(upload.start >= self.jobs[key].end, f"an upload of {key} before its end")
        _need(upload.end >= upload.start, f"an upload of {key} that arrives before it leaves")
        _need(key not in self.arrivals, f"a second upload of {key}")
        self.arrivals[key] = upload.end

    def _round(self, record: Round) -> None:
        self._clock(record.time)
        merge = record.merge
        name = f"round {merge.version}"
        _need(merge.version == self.version + 1, f"{name} follows round {self.version}")
        for version, _ in merge.past:
            _need(version in self.made, f"{name} needs version {version}, which is not there")
        _need(abs(math.fsum(a for _, a in merge.past) - 1.0) < 1e-9, f"{name}: past coefficients do not sum to one")
        for update, weight in merge.updates:
            key = (update.client, update.index)
            _need(key in self.jobs, f"{name} merges {key}, which is no finished job")
            job = self.jobs[key]
            _need((job.version, job.steps) == (update.version, update.steps), f"{name}: {key} is not as it was trained")
            _need(self.arrivals.get(key, math.inf) <= record.time, f"{name} merges {key} before it arrived")
            _need(key not in self.merged, f"{key} is merged twice")
            _need(0 <= update.version <= self.version, f"{name}: start version {update.version} is out of range")
            _need(update.version in self.made, f"{name} needs version {update.version}, which was freed")
            _need(weight < 0.0 and math.isfinite(weight), f"{name}: coefficient {weight} of {key}")
            self.merged.add(key)
        limit = self.header.updates_per_round
        _need(len(merge.updates) <= limit, f"{name} merges {len(merge.updates)} updates; {limit} are asked for")
        _need(bool(merge.updates), f"{name} merges nothing")
        if not self.header.interruptible:  # there a weight also evens out unequal numbers of steps
            total = -math.fsum(weight for _, weight in merge.updates)
            _need(total <= 1.0 + 1e-9, f"{name}: the weights of its updates sum to {total}")
            full = len(merge.updates) == limit or abs(total - 1.0) < 1e-9
            _need(full or self.short, f"{name} merges fewer updates than it should")
        self.short = False
        self.version = merge.version
        self.made[merge.version] = record.time
        for version in record.freed:
            _need(version in self.made and version != self.version, f"{name} frees version {version}")
            del self.made[version]
