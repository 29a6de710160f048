"""How fast clients are: compute, links, availability and loss, as pure functions of (seed, client, job).

The paper's time model is the default: a local step costs ``step_seconds`` on the fastest client, times a slowness of
the client's own drawn from U[1, 5]; a model takes megabytes · 8 / Mbit/s each way (decimal units). Every duration is
drawn when it begins and never measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, unknown
from ..rng import extend, extend_all, key, normal, normal_all, uniform, uniform_all

Floats = NDArray[np.float64]

MOST_CLIENTS = 100_000_000
BLOCK = 1 << 14  # clients whose speeds are made at a time


@dataclass(frozen=True, slots=True)
class _Kind:
    """A family of slowness: its arguments, their defaults, which are valid, and how keys become slowness."""

    arguments: tuple[str, ...]
    defaults: tuple[float, ...]
    valid: Callable[..., bool]
    draw: Callable[..., Floats]


def _two_speed(keys: NDArray[np.uint64], share: float, factor: float) -> Floats:
    return np.where(uniform_all(keys) < share, factor, 1.0)


SLOWNESS: dict[str, _Kind] = {
    "equal": _Kind((), (), lambda: True, lambda keys: np.ones(len(keys))),
    "uniform": _Kind(
        ("low", "high"),
        (1.0, 5.0),
        lambda low, high: 0 < low <= high,
        lambda keys, low, high: low + (high - low) * uniform_all(keys),
    ),
    "lognormal": _Kind(
        ("sigma",), (0.5,), lambda sigma: sigma >= 0, lambda keys, sigma: np.exp(sigma * normal_all(keys))
    ),
    "exponential": _Kind(
        ("mean",), (1.0,), lambda mean: mean >= 0, lambda keys, mean: 1.0 - mean * np.log1p(-uniform_all(keys))
    ),
    "two-speed": _Kind(
        ("share", "factor"), (0.2, 5.0), lambda share, factor: 0 <= share <= 1 and factor > 0, _two_speed
    ),
    "pareto": _Kind(
        ("shape",), (2.0,), lambda shape: shape > 0, lambda keys, shape: (1.0 - uniform_all(keys)) ** (-1.0 / shape)
    ),
}


@dataclass(frozen=True, slots=True)
class Slowness:
    """A distribution of slowness, written ``uniform(1, 5)``: 1 is the speed that ``step_seconds`` speaks of.

    equal · uniform(low, high) · lognormal(sigma) with median 1 · exponential(mean), 1 plus an exponential delay ·
    two-speed(share, factor), a share of the clients is that many times slower · pareto(shape) from 1 upwards.
    """

    kind: str
    arguments: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Slowness:
        """Read ``name`` or ``name(number, …)``."""
        match = re.fullmatch(r"\s*([a-z-]+)\s*(?:\(([^()]*)\))?\s*", text)
        if not match:
            raise UserError(f"slowness {text!r} cannot be read; write it like 'uniform(1, 5)' or 'equal'")
        name = match[1]
        if name not in SLOWNESS:
            raise unknown("slowness", name, SLOWNESS)
        kind = SLOWNESS[name]
        form = f"{name}({', '.join(kind.arguments)})"
        try:
            given = (
                tuple(float(part) for part in match[2].split(",")) if match[2] and match[2].strip() else kind.defaults
            )
        except ValueError:
            raise UserError(f"slowness {text!r} cannot be read; write it as {form} with numbers") from None
        if len(given) != len(kind.arguments) or not all(map(math.isfinite, given)) or not kind.valid(*given):
            raise UserError(f"slowness {text!r} is out of range; write it as {form} with sensible numbers")
        return cls(name, given)

    def draw(self, keys: NDArray[np.uint64]) -> Floats:
        """A slowness for every key."""
        return SLOWNESS[self.kind].draw(keys, *self.arguments)


@dataclass(frozen=True, slots=True)
class Windows:
    """When clients can be reached: ``on`` seconds, then ``off`` seconds, over and over; each in a phase of its own."""

    on: float
    off: float

    @classmethod
    def parse(cls, text: str) -> Windows | None:
        """Read ``always`` or ``windows(on, off)``."""
        if text.strip() == "always":
            return None
        match = re.fullmatch(r"\s*windows\(\s*([^,()]+),\s*([^,()]+)\)\s*", text)
        try:
            on, off = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
        except ValueError:
            on = off = 0.0
        if not (0 < on < math.inf and 0 <= off < math.inf):
            raise UserError(
                f"availability {text!r} cannot be read; write 'always' or 'windows(on_seconds, off_seconds)'"
            )
        return cls(on, off)

    def opens(self, phase: float, time: float) -> float:
        """The first moment at or after ``time`` at which a client of that phase (in [0, 1)) can be reached."""
        period = self.on + self.off
        shift = phase * period
        cycle = math.floor((time + shift) / period)
        if time + shift - cycle * period < self.on:
            return time
        # One moment for everybody who asks while it is closed, and open when it has come, whatever the rounding.
        return max(time, (cycle + 1) * period - shift)

    def opens_all(self, phases: Floats, times: Floats) -> Floats:
        """``opens`` for many clients, operation by operation; infinity stays infinite."""
        period = self.on + self.off
        shift = phases * period
        known = np.where(np.isfinite(times), times, 0.0)
        cycle = np.floor((known + shift) / period)
        opening = np.where(known + shift - cycle * period < self.on, known, (cycle + 1) * period - shift)
        return np.where(np.isfinite(times), np.maximum(known, opening), times)


@dataclass(frozen=True, slots=True)
class Trace:
    """What was measured of real clients: arrays over clients; absences (leaves at, is back at) of those that leave."""

    step_seconds: Floats
    up_mbps: Floats
    down_mbps: Floats
    absences: Mapping[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Fleet:
    """All clients of one run: how long everything takes, who is there, and who is lost."""

    num_clients: int
    seed: int = 0
    step_seconds: float = 0.0017
    slowness: Slowness = Slowness("uniform", (1.0, 5.0))
    jitter: float = 0.0
    uplink_mbps: float = 400.0
    downlink_mbps: float = 400.0
    latency_seconds: float = 0.0
    model_megabytes: float = 2.2
    availability: Windows | None = None
    failure_rate: float = 0.0
    return_seconds: float = 1.0
    trace: Trace | None = None

    def __post_init__(self) -> None:
        def need(good: bool, word: str, what: str) -> None:
            if not good:
                raise UserError(f"{word} is {getattr(self, word)}; {what}")

        need(self.num_clients >= 1, "num_clients", "at least one client is needed")
        need(0 < self.step_seconds < math.inf, "step_seconds", "it must be above zero")
        need(0 <= self.jitter < math.inf, "jitter", "it must be zero or more")
        need(self.uplink_mbps > 0, "uplink_mbps", "it must be above zero (inf: no time at all)")
        need(self.downlink_mbps > 0, "downlink_mbps", "it must be above zero (inf: no time at all)")
        need(0 <= self.latency_seconds < math.inf, "latency_seconds", "it must be zero or more")
        need(0 <= self.model_megabytes < math.inf, "model_megabytes", "it must be zero or more")
        need(0 <= self.failure_rate < 1, "failure_rate", "it is a probability, from 0 up to but not 1")
        need(self.return_seconds >= 0, "return_seconds", "it must be zero or more (inf: lost clients never return)")
        need(self.num_clients <= MOST_CLIENTS, "num_clients", f"at most {MOST_CLIENTS:,} can be planned")
        need(self.jitter <= 5, "jitter", "at most 5 makes sense: jobs would differ by factors of a million")
        if self.trace and len(self.trace.step_seconds) != self.num_clients:
            raise UserError(
                f"the trace describes {len(self.trace.step_seconds)} clients but num_clients is {self.num_clients}"
            )

        with np.errstate(over="ignore", divide="ignore"):
            quickest, slowest, largest = *self.step_range[:2], max(self.up_times.max(), self.down_times.max())
        if not (quickest >= 1e-9 and slowest <= 1e9 and largest <= 1e9):
            raise UserError(
                f"some client needs {slowest:g} s for a step and {largest:g} s for a model; steps must take from 1e-9 "
                "to 1e9 s and models at most 1e9 s, so change slowness, step_seconds, model_megabytes or the links"
            )

    def steps_between(self, first: int, stop: int) -> Floats:
        """Seconds per local step of the clients from ``first`` up to but not ``stop``, made from their keys."""
        if self.trace:
            return self.trace.step_seconds[first:stop]
        keys = extend_all(key(self.seed, "slowness"), np.arange(first, min(stop, self.num_clients)))
        return self.step_seconds * self.slowness.draw(keys)

    @cached_property
    def step_times(self) -> Floats:
        """Seconds per local step, for every client; 8 bytes each, so only for those who need all of them."""
        return self.steps_between(0, self.num_clients)

    @cached_property
    def step_range(self) -> tuple[float, float, float]:
        """The least, the most and the mean of the seconds that clients need for a local step; nothing is stored."""
        blocks = (self.steps_between(i, i + BLOCK) for i in range(0, self.num_clients, BLOCK))
        found = [(float(block.min()), float(block.max()), float(block.sum())) for block in blocks]
        lows, highs, sums = zip(*found, strict=True)
        return min(lows), max(highs), math.fsum(sums) / self.num_clients

    @cached_property
    def up_times(self) -> Floats:
        """Seconds from a client's upload to its arrival, for every client."""
        return self._transfer(self.trace.up_mbps if self.trace else self.uplink_mbps)

    @cached_property
    def down_times(self) -> Floats:
        """Seconds from the server's sending of a model to its arrival, for every client."""
        return self._transfer(self.trace.down_mbps if self.trace else self.downlink_mbps)

    def _transfer(self, mbps: float | Floats) -> Floats:
        seconds = self.latency_seconds + self.model_megabytes * 8.0 / np.asarray(mbps)
        return np.broadcast_to(np.asarray(seconds, np.float64), (self.num_clients,))  # one value, where all are alike

    @cached_property
    def _phase_key(self) -> int:
        return key(self.seed, "phase")

    @cached_property
    def _jitter_key(self) -> int:
        return key(self.seed, "jitter")

    @cached_property
    def _death_key(self) -> int:
        return key(self.seed, "death")

    def pace(self, client: int, job: int) -> float:
        """The factor by which this job is slower than the client's usual; its mean is one."""
        if self.jitter == 0.0:
            return 1.0
        z = normal(extend(extend(self._jitter_key, client), job))
        return math.exp(self.jitter * z - 0.5 * self.jitter**2)

    def dies_after(self, client: int, job: int) -> float | None:
        """The share of its time after which this job kills its client, or None."""
        if self.failure_rate == 0.0:
            return None
        u = uniform(extend(extend(self._death_key, client), job))
        return u / self.failure_rate if u < self.failure_rate else None

    def opens(self, client: int, time: float) -> float:
        """The first moment at or after ``time`` at which the client can be reached."""
        if self.availability is None:
            return time
        return self.availability.opens(uniform(extend(self._phase_key, client)), time)

    def opens_all(self, clients: NDArray[np.int64], times: Floats) -> Floats:
        """``opens`` for many clients and moments."""
        if self.availability is None:
            return times
        return self.availability.opens_all(uniform_all(extend_all(self._phase_key, clients)), times)

    @property
    def absences(self) -> Mapping[int, tuple[float, float]]:
        """For clients that leave at a given time: (leaves at, is back at; inf: never)."""
        return self.trace.absences if self.trace else {}

    @property
    def lossy(self) -> bool:
        """Whether clients can be lost."""
        return self.failure_rate > 0.0 or bool(self.absences)

    def round_trip(self, local_steps: int) -> float:
        """The longest time from sending a model to the arrival of its update, jitter aside."""
        closed = self.availability.off if self.availability else 0.0
        if self.trace is None:  # all links are alike, and rounding keeps order: the slowest client is the slowest
            step, up, down = self.step_range[1], float(self.up_times[0]), float(self.down_times[0])
            return closed + (step * local_steps + up + down)
        return closed + float(np.max(self.step_times * local_steps + self.up_times + self.down_times))


class StepTimes:
    """Seconds per local step by client, made block by block when first asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._blocks: dict[int, list[float]] = {}

    def __getitem__(self, client: int) -> float:
        number, place = divmod(client, BLOCK)
        block = self._blocks.get(number)
        if block is None:
            first = number * BLOCK
            block = self._blocks[number] = self._fleet.steps_between(first, first + BLOCK).tolist()
        return block[place]


PAPER = {
    # 17.0 and 31.4 MFLOP per local step at 10 GFLOP/s; 2.2 and 3.53 MB per model.
    "paper-fashionmnist": {"step_seconds": 0.00170, "model_megabytes": 2.2},
    "paper-cifar10": {"step_seconds": 0.00314, "model_megabytes": 3.53},
}
