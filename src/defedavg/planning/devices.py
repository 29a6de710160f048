"""Clients as devices: speed, links, availability and failures, as pure functions of (seed, client, job).

The paper's time model is the default: a local step takes ``step_seconds`` times the slowness of the client, drawn from
U[1, 5]; a model takes megabytes · 8 / Mbit/s each way (decimal units). Every duration is drawn when it begins and never
measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..algorithms.protocol import UPLOADS
from ..errors import UserError
from ..rng import extend, extend_all, key, normal, portable, uniform, uniform_all
from . import phones
from .intervals import Availability, Floats, Intervals, Ints
from .slowness import PAPER_SLOWNESS, Slowness

MAX_CLIENTS = 100_000_000
MAX_WINDOW_SECONDS = 1e9
MAX_SIGMAS = 8.6  # no normal deviate that is drawn by key is farther from zero
TIMEOUT_SHARE, TIMEOUT_FACTOR = 0.95, 1.5
"""The automatic timeout: this share of the clients answers within it even if each takes this many times as long."""
BLOCK = 1 << 14  # clients whose speeds are drawn at a time
LINKS = ("equal", "phones")
PHONES = "phones"
"""The value of ``availability`` that stands for the hours of phones."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Availability: a client is reachable for ``on`` seconds, then not for ``off`` seconds, with a phase of its own."""

    on: float
    off: float

    @classmethod
    def parse(cls, text: str) -> Windows | None:
        """Read ``always`` or ``windows(on, off)``."""
        if text.strip() == "always":
            return None
        match = re.fullmatch(r"\s*windows\(\s*([^,()]+),\s*([^,()]+)\)\s*", text)
        try:
            on, off = map(float, match.groups()) if match else (0.0, 0.0)
        except ValueError:
            on = off = 0.0
        if not (0 < on <= MAX_WINDOW_SECONDS and 0 <= off <= MAX_WINDOW_SECONDS):
            raise UserError(
                f"availability {text!r} cannot be read; write 'always', 'phones' or 'windows(on_seconds, "
                f"off_seconds)', each at most {MAX_WINDOW_SECONDS:,.0f}"
            )
        return cls(on, off)

    def opens(self, phase: float, time: float) -> float:
        """Return the first time at or after ``time`` at which a client of that phase (in [0, 1)) is reachable."""
        period = self.on + self.off
        shift = phase * period
        cycle = math.floor((time + shift) / period)
        if time + shift - cycle * period < self.on:
            return time
        # Despite rounding, the result is the same for all times in one closed window, and the window is open then.
        return max(time, (cycle + 1) * period - shift)

    def opens_all(self, phases: Floats, times: Floats) -> Floats:
        """Return ``opens`` for many clients, by the same operations; infinity stays infinite."""
        period = self.on + self.off
        shift = phases * period
        known = np.where(np.isfinite(times), times, 0.0)
        cycle = np.floor((known + shift) / period)
        opening = np.where(known + shift - cycle * period < self.on, known, (cycle + 1) * period - shift)
        return np.where(np.isfinite(times), np.maximum(known, opening), times)


@dataclass(frozen=True, slots=True)
class PhasedWindows:
    """Windows of clients whose phases are drawn by key."""

    windows: Windows
    phases: int  # their key

    def opens(self, client: int, time: float) -> float:
        """Return the first time at or after ``time`` at which the client is reachable."""
        return self.windows.opens(uniform(extend(self.phases, client)), time)

    def opens_all(self, clients: Ints, times: Floats) -> Floats:
        """Return ``opens`` for many clients and times."""
        return self.windows.opens_all(uniform_all(extend_all(self.phases, clients)), times)


def parse_availability(text: str) -> Windows | str | None:
    """Read ``always``, ``phones`` or ``windows(on, off)``."""
    return PHONES if text.strip() == PHONES else Windows.parse(text)


@dataclass(frozen=True, slots=True)
class Trace:
    """Measurements of real clients: arrays over clients, and (leaves at, returns at) of clients that leave.

    Without ``intervals``, clients are reachable at all times. ``names`` is empty if clients are numbered.
    """

    step_seconds: Floats
    up_mbps: Floats
    down_mbps: Floats
    absences: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    intervals: Intervals | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fleet:
    """All clients of one run: durations, availability and failures."""

    num_clients: int
    seed: int = 0
    step_seconds: float = 0.0017
    slowness: Slowness = PAPER_SLOWNESS
    jitter: float = 0.0
    uplink_mbps: float = 400.0
    downlink_mbps: float = 400.0
    latency_seconds: float = 0.0
    model_megabytes: float = 2.2
    availability: Windows | str | None = None  # text: ``PHONES``
    failure_rate: float = 0.0
    return_seconds: float = 1.0
    trace: Trace | None = None
    upload: str = "auto"  # one of ``UPLOADS``: replaces the meaning of the algorithm
    links: str = "equal"  # one of ``LINKS``; equal: ``uplink_mbps`` and ``downlink_mbps`` for all

    def __post_init__(self) -> None:
        for name, valid, rule in (
            ("num_clients", self.num_clients >= 1, "at least one client is needed"),
            ("step_seconds", 0 < self.step_seconds < math.inf, "it must be above zero, and finite"),
            ("jitter", 0 <= self.jitter < math.inf, "it must be zero or more, and finite"),
            ("uplink_mbps", self.uplink_mbps > 0, "it must be above zero (inf: transfers take no time)"),
            ("downlink_mbps", self.downlink_mbps > 0, "it must be above zero (inf: transfers take no time)"),
            ("latency_seconds", 0 <= self.latency_seconds < math.inf, "it must be zero or more, and finite"),
            ("model_megabytes", 0 <= self.model_megabytes < math.inf, "it must be zero or more, and finite"),
            ("failure_rate", 0 <= self.failure_rate < 1, "it must be a probability below 1"),
            ("return_seconds", self.return_seconds >= 0, "it must be zero or more (inf: lost clients never return)"),
            ("num_clients", self.num_clients <= MAX_CLIENTS, f"at most {MAX_CLIENTS:,} can be planned"),
            ("upload", self.upload in UPLOADS, f"it must be one of {', '.join(UPLOADS)}"),
            ("links", self.links in LINKS, f"it must be one of {', '.join(LINKS)}"),
            ("jitter", self.jitter <= 5, "it must be at most 5, where jobs differ by factors of a million"),
        ):
            if not valid:
                raise UserError(f"{name} is {getattr(self, name)}; {rule}")
        found = len(self.trace.step_seconds) if self.trace else self.num_clients
        if found != self.num_clients:
            raise UserError(f"the trace has {found} clients but num_clients is {self.num_clients}; change one of them")
        if self.trace and self.trace.intervals and self.availability is not None:
            raise UserError("the trace says when clients are available, and availability does, too; set it to 'always'")
        with np.errstate(over="ignore", divide="ignore"):
            quickest, slowest, largest = *self.step_range[:2], max(self.up_times.max(), self.down_times.max())
        if not (quickest >= 1e-9 and slowest <= 1e9 and largest <= 1e9):
            raise UserError(
                f"some client needs {slowest:g} s for a step and {largest:g} s for a model; steps must take from 1e-9 "
                "to 1e9 s and models at most 1e9 s, so change slowness, step_seconds, model_megabytes, "
                "uplink_mbps, downlink_mbps or latency_seconds"
            )

    def steps_between(self, first: int, stop: int) -> Floats:
        """Return the seconds per local step of the clients from ``first`` to ``stop`` (exclusive), drawn by key."""
        if self.trace:
            return self.trace.step_seconds[first:stop]
        keys = extend_all(key(self.seed, "slowness"), np.arange(first, min(stop, self.num_clients)))
        return self.step_seconds * self.slowness.draw(keys)

    @cached_property
    def step_times(self) -> Floats:
        """Seconds per local step of every client; 8 bytes each, so use it only if all are needed."""
        return self.steps_between(0, self.num_clients)

    @cached_property
    def step_range(self) -> tuple[float, float, float]:
        """Minimum, maximum and mean of the seconds per local step over all clients; nothing is stored."""
        blocks = (self.steps_between(i, i + BLOCK) for i in range(0, self.num_clients, BLOCK))
        summaries = [(float(block.min()), float(block.max()), float(block.sum())) for block in blocks]
        lows, highs, sums = zip(*summaries, strict=True)
        return min(lows), max(highs), math.fsum(sums) / self.num_clients

    @cached_property
    def up_times(self) -> Floats:
        """Seconds of an upload, for every client."""
        return self._transfer(self._mbps[0])

    @cached_property
    def down_times(self) -> Floats:
        """Seconds of a download, for every client."""
        return self._transfer(self._mbps[1])

    @property
    def equal_links(self) -> bool:
        """Whether all clients have the same links."""
        return self.trace is None and self.links == "equal"

    @cached_property
    def _mbps(self) -> tuple[float | Floats, float | Floats]:
        if self.trace:
            return self.trace.up_mbps, self.trace.down_mbps
        if self.links == PHONES:
            return phones.links(self.seed, np.arange(self.num_clients))
        return self.uplink_mbps, self.downlink_mbps

    def _transfer(self, mbps: float | Floats) -> Floats:
        seconds = self.latency_seconds + self.model_megabytes * 8.0 / np.asarray(mbps)
        return np.broadcast_to(np.asarray(seconds, np.float64), (self.num_clients,))  # one value if all links are equal

    @cached_property
    def _keys(self) -> dict[str, int]:
        return {purpose: key(self.seed, purpose) for purpose in ("phase", "jitter", "death")}

    def pace(self, client: int, job: int) -> float:
        """Return the factor by which this job is slower than the client's average job; its mean is one."""
        if self.jitter == 0.0:
            return 1.0
        z = normal(extend(extend(self._keys["jitter"], client), job))
        return portable(math.exp(self.jitter * z - 0.5 * self.jitter**2))

    def dies_after(self, client: int, job: int) -> float | None:
        """Return the share of this job's duration after which its client fails, or None."""
        if self.failure_rate == 0.0:
            return None
        u = uniform(extend(extend(self._keys["death"], client), job))
        return u / self.failure_rate if u < self.failure_rate else None

    @cached_property
    def schedule(self) -> Availability | None:
        """When clients are reachable; None: at all times."""
        if self.trace and self.trace.intervals:
            return self.trace.intervals
        if isinstance(self.availability, Windows):
            return PhasedWindows(self.availability, self._keys["phase"])
        return None if self.availability is None else phones.PhoneHours(self.seed)

    def opens(self, client: int, time: float) -> float:
        """Return the first time at or after ``time`` at which the client is reachable; infinity if there is none."""
        return time if self.schedule is None else self.schedule.opens(client, time)

    def opens_all(self, clients: Ints, times: Floats) -> Floats:
        """Return ``opens`` for many clients and times."""
        return times if self.schedule is None else self.schedule.opens_all(clients, times)

    @cached_property
    def longest_closed(self) -> float:
        """The longest time after which a client that is reachable again is reachable."""
        if self.trace and self.trace.intervals:
            return self.trace.intervals.longest_closed
        if isinstance(self.availability, Windows):
            return self.availability.off
        return 0.0 if self.availability is None else phones.LONGEST_CLOSED

    @cached_property
    def period(self) -> float:
        """The longest time after which the availability of a client repeats; 0 if it does not, or never changes."""
        if self.trace and self.trace.intervals:
            periods = self.trace.intervals.periods
            return float(np.max(periods, initial=0.0, where=np.isfinite(periods)))
        if isinstance(self.availability, Windows):
            return self.availability.on + self.availability.off if self.availability.off else 0.0
        return 0.0 if self.availability is None else phones.DAY

    @cached_property
    def reachable_until(self) -> tuple[float, float]:
        """When the first client, and when the last one, is reachable for the last time; infinity: they always are."""
        ends = self.trace.intervals.ends_at if self.trace and self.trace.intervals else np.array([math.inf])
        return float(ends.min()), float(ends.max())

    @property
    def absences(self) -> Mapping[int, tuple[float, float]]:
        """(leaves at, returns at; inf: never) of clients that leave at a given time."""
        return self.trace.absences if self.trace else {}

    @property
    def fails(self) -> bool:
        """Whether clients can fail or leave, and lose what they have."""
        return self.failure_rate > 0.0 or bool(self.absences)

    @property
    def lossy(self) -> bool:
        """Whether a client may never answer: clients can fail or leave, or their intervals end."""
        return self.fails or math.isfinite(self.reachable_until[0])

    def longest_job(self, local_steps: int) -> float:
        """Return a time in which every job ends, whatever its jitter."""
        return self.step_range[1] * local_steps * math.exp(self.jitter * MAX_SIGMAS)

    @property
    def unreliable(self) -> bool:
        """Whether a request may remain unanswered for long: clients can fail, leave, or be unreachable for a time."""
        return self.lossy or self.longest_closed > 0.0

    def answer_times(self, local_steps: int) -> Floats:
        """Return the time of every client from sending it a model to the arrival of its update, while it is reachable.

        Jitter is not included.
        """
        return self.step_times * local_steps + self.up_times + self.down_times

    def automatic_timeout(self, local_steps: int) -> float | None:
        """Return how long a server waits for a client; None, without limit, if every client answers for sure."""
        if not self.unreliable:
            return None
        return TIMEOUT_FACTOR * float(np.quantile(self.answer_times(local_steps), TIMEOUT_SHARE))

    def last_arrival(self, local_steps: int) -> float:
        """Return a time after which no update arrives, because the intervals of all clients have ended."""
        return (self.reachable_until[1] + self.longest_job(local_steps) + float(self.up_times.max())) * (1.0 + 1e-9)

    def round_trip(self, local_steps: int) -> float:
        """Return the longest time from sending a model to the arrival of its update, without jitter."""
        return self.longest_closed + float(self.answer_times(local_steps).max())


class StepTimes:
    """Seconds per local step by client, drawn block by block on first use."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._blocks: dict[int, list[float]] = {}

    def __getitem__(self, client: int) -> float:
        number, offset = divmod(client, BLOCK)
        block = self._blocks.get(number)
        if block is None:
            first = number * BLOCK
            block = self._blocks[number] = self._fleet.steps_between(first, first + BLOCK).tolist()
        return block[offset]


PAPER: dict[str, dict[str, float]] = {
    # 17.0 and 31.4 MFLOP per local step at 10 GFLOP/s; 2.2 and 3.53 MB per model.
    "paper-fashionmnist": {"step_seconds": 0.00170, "model_megabytes": 2.2},
    "paper-cifar10": {"step_seconds": 0.00314, "model_megabytes": 3.53},
}
