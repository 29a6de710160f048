"""The plan: what happens when, as data. It can be printed, drawn, hashed, saved, compared, checked and computed."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import plan_checks, plan_io
from .availability_checks import available
from .devices import Fleet
from .records import Header, Job, Record, Round, Uploaded
from .simulator import Simulator


@dataclass(frozen=True)
class Plan:
    """A header, and records in the order of events."""

    header: Header
    records: tuple[Record, ...]

    @classmethod
    def collect(cls, simulator: Simulator, rounds: int, seconds: float = math.inf) -> Plan:
        """Plan that many rounds; fewer if every client is lost or the simulated time is up."""
        with without_gc():
            return cls(simulator.header, tuple(records(simulator, rounds, seconds)))

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
        """Return the plan as lines of JSON; equal plans have equal lines on every machine."""
        return itertools.chain([plan_io.encode(self.header)], map(plan_io.encode, self.records))

    def hash(self) -> str:
        """Return the SHA-256 of the plan's lines: equal plans have equal hashes."""
        line = plan_io.Hashed()
        for item in (self.header, *self.records):
            line(item)
        return line.hash()

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, compressed if its name ends in .gz."""
        for _ in plan_io.saved(path, self.header, self.records):
            pass

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file; raise ``UserError`` if it is damaged or not a plan."""
        header, found = plan_io.stream(path)
        return cls(header, tuple(found))

    def check(self, fleet: Fleet | None = None) -> None:
        """Check every invariant, availability if the fleet is given; raise ``PlanError`` at the first violation."""
        records = self.records if fleet is None else available(fleet, self.records)
        for _ in plan_checks.checked(self.header, records):
            pass


def records(simulator: Simulator, rounds: int, seconds: float = math.inf) -> Iterator[Record]:
    """Yield the records of a plan of that many rounds, within that simulated time, without storing them."""
    simulator.horizon = seconds
    for record in available(simulator.fleet, simulator if rounds > 0 else ()):
        yield record
        if isinstance(record, Round) and record.merge.version >= rounds:
            break
    yield from available(simulator.fleet, simulator.unfinished())


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector: planning creates no cycles, but millions of small objects that it would scan."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
