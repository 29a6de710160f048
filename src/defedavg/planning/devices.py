"""Clients as devices: speed, links, availability and failures, as pure functions of (seed, client, job).

The paper's time model is the default: a local step takes ``step_seconds`` times the slowness of the client, drawn from
U[1, 5]; a model takes megabytes · 8 / Mbit/s each way (decimal units). Every duration is drawn when it begins and never
measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..algorithms.protocol import UPLOADS
from ..errors import UserError, unknown
from ..rng import extend, extend_all, key, normal, normal_all, uniform, uniform_all

Floats = NDArray[np.float64]

MAX_CLIENTS = 100_000_000
MAX_WINDOW_SECONDS = 1e9
TIMEOUT_SHARE, TIMEOUT_FACTOR = 0.95, 1.5
"""The automatic timeout: this share of the clients answers within it even if each takes this many times as long."""
BLOCK = 1 << 14  # clients whose speeds are drawn at a time


@dataclass(frozen=True, slots=True)
class _Distribution:
    """A family of distributions: its arguments, their defaults, their valid range, and the draw by key."""

    arguments: tuple[str, ...]
    defaults: tuple[float, ...]
    valid: Callable[..., bool]
    draw: Callable[..., Floats]


SLOWNESS: dict[str, _Distribution] = {
    "equal": _Distribution((), (), lambda: True, lambda keys: np.ones(len(keys))),
    "uniform": _Distribution(
        ("low", "high"),
        (1.0, 5.0),
        lambda low, high: 0 < low <= high,
        lambda keys, low, high: low + (high - low) * uniform_all(keys),
    ),
    "inverse-uniform": _Distribution(
        ("low", "high"),
        (1.0, 5.0),
        lambda low, high: 0 < low <= high,
        lambda keys, low, high: high / (low + (high - low) * uniform_all(keys)),
    ),
    "lognormal": _Distribution(
        ("sigma",), (0.5,), lambda sigma: sigma >= 0, lambda keys, sigma: np.exp(sigma * normal_all(keys))
    ),
    "exponential": _Distribution(
        ("mean",), (1.0,), lambda mean: mean >= 0, lambda keys, mean: 1.0 - mean * np.log1p(-uniform_all(keys))
    ),
    "two-speed": _Distribution(
        ("share", "factor"),
        (0.2, 5.0),
        lambda share, factor: 0 <= share <= 1 and factor > 0,
        lambda keys, share, factor: np.where(uniform_all(keys) < share, factor, 1.0),
    ),
    "pareto": _Distribution(
        ("shape",), (2.0,), lambda shape: shape > 0, lambda keys, shape: (1.0 - uniform_all(keys)) ** (-1.0 / shape)
    ),
}


@dataclass(frozen=True, slots=True)
class Slowness:
    """A distribution of slowness, written like ``uniform(1, 5)``; at slowness 1 a local step takes ``step_seconds``.

    equal · uniform(low, high) · inverse-uniform(low, high): speeds are uniform, the fastest has slowness 1 and the
    slowest high/low · lognormal(sigma) with median 1 · exponential(mean), 1 plus an exponential delay ·
    two-speed(share, factor): a share of the clients is slower by the factor · pareto(shape), at least 1.
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
        written = (match[2] or "").strip()
        try:
            given = tuple(map(float, written.split(","))) if written else kind.defaults
        except ValueError:
            raise UserError(f"slowness {text!r} cannot be read; write it as {form} with numbers") from None
        if len(given) != len(kind.arguments) or not all(map(math.isfinite, given)) or not kind.valid(*given):
            raise UserError(f"slowness {text!r} is out of range; write it as {form} with numbers in its range")
        return cls(name, given)

    def draw(self, keys: NDArray[np.uint64]) -> Floats:
        """Return a slowness for every key."""
        return SLOWNESS[self.kind].draw(keys, *self.arguments)


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
                f"availability {text!r} cannot be read; write 'always' or 'windows(on_seconds, off_seconds)', each at "
                f"most {MAX_WINDOW_SECONDS:,.0f}"
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
class Trace:
    """Measurements of real clients: arrays over clients, and (leaves at, returns at) of clients that leave."""

    step_seconds: Floats
    up_mbps: Floats
    down_mbps: Floats
    absences: Mapping[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Fleet:
    """All clients of one run: durations, availability and failures."""

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
    upload: str = "auto"  # one of ``UPLOADS``: replaces the meaning of the algorithm

    def __post_init__(self) -> None:
        for name, valid, rule in (
            ("num_clients", self.num_clients >= 1, "at least one client is needed"),
            ("step_seconds", 0 < self.step_seconds < math.inf, "it must be above zero"),
            ("jitter", 0 <= self.jitter < math.inf, "it must be zero or more"),
            ("uplink_mbps", self.uplink_mbps > 0, "it must be above zero (inf: transfers take no time)"),
            ("downlink_mbps", self.downlink_mbps > 0, "it must be above zero (inf: transfers take no time)"),
            ("latency_seconds", 0 <= self.latency_seconds < math.inf, "it must be zero or more"),
            ("model_megabytes", 0 <= self.model_megabytes < math.inf, "it must be zero or more"),
            ("failure_rate", 0 <= self.failure_rate < 1, "it must be a probability below 1"),
            ("return_seconds", self.return_seconds >= 0, "it must be zero or more (inf: lost clients never return)"),
            ("num_clients", self.num_clients <= MAX_CLIENTS, f"at most {MAX_CLIENTS:,} can be planned"),
            ("upload", self.upload in UPLOADS, f"it must be one of {', '.join(UPLOADS)}"),
            ("jitter", self.jitter <= 5, "it must be at most 5, where jobs differ by factors of a million"),
        ):
            if not valid:
                raise UserError(f"{name} is {getattr(self, name)}; {rule}")
        found = len(self.trace.step_seconds) if self.trace else self.num_clients
        if found != self.num_clients:
            raise UserError(f"the trace has {found} clients but num_clients is {self.num_clients}; change one of them")
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
        return self._transfer(self.trace.up_mbps if self.trace else self.uplink_mbps)

    @cached_property
    def down_times(self) -> Floats:
        """Seconds of a download, for every client."""
        return self._transfer(self.trace.down_mbps if self.trace else self.downlink_mbps)

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
        return math.exp(self.jitter * z - 0.5 * self.jitter**2)

    def dies_after(self, client: int, job: int) -> float | None:
        """Return the share of this job's duration after which its client fails, or None."""
        if self.failure_rate == 0.0:
            return None
        u = uniform(extend(extend(self._keys["death"], client), job))
        return u / self.failure_rate if u < self.failure_rate else None

    def opens(self, client: int, time: float) -> float:
        """Return the first time at or after ``time`` at which the client is reachable."""
        if self.availability is None:
            return time
        return self.availability.opens(uniform(extend(self._keys["phase"], client)), time)

    def opens_all(self, clients: NDArray[np.int64], times: Floats) -> Floats:
        """Return ``opens`` for many clients and times."""
        if self.availability is None:
            return times
        return self.availability.opens_all(uniform_all(extend_all(self._keys["phase"], clients)), times)

    @property
    def absences(self) -> Mapping[int, tuple[float, float]]:
        """(leaves at, returns at; inf: never) of clients that leave at a given time."""
        return self.trace.absences if self.trace else {}

    @property
    def lossy(self) -> bool:
        """Whether clients can fail or leave."""
        return self.failure_rate > 0.0 or bool(self.absences)

    @property
    def unreliable(self) -> bool:
        """Whether a request may remain unanswered for long: clients can fail, leave, or be outside their windows."""
        return self.lossy or (self.availability is not None and self.availability.off > 0.0)

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

    def round_trip(self, local_steps: int) -> float:
        """Return the longest time from sending a model to the arrival of its update, without jitter."""
        closed = self.availability.off if self.availability else 0.0
        if self.trace is None:  # all links are equal, and rounding is monotonic, so the slowest client determines it
            return closed + (self.step_range[1] * local_steps + float(self.up_times[0]) + float(self.down_times[0]))
        return closed + float(np.max(self.step_times * local_steps + self.up_times + self.down_times))


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


PAPER = {
    # 17.0 and 31.4 MFLOP per local step at 10 GFLOP/s; 2.2 and 3.53 MB per model.
    "paper-fashionmnist": {"step_seconds": 0.00170, "model_megabytes": 2.2},
    "paper-cifar10": {"step_seconds": 0.00314, "model_megabytes": 3.53},
}
