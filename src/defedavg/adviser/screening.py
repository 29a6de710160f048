"""Screens candidates by their plans, without training: what cannot win is dropped with the reason, in words.

A plan takes milliseconds, so every shape of the grid (everything except the rates) is planned. Plans end at the
horizon, or when every client has contributed a number of updates on average; figures per second are those of the
planned time. Such a stretch may be short. A plan goes on while it does not hear some class, and until a period of the
clients' availability has passed, if the horizon, or the end of the period, is not too far. Where it is, the plan is no
reason to drop its shape: only a class that is not heard until the horizon is one, and only a speed over a whole period.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..config.build import make_simulator
from ..config.settings import Settings
from ..durations import duration
from ..errors import UserError, counted
from ..jsonio import three_digits
from ..planning.plan import records, without_gc
from ..planning.plan_stats import PlanStats, PlanStatsCollector
from ..planning.records import Round, Sent
from ..tasks import Task, class_counts
from .candidates import AlgorithmGrid, PlanShape
from .dropped import NO_MERGE, REFUSED, UNHEARD, nothing_left

UPDATES_PER_CLIENT = 12
LEAST_UPDATES = 400
LONGER = 10
"""A plan that goes on has at most this many times as many updates."""
LONGER_IN_ALL = 500_000
"""Updates by which all plans together go on, at most: they take some 20 s."""
SLOWEST = 20.0
"""A shape whose merged local steps per second are this many times fewer than the most of all is dropped."""
UNHEARD_SHARE = 0.5
"""A class is not heard if unheard clients hold more than this share of it, and updates have less than this of it."""
GROWTH = 1.5
"""The factor from one number of rounds at which a plan that goes on is judged to the next."""
MAX_CLASS_CLIENTS = 20_000  # whose samples are counted by class

Notify = Callable[[str, float], None]
"""Receives what is being done, and the share of it that is done."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedShape:
    """A shape that was planned: its statistics, the merged updates of every client, and its speed."""

    shape: PlanShape
    label: str
    stats: PlanStats
    merged: NDArray[np.int64]
    seconds: float  # planned
    steps: int  # of the merged updates
    times: NDArray[np.float64]  # of the planned rounds
    steps_by_round: NDArray[np.int64]  # merged until then
    bytes_by_round: NDArray[np.float64]  # up and down until then, after what is sent at the start
    whole: bool = True  # until the horizon
    typical: bool = True  # whether the planned time covers a period of the clients' availability

    @property
    def updates_per_second(self) -> float:
        """Merged updates per simulated second."""
        return self.stats.jobs_merged / self.seconds

    @property
    def steps_per_second(self) -> float:
        """Merged local steps per simulated second: what training costs, and what it yields."""
        return self.steps / self.seconds

    @property
    def steps_per_update(self) -> float:
        """The mean local steps of an update; interrupted jobs have fewer than K."""
        return self.steps / max(1, self.stats.jobs_trained)

    @property
    def first_round(self) -> float:
        """The simulated time of the first merge; infinite without one."""
        return float(self.times[0]) if len(self.times) else math.inf

    def steps_until(self, seconds: float) -> float:
        """Return how many local steps are merged until a simulated time; after the planned time, at the mean speed."""
        rounds = int(np.searchsorted(self.times, seconds, side="right"))
        merged = float(self.steps_by_round[rounds - 1]) if rounds else 0.0
        return merged + self.steps_per_second * max(0.0, seconds - self.seconds)

    def bytes_until(self, seconds: float) -> float:
        """Return the bytes up and down until a simulated time; after the planned time, at the mean rate.

        Those until a merge do not include what it sends. Between merges, they grow at a constant rate.
        """
        known = float(np.interp(seconds, [0.0, *self.times, self.seconds], self.bytes_by_round))
        return known + float(self.bytes_by_round[-1]) / self.seconds * max(0.0, seconds - self.seconds)


@dataclass(frozen=True, slots=True)
class Screening:
    """The shapes that are raced, and the dropped ones with the reason."""

    kept: Mapping[PlanShape, PlannedShape]
    dropped: Mapping[PlanShape, str]
    labels: Mapping[PlanShape, str]
    horizon: float


def horizon_of(settings: Settings, seed: int) -> float:
    """Return the simulated time that candidates have: that of the study, or that of its rounds with its own setting."""
    if math.isfinite(settings.stop.max_seconds):
        return settings.stop.max_seconds
    rounds = 0
    simulator = make_simulator(settings, seed)
    seconds = 0.0
    for record in records(simulator, settings.stop.max_rounds):
        if isinstance(record, Round):
            rounds, seconds = record.merge.version, record.time
    if not rounds:
        raise UserError(
            f"no update of {settings.algorithm} is merged, so the study has no horizon; check [clients], or give "
            "stop.max_seconds"
        )
    return seconds


def screen(
    grids: Mapping[str, AlgorithmGrid], horizon: float, seed: int, holders: Holders, notify: Notify
) -> Screening:
    """Plan every shape and drop those that cannot win."""
    shapes = [(grid, shape) for grid in grids.values() for shape in grid.shapes()]
    planned: dict[PlanShape, PlannedShape] = {}
    dropped: dict[PlanShape, str] = {}
    labels = {shape: grid.label(shape.position) for grid, shape in shapes}
    planner = Planner(horizon, seed, holders)
    for number, (grid, shape) in enumerate(shapes):
        notify(f"planning {counted(len(shapes), 'setting')}", number / len(shapes))
        try:
            planned[shape] = planner.plan(grid, shape)
        except UserError as error:
            dropped[shape] = f"{REFUSED}{error}"
    dropped.update(_unfit(planned, horizon, holders))
    kept = {shape: each for shape, each in planned.items() if shape not in dropped}
    if not kept:
        reasons = ((labels[shape], reason) for shape, reason in dropped.items())
        raise UserError(nothing_left(reasons, len(shapes), horizon, scheduled=planner.scheduled))
    return Screening(kept, dropped, labels, horizon)


@dataclass(eq=False)
class Planner:
    """Plans shapes, and goes on with a plan whose stretch is too short to judge it."""

    horizon: float
    seed: int
    holders: Holders
    longer: float = LONGER_IN_ALL  # updates by which further plans may go on
    scheduled: bool = False  # whether clients are available at some times only

    def plan(self, grid: AlgorithmGrid, shape: PlanShape) -> PlannedShape:
        """Plan one shape."""
        settings = grid.settings(shape.position)
        settings = replace(settings, clients=replace(settings.clients, joules_per_step=0.0, joules_per_byte=0.0))
        simulator = make_simulator(settings, self.seed)
        fleet, merged = simulator.fleet, simulator.header.updates_per_round
        self.scheduled = self.scheduled or fleet.schedule is not None
        collector = PlanStatsCollector(simulator.header, fleet)
        usual = max(LEAST_UPDATES, UPDATES_PER_CLIENT * fleet.num_clients)
        rounds = math.ceil(usual / merged)
        most = math.ceil((usual + min(self.longer, (LONGER - 1) * usual)) / merged)
        check, ended = rounds, False
        times: list[float] = []
        steps: list[int] = []
        messages = [0]  # at the start, at every merge, and at the end
        with without_gc():
            for record in records(simulator, most, self.horizon):
                collector.add(record)
                if isinstance(record, Sent) and record.time == 0.0:
                    messages[0] = sum(collector.clients.messages)
                if isinstance(record, Round):
                    messages.append(sum(collector.clients.messages))
                    times.append(record.time)
                    steps.append(sum(update.steps for update, _ in record.merge.updates))
                    if len(times) == check:
                        reach = record.time * most / check
                        if check == most or self._suffices(record.time, reach, fleet.period, collector.clients.merged):
                            ended = True
                            break
                        check = min(most, math.ceil(GROWTH * check))
        self.longer -= max(0, len(times) - rounds) * merged
        stats = collector.stats()
        messages.append(sum(collector.clients.messages))
        seconds = stats.seconds if ended else self.horizon
        return PlannedShape(
            shape,
            grid.label(shape.position),
            stats,
            collector.clients.merged,
            seconds,
            sum(steps),
            np.asarray(times, np.float64),
            np.cumsum(steps, dtype=np.int64),
            1e6 * fleet.model_megabytes * np.asarray(messages, np.float64),
            whole=not ended,
            typical=seconds >= min(fleet.period, self.horizon),
        )

    def _suffices(self, seconds: float, reach: float, period: float, merged: NDArray[np.int64]) -> bool:
        """Return whether a plan shows enough, or could not show more before it must end, at the time ``reach``."""
        period = min(period, self.horizon)
        goes_on = seconds < period <= reach or (self.horizon <= reach and self.holders.unheard(merged))
        return not goes_on


def plan_shape(grid: AlgorithmGrid, shape: PlanShape, horizon: float, seed: int) -> PlannedShape:
    """Plan one shape, whatever classes its clients hold."""
    return Planner(horizon, seed, Holders(None)).plan(grid, shape)


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """How many training samples of every class each client holds: clients × classes; None if there are no classes."""

    counts: NDArray[np.int64] | None

    @classmethod
    def of(cls, task: Task) -> Holders:
        """Count the samples of a task."""
        if task.classes is None or task.num_clients > MAX_CLASS_CLIENTS or task.train.targets.ndim != 1:
            return cls(None)
        return cls(np.asarray(class_counts(task.clients, task.train.targets.cpu().numpy(), task.classes)))

    def heard(self, merged: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Return how often every class is heard relative to its share of the samples; 1 is its share.

        An update counts in proportion to the classes of its client.
        """
        if self.counts is None:
            return None
        sizes = np.maximum(1, self.counts.sum(axis=1, keepdims=True))
        heard = (merged[:, None] * self.counts / sizes).sum(axis=0)
        equal = (self.counts / sizes).sum(axis=0)  # if every client were heard as often
        total = max(1.0, float(heard.sum()))
        expected = equal / max(1e-12, float(equal.sum()))
        return np.asarray(np.where(expected > 0, heard / total / np.maximum(expected, 1e-12), 1.0))

    def unheard(self, merged: NDArray[np.int64]) -> list[int]:
        """Return the classes of which clients that were never heard hold most samples, and others have few.

        Clients with the same classes speak for each other, so most of them need not be heard.
        """
        heard = self.heard(merged)
        if self.counts is None or heard is None:
            return []
        missing = self.counts[merged == 0].sum(axis=0)
        limit = UNHEARD_SHARE * np.maximum(1, self.counts.sum(axis=0))
        return [int(c) for c in np.flatnonzero((missing > limit) & (heard < UNHEARD_SHARE))]


def _unfit(
    planned: Mapping[PlanShape, PlannedShape], horizon: float, holders: Holders
) -> Iterator[tuple[PlanShape, str]]:
    """Yield the shapes that cannot win, and why."""
    typical = (each for each in planned.values() if each.typical)
    fastest = max(typical, key=lambda each: each.steps_per_second, default=None)
    seen: dict[object, PlannedShape] = {}
    for shape, each in planned.items():
        stats = each.stats
        if not stats.rounds:
            yield shape, f"{NO_MERGE} within {duration(horizon)}"
            continue
        same = (shape.algorithm, each.steps, stats.updates_per_round, stats.seconds, stats.staleness_mean)
        known = seen.setdefault((*same, each.merged.tobytes()), each)
        if known is not each:
            yield shape, f"has the same plan as {known.label}"
        elif each.typical and fastest is not None and SLOWEST * each.steps_per_second < fastest.steps_per_second:
            speed, other = three_digits(each.steps_per_second), three_digits(fastest.steps_per_second)
            yield shape, f"merges {speed} local steps a second, {fastest.label} merges {other}"
        elif each.whole and (classes := holders.unheard(each.merged)):
            yield shape, f"{UNHEARD} the clients that hold {_classes(classes)} within {duration(horizon)}"


def _classes(classes: Sequence[int]) -> str:
    names = ", ".join(map(str, classes[:4]))
    return f"class {names}" if len(classes) == 1 else f"classes {names}" + (" and more" if len(classes) > 4 else "")
