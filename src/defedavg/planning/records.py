"""The header and the records of a plan: what happens when, as data.

Records hold no learning rates and no weights. Merges are linear with coefficients that are known when they are planned;
the executor multiplies them by the rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ..algorithms.protocol import FROM_VERSION, Merge, StateSpec

JobOutcome: TypeAlias = Literal["ended", "interrupted", "lost", "running"]


@dataclass(frozen=True, slots=True)
class Header:
    """What a plan was made for.

    ``allow_same_version`` and ``interruptible`` are those of the client policy. A ``sparse`` plan omits jobs that were
    never uploaded, and records a job when it is uploaded. ``state`` declares the state vectors that merges assign,
    ``job_start`` says from what jobs start, and ``correction`` what is added to their gradients (see
    ``ServerMachine``).
    """

    algorithm: str
    num_clients: int
    updates_per_round: int
    local_steps: int
    seed: int
    allow_same_version: bool
    interruptible: bool
    sparse: bool = False
    state: tuple[StateSpec, ...] = ()
    job_start: tuple[tuple[str, float], ...] = FROM_VERSION
    correction: tuple[tuple[str, float], ...] = ()

    @property
    def state_vectors(self) -> int:
        """The number of state vectors that are declared."""
        return sum(spec.count for spec in self.state)


class Job(NamedTuple):  # a plan has very many jobs and uploads, and a tuple is created in a third of the time
    """A client trained ``steps`` local steps from ``version``; recorded when it stopped, or at the end of the plan."""

    client: int
    index: int  # type: ignore[assignment] # instead of tuple.index, which nothing uses
    version: int
    steps: int
    start: float
    end: float
    outcome: JobOutcome


class Uploaded(NamedTuple):
    """The upload of a job's update lasted from ``start`` to ``end``; recorded when it started."""

    client: int
    index: int  # type: ignore[assignment] # instead of tuple.index, which nothing uses
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Sent:
    """The server sent a version, to one client or (None) to all."""

    version: int
    client: int | None
    time: float


@dataclass(frozen=True, slots=True)
class Round:
    """A merge, its time, and the versions that nothing later in the plan needs."""

    time: float
    merge: Merge
    freed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Absence:
    """A client failed or left at ``time`` and returns at ``back`` (inf: never)."""

    client: int
    time: float
    back: float


@dataclass(frozen=True, slots=True)
class Timeout:
    """``missing`` clients timed out; ``drawn`` replace them (none: the round continues with fewer)."""

    time: float
    missing: tuple[int, ...]
    drawn: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stall:
    """The plan ends here: no client has work, and none will return."""

    time: float


Record: TypeAlias = Job | Uploaded | Sent | Round | Absence | Timeout | Stall


def moment(record: Record) -> float:
    """Return the time at which a record was made."""
    if isinstance(record, Job):
        return record.end
    return record.start if isinstance(record, Uploaded) else record.time
