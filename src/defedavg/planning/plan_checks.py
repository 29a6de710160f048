"""The invariants of a plan, checked record by record.

1. An update is merged in at most one round, after it was uploaded and arrived.
2. 0 ≤ start version ≤ the version merged into. No client starts two jobs from one version (unless its policy allows
   it). A client trains one job at a time, from a version that exists.
3. Versions count 1, 2, 3, …; coefficients of models sum to one; coefficients of updates are negative; a round merges n
   updates, fewer only after a timeout.
4. Nothing uses a version after it was freed.
5. Merges name declared state vectors and their own updates only. Jobs start from, and are corrected by, declared
   vectors of their client; none of these is assigned while an update that started before is still to be merged.

Memory is bounded by the clients and the versions in use, not by the length of the plan: what concerns a freed version
is forgotten with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NoReturn

from ..algorithms.protocol import VERSION, Merge, Update
from ..errors import first_line
from .action_checks import SUM_TOLERANCE, refuse
from .records import Absence, Header, Job, Record, Round, Sent, Timeout, Uploaded
from .state_checks import DeclaredState, declaration_fault


class PlanError(Exception):
    """A plan violates an invariant."""


def _fail(message: str) -> NoReturn:
    """Raise ``PlanError``; after ``or``, the message is formatted only if it is needed."""
    raise PlanError(message)


def _name(job: Job) -> str:
    return f"job {job.index} of client {job.client}"


def checked(header: Header, records: Iterable[Record]) -> Iterator[Record]:
    """Yield the same records, each after its checks; raise ``PlanError`` at the first violation."""
    state = _PlanState(header)
    for record in records:
        if type(record) is not Job or not state.add_usual(record):
            state.check(record)
        yield record


def checked_for_use(header: Header, records: Iterable[Record]) -> Iterator[Record]:
    """Yield the same records, each after its checks; the first violation is ``UserError`` that names the algorithm."""
    try:
        yield from checked(header, records)
    except PlanError as error:
        refuse(header.algorithm, f"the plan is not valid: {first_line(error)}; correct the merges that it returns")


class _JobsOfVersion:
    """The jobs that started from one version, by (client, index)."""

    __slots__ = ("arrivals", "clients", "jobs", "merged")

    def __init__(self) -> None:
        self.clients: set[int] = set()
        self.jobs: dict[tuple[int, int], Job] = {}
        self.arrivals: dict[tuple[int, int], float] = {}
        self.merged: set[tuple[int, int]] = set()


class _PlanState:
    def __init__(self, header: Header) -> None:
        self.header = header
        self.now = 0.0
        self.version = 0
        self.created = {0: 0.0}  # versions that exist, with the time of their merge
        self.jobs_of = {0: _JobsOfVersion()}  # by start version, while it exists
        self.last: dict[int, Job] = {}  # client -> its last job
        self.usual_steps = None if header.sparse else header.local_steps  # of ``add_usual``
        self.timed_out = False  # since the last merge
        self.state = DeclaredState(header.state)
        self.start_names = {name for name, _ in (*header.job_start, *header.correction)} - {VERSION}
        self.start_assigned: dict[int, int] = {}  # client -> the version in whose merge its start was assigned

        fault = declaration_fault(header.state, header.num_clients, header.job_start, header.correction)
        fault is None or _fail(fault)

    def add_usual(self, job: Job) -> bool:
        """Record a complete job that passes every check of ``_job``, as nearly all do; otherwise change nothing."""
        client, index, version, steps, start, end, outcome = job
        created, last, header = self.created.get(version), self.last.get(client), self.header
        if (
            outcome != "ended"
            or steps != self.usual_steps
            or created is None
            or not (created <= start <= end and self.now <= end < math.inf)
            or not (index == 0 if last is None else index == last.index + 1 and start >= last.end)
            or not 0 <= client < header.num_clients
        ):
            return False
        same = self.jobs_of[version]
        if client in same.clients and not header.allow_same_version:
            return False
        same.clients.add(client)
        same.jobs[client, index] = self.last[client] = job
        self.now = end
        return True

    def check(self, record: Record) -> None:
        """Check a record and update the state."""
        if isinstance(record, Job):
            self._job(record)
        elif isinstance(record, Uploaded):
            self._upload(record)
        elif isinstance(record, Round):
            self._round(record)
        else:
            self._clock(record.time)
            if isinstance(record, Sent):
                record.version in self.created or _fail(f"version {record.version} was sent, but does not exist")
            elif isinstance(record, Timeout):
                self.timed_out = True
            elif isinstance(record, Absence):
                self._absence(record)

    def _clock(self, time: float) -> None:
        (math.isfinite(time) and time >= self.now) or _fail(f"the time {time} follows the time {self.now}")
        self.now = time

    def _absence(self, record: Absence) -> None:
        """Allow a client to repeat from the same version what it lost."""
        record.back >= record.time or _fail(f"client {record.client} returns before it left")
        last = self.last.get(record.client)
        same = None if last is None else self.jobs_of.get(last.version)
        if last and same is not None and same.arrivals.get((record.client, last.index), math.inf) >= record.time:
            same.clients.discard(record.client)

    def _job(self, job: Job) -> None:
        0 <= job.client < self.header.num_clients or _fail(f"{_name(job)}: the client is out of range")
        if job.outcome == "running":
            job.end >= self.now or _fail(f"{_name(job)} is running after its end")
        elif self.header.sparse:  # recorded with its upload, some time after its end
            math.isfinite(job.end) or _fail(f"{_name(job)} ends at {job.end}")
        else:
            self._clock(job.end)
        job.start <= job.end or _fail(f"{_name(job)} ends before it starts")
        job.version in self.created or _fail(f"{_name(job)} starts from version {job.version}, which does not exist")
        job.start >= self.created[job.version] or _fail(f"{_name(job)} starts before version {job.version} exists")
        if job.outcome != "ended" or job.steps != self.header.local_steps:
            self._job_steps(job)
        self._job_order(job)

    def _job_steps(self, job: Job) -> None:
        complete = job.outcome in ("ended", "running")
        not complete or job.steps == self.header.local_steps or _fail(f"{_name(job)} has {job.steps} steps")
        job.steps <= self.header.local_steps or _fail(f"{_name(job)} has more than {self.header.local_steps} steps")
        job.outcome != "interrupted" or self.header.interruptible or _fail(f"{_name(job)} was interrupted")

    def _job_order(self, job: Job) -> None:
        last = self.last.get(job.client)
        index, end = (-1, -math.inf) if last is None else (last.index, last.end)
        job.index == index + 1 or (self.header.sparse and job.index > index) or _fail(f"{_name(job)} is out of order")
        job.start >= end or _fail(f"{_name(job)} starts while the previous one is running")
        same = self.jobs_of[job.version]
        if not self.header.allow_same_version:
            job.client not in same.clients or _fail(f"{_name(job)} repeats version {job.version}")
        same.clients.add(job.client)
        same.jobs[job.client, job.index] = self.last[job.client] = job

    def _upload(self, upload: Uploaded) -> None:
        key = (upload.client, upload.index)
        self._clock(upload.start)
        same = self._jobs_with(key)
        if same is None:
            known = upload.client in self.last and upload.index <= self.last[upload.client].index
            why = "a second one, or its version was freed" if known else "it is not a finished job"
            raise PlanError(f"an upload of {key}: {why}")
        job = same.jobs[key]
        job.outcome in ("ended", "interrupted") or _fail(f"an upload of {key}, which was lost")
        upload.start >= job.end or _fail(f"an upload of {key} before its end")
        upload.end >= upload.start or _fail(f"an upload of {key} that ends before it starts")
        key not in same.arrivals or _fail(f"a second upload of {key}")
        same.arrivals[key] = upload.end

    def _jobs_with(self, key: tuple[int, int]) -> _JobsOfVersion | None:
        """Return the jobs among which a job is recorded: mostly those of its client's last version."""
        last = self.last.get(key[0])
        same = self.jobs_of.get(last.version) if last is not None and last.index == key[1] else None
        if same is not None:
            return same
        return next((jobs for jobs in self.jobs_of.values() if key in jobs.jobs), None)

    def _round(self, record: Round) -> None:
        self._clock(record.time)
        merge = record.merge
        merge.version == self.version + 1 or _fail(f"round {merge.version} follows round {self.version}")
        name = f"round {merge.version}"
        for version, _ in merge.past:
            version in self.created or _fail(f"{name} uses version {version}, which does not exist")
        abs(self.state.affine_sum(merge) - 1.0) <= SUM_TOLERANCE or _fail(
            f"{name}: past coefficients do not sum to one"
        )
        fault = self.state.fault(merge, self.created.__contains__)
        fault is None or _fail(f"{name}: {fault}")
        for update, weight in merge.updates:
            self._merged_update(name, update, weight, weight < 0.0 or (weight == 0.0 and update in merge.assigned))
        self._starts_assigned(merge)
        self._merge_size(name, merge)
        self.timed_out = False
        self.version = merge.version
        self.created[merge.version] = record.time
        self.jobs_of[merge.version] = _JobsOfVersion()
        for version in record.freed:
            (version in self.created and version != self.version) or _fail(f"{name} frees version {version}")
            del self.created[version], self.jobs_of[version]

    def _starts_assigned(self, merge: Merge) -> None:
        if self.start_names:
            targets = (assignment.target for assignment in merge.assignments)
            self.start_assigned |= {t.index: merge.version for t in targets if t.name in self.start_names}

    def _merged_update(self, name: str, update: Update, weight: float, legal: bool) -> None:
        key = (update.client, update.index)
        same = self.jobs_of.get(update.version)
        job = None if same is None else same.jobs.get(key)
        if same is None or job is None:
            self._jobs_with(key) is None or _fail(f"{name} merges {key} not as it was trained")
            0 <= update.version <= self.version or _fail(f"{name}: start version {update.version} is out of range")
            update.version in self.created or _fail(f"{name} uses version {update.version}, which was freed")
            raise PlanError(f"{name} merges {key}, which is not a finished job")
        job.steps == update.steps or _fail(f"{name} merges {key} not as it was trained")
        same.arrivals.get(key, math.inf) <= self.now or _fail(f"{name} merges {key} before it arrived")
        key not in same.merged or _fail(f"{key} is merged twice")
        (legal and math.isfinite(weight)) or _fail(f"{name}: coefficient {weight} of {key}")
        started = update.version >= self.start_assigned.get(update.client, 0)
        started or _fail(f"{name} merges {key}, whose start or correction was assigned after it began")
        same.merged.add(key)

    def _merge_size(self, name: str, merge: Merge) -> None:
        limit = self.header.updates_per_round
        len(merge.updates) <= limit or _fail(f"{name} merges {len(merge.updates)} updates, more than {limit}")
        bool(merge.updates) or _fail(f"{name} merges nothing")
        if not self.header.interruptible:  # otherwise weights also compensate for unequal numbers of steps
            total = -math.fsum(weight for _, weight in merge.updates)
            total <= 1.0 + 1e-9 or _fail(f"{name}: the weights of its updates sum to {total}")
            # Weights of an algorithm with state need not sum to one, so a round after client failures is not known.
            full = len(merge.updates) == limit or abs(total - 1.0) < 1e-9 or bool(self.header.state)
            full or self.timed_out or _fail(f"{name} merges {len(merge.updates)} updates, fewer than {limit}")
