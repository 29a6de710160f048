"""The plan: what happens when, as data. It can be printed, drawn, hashed, saved, compared, checked and computed.

A plan is a header and records in the order of events. It holds no rates and no weights: merges are linear, with
coefficients that are known when they are planned, and the executor multiplies by the rates.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..algorithms.protocol import Merge

if TYPE_CHECKING:
    from .simulator import Simulator

JobOutcome: TypeAlias = Literal["ended", "interrupted", "lost", "running"]


@dataclass(frozen=True, slots=True)
class Header:
    """What a plan is a plan of."""

    algorithm: str
    num_clients: int
    updates_per_round: int
    local_steps: int
    seed: int
    repeats: bool
    interruptible: bool
    lean: bool = False  # jobs that were never uploaded are left out, and a job is recorded when it is uploaded


@dataclass(frozen=True, slots=True)
class Job:
    """A client trained ``steps`` local steps from ``version``; recorded when it stopped, or at the plan's end."""

    client: int
    index: int
    version: int
    steps: int
    start: float
    end: float
    fate: JobOutcome


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The update of a job was on its way from ``start`` to ``end``; recorded when it left."""

    client: int
    index: int
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
    """A merge, when it happened, and the versions that nothing later in the plan needs."""

    time: float
    merge: Merge
    freed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Absence:
    """A client was lost at ``time`` and is back at ``back`` (inf: never)."""

    client: int
    time: float
    back: float


@dataclass(frozen=True, slots=True)
class Replacement:
    """A wait ran out: ``missing`` did not answer, ``drawn`` took their place (none: the round closed with fewer)."""

    time: float
    missing: tuple[int, ...]
    drawn: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stall:
    """Nobody is left, and nobody will return: the plan ends here."""

    time: float


Record: TypeAlias = Job | Uploaded | Sent | Round | Absence | Replacement | Stall


@dataclass(frozen=True)
class Plan:
    """A header and its records."""

    header: Header
    records: tuple[Record, ...]

    @classmethod
    def collect(cls, timeline: Simulator, rounds: int) -> Plan:
        """Plan so many rounds (fewer if every client is lost)."""
        with uncollected():
            return cls(timeline.header, tuple(records(timeline, rounds)))

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The merges, in order."""
        return tuple(record for record in self.records if isinstance(record, Round))

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """Every job that was started."""
        return tuple(record for record in self.records if isinstance(record, Job))

    @cached_property
    def uploads(self) -> tuple[Uploaded, ...]:
        """Every upload."""
        return tuple(record for record in self.records if isinstance(record, Uploaded))

    @cached_property
    def seconds(self) -> float:
        """The time of the last merge."""
        return self.rounds[-1].time if self.rounds else 0.0

    def lines(self) -> Iterator[str]:
        """The plan as lines of JSON, the same for the same plan on every machine."""
        from .plan_io import encode

        return itertools.chain([encode(self.header)], map(encode, self.records))

    def hash(self) -> str:
        """SHA-256 of the plan's lines: equal plans, equal hashes."""
        from .plan_io import Hashed

        line = Hashed()
        for item in (self.header, *self.records):
            line(item)
        return line.hash()

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, compressed if its name ends in .gz."""
        from .plan_io import write

        write(path, self.lines())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan back; a damaged or foreign file raises ``UserError``."""
        from .plan_io import read

        header, records = read(path)
        return cls(header, tuple(records))

    def check(self) -> None:
        """Verify every invariant; raises ``PlanError`` naming the first that fails."""
        from .plan_checks import check

        check(self)


def records(timeline: Simulator, rounds: int) -> Iterator[Record]:
    """The records of a plan of so many rounds, one after the other, without holding it."""
    for record in timeline if rounds > 0 else ():
        yield record
        if isinstance(record, Round) and record.merge.version >= rounds:
            break
    yield from timeline.unfinished()


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's search for cycles: planning makes none, but keeps millions of small things to search through."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def moment(record: Record) -> float:
    """When a record was made."""
    if isinstance(record, Job):
        return record.end
    return record.start if isinstance(record, Uploaded) else record.time
