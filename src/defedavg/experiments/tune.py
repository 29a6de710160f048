"""Which rates are best: a grid of pairs × seeds as one sweep in shared batches, hopeless pairs stopped on the way.

Pairs of one setting compete. At certain parts of the time they have, all wait for each other. Where one has reached the
target, those that can no longer be sooner are dropped, which costs nothing: they could not win. From an eighth of the
time on, the worse half is dropped, too (successive halving: Jamieson, Talwalkar: Non-stochastic Best Arm Identification
and Hyperparameter Optimization, 2016). A pair is judged by its seeds together: how many reached the target, how soon on
average, else how accurate they got. Where a run is to hold the target (``stop.consecutive_hits``), that is what counts, not a first
lucky measurement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import __version__
from ..algorithms import ALGORITHMS
from ..config.study import Study, SweepPoint
from ..errors import UserError
from ..fileio import write_whole, writing
from ..jsonio import finite
from ..runstore.provenance import provenance
from ..training import RunProgress, Status
from .sweep import ComputeConfig, Event, PausableRun, RunEvaluated, RunFinished, RunSpec, Sweep, Watch

RUNGS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # parts of the time at which pairs are compared
HALVING = 1 / 8  # from here on the worse half is dropped; before, accuracy says too little


@dataclass(frozen=True, slots=True)
class RatePair:
    """A setting with one pair of rates; a rate that the algorithm does not have is None."""

    point: SweepPoint
    global_lr: float | None
    local_lr: float | None

    @property
    def label(self) -> str:
        """The setting and the rates."""
        rates = [f"{name}={value:g}" for name, value in (("η", self.global_lr), ("η̄", self.local_lr)) if value]
        return " ".join([self.point.label, *rates])


@dataclass(slots=True)
class PairOutcome:
    """How one run of a pair stands."""

    status: str = "running"
    hit_seconds: float | None = None  # of the first of the measurements at the target that ended it
    first_hit_seconds: float | None = None
    sustained_seconds: float | None = None
    best_accuracy: float | None = None
    diverged_at: int | None = None
    rounds: int = 0
    seconds: float = 0.0


def pairs_of(
    points: Sequence[SweepPoint], global_rates: Sequence[float], local_rates: Sequence[float]
) -> list[RatePair]:
    """The grid for every point, over the rates that its algorithm has."""
    for name, rates in (("global", global_rates), ("local", local_rates)):
        if not rates or not all(0 < rate < math.inf for rate in rates):
            raise UserError(f"the {name} rates are {list(rates)}; give numbers above zero")
        if len(set(rates)) < len(rates):
            raise UserError(f"the {name} rates name one twice: {list(rates)}")
    found = []
    for point in points:
        kind = ALGORITHMS[point.settings.algorithm]
        training = point.settings.training
        for wide in global_rates if kind.uses_global_lr else (None,):
            for near in local_rates if kind.uses_local_lr else (None,):
                trained = replace(
                    training,
                    global_lr=training.global_lr if wide is None else wide,
                    local_lr=training.local_lr if near is None else near,
                )
                found.append(RatePair(replace(point, settings=replace(point.settings, training=trained)), wide, near))
    return found


class Tuning:
    """A grid being searched; ``outcomes`` is up to date at any moment.

    ``known`` are pairs that were run before, on all the seeds. ``decided`` is told of the pairs of a setting when their
    race is over.
    """

    def __init__(
        self,
        pairs: Sequence[RatePair],
        seeds: Sequence[int],
        means: ComputeConfig,
        rungs: Sequence[float] = RUNGS,
        *,
        known: Mapping[RatePair, Mapping[int, PairOutcome]] | None = None,
        decided: Callable[[Sequence[RatePair]], None] = lambda rivals: None,
    ) -> None:
        if not all(pair.point.settings.stop.target_accuracy for pair in pairs):
            raise UserError("rates are judged by the time to a target; set stop.target_accuracy")
        self.pairs = list(pairs)
        self.seeds = tuple(seeds)
        self.sweep = Sweep(means, pauses=rungs)
        self._known = dict(known or {})
        self.outcomes: dict[RatePair, dict[int, PairOutcome]] = {
            pair: dict(self._known.get(pair, {seed: PairOutcome() for seed in seeds})) for pair in pairs
        }
        self._decided = decided
        self._rungs = tuple(rungs)
        self._at: dict[RunSpec, int] = {}  # rungs passed
        self._held: dict[RunSpec, PausableRun] = {}
        self._provenance = provenance(executor=means.executor, device=means.device, precision=means.precision)
        self._missed: dict[RunSpec, float] = {}  # when a run was last seen below the target
        groups: dict[Any, list[RatePair]] = {}
        for pair in pairs:
            groups.setdefault((pair.point.settings.algorithm, pair.point.swept), []).append(pair)
        self._rivals = list(groups.values())
        self._racing = list(self._rivals)

    def carry_out(self, watch: Watch, metrics: Path | None = None) -> bool:
        """Search, with every measurement appended to a file; False if Ctrl-C ended it, with all that is known kept."""
        items = [
            RunSpec(pair, pair.point.settings, seed)
            for pair in self.pairs
            if pair not in self._known
            for seed in self.seeds
        ]
        with ExitStack() as stack:
            out = None
            if metrics is not None:
                stack.enter_context(writing(metrics))
                out = stack.enter_context(metrics.open("a", encoding="utf-8"))
            try:
                for event in self.sweep.events(items):
                    self._take(event)
                    if out is not None and isinstance(event, RunEvaluated):
                        out.write(_line(event))
                        out.flush()
                    watch(event)
                    self._judge()
            except KeyboardInterrupt:
                for event in self.sweep.interrupt():
                    self._take(event)
                return False
        return True

    def _take(self, event: Event) -> None:
        item, progress = event.item, event.run.progress
        self.outcomes[_pair(item)][item.seed] = _outcome(progress)
        self._missed[item] = _last_miss(progress, item.settings.stop.target_accuracy)
        if isinstance(event, RunFinished):
            self._at[item] = len(self._rungs)
            self._held.pop(item, None)
            return
        passed = self._at.get(item, 0)
        if event.lane is not None and passed < len(self._rungs) and event.part >= self._rungs[passed]:
            event.lane.held = True
            self._held[item] = event.lane

    def _judge(self) -> None:
        """Where all of a setting's runs stand at a rung or are over, drop some and let the others go on."""
        for rivals in list(self._racing):
            under_way = sum(o.status == "running" for pair in rivals for o in self.outcomes[pair].values())
            if not under_way:
                self._racing.remove(rivals)
                self._decided(rivals)
                continue
            waiting = [item for item in self._held if _pair(item) in rivals]
            if len(waiting) == under_way:
                self._rung(rivals, waiting)

    def _rung(self, rivals: Sequence[RatePair], waiting: Sequence[RunSpec]) -> None:
        left = [pair for pair in rivals if not self._dropped(pair)]
        left.sort(key=lambda pair: score(self.outcomes[pair].values()))
        good = left
        if any(self._rungs[self._at.get(item, 0)] >= HALVING for item in waiting):
            good = left[: math.ceil(len(left) / 2)]
        missed, soonest, _ = score(self.outcomes[left[0]].values())
        if not missed:  # its own time cannot change any more
            good = [pair for pair in good if pair is left[0] or self._at_best(pair) < soonest]
        for item in waiting:
            lane = self._held.pop(item)
            lane.held = False
            self._at[item] = self._at.get(item, 0) + 1
            if _pair(item) not in good:
                lane.progress.status = Status.DROPPED
                self.outcomes[_pair(item)][item.seed].status = str(Status.DROPPED)

    def _at_best(self, pair: RatePair) -> float:
        """The mean time to the target if all that do not hold it did so from their last miss on."""
        own = ((RunSpec(pair, pair.point.settings, seed), o) for seed, o in self.outcomes[pair].items())
        return fmean(self._missed.get(item, o.seconds) if o.hit_seconds is None else o.hit_seconds for item, o in own)

    def _dropped(self, pair: RatePair) -> bool:
        return any(outcome.status == Status.DROPPED for outcome in self.outcomes[pair].values())

    def best(self) -> list[RatePair]:
        """The best pair of each setting; refuses a grid in which nothing stayed finite."""
        found = []
        for rivals in self._rivals:
            if all(o.diverged_at is not None for pair in rivals for o in self.outcomes[pair].values()):
                raise UserError(f"every pair of rates diverged for {rivals[0].point.label}; give smaller rates")
            found.append(min(rivals, key=lambda pair: score(self.outcomes[pair].values())))
        return found

    def records(self) -> list[dict[str, Any]]:
        """Every pair and seed, ready for JSON."""
        return [
            {
                "label": pair.label,
                "algorithm": pair.point.settings.algorithm,
                "swept": dict(pair.point.swept),
                "global_lr": pair.global_lr,
                "local_lr": pair.local_lr,
                "seed": seed,
                "target_accuracy": pair.point.settings.stop.target_accuracy,
                **asdict(outcome),
            }
            for pair in self.pairs
            for seed, outcome in self.outcomes[pair].items()
        ]

    def save(self, folder: Path, study: Study, finished: bool) -> None:
        """Every point, and the best, into a folder."""
        best = [
            {"label": pair.point.label, "global_lr": pair.global_lr, "local_lr": pair.local_lr}
            for pair in (self.best() if finished else ())
        ]
        head = {"name": study.name, "version": __version__, "finished": finished, "provenance": self._provenance}
        summary = {**head, "best": best}
        points = "".join(json.dumps(finite(record), allow_nan=False) + "\n" for record in self.records())
        write_whole(folder / "config.toml", study.to_toml().encode())
        write_whole(folder / "points.jsonl", points.encode())
        write_whole(folder / "summary.json", (json.dumps(summary, indent=1, ensure_ascii=False) + "\n").encode())


def score(outcomes: Iterable[PairOutcome]) -> tuple[float, float, float]:
    """Less is better: seeds that did not reach the target, their mean time to it, and how inaccurate they were."""
    outcomes = list(outcomes)
    hits = [o.hit_seconds for o in outcomes if o.hit_seconds is not None]
    accuracies = [0.0 if o.diverged_at is not None or o.best_accuracy is None else o.best_accuracy for o in outcomes]
    return len(outcomes) - len(hits), fmean(hits) if hits else math.inf, -fmean(accuracies)


def _line(event: RunEvaluated) -> str:
    """A measurement as a line of JSON."""
    pair = _pair(event.item)
    what = {"algorithm": pair.point.settings.algorithm, "label": pair.label, "seed": event.item.seed}
    return json.dumps(finite({**what, **asdict(event.evaluation)}), allow_nan=False) + "\n"


def _pair(item: RunSpec) -> RatePair:
    assert isinstance(item.name, RatePair)
    return item.name


def _outcome(progress: RunProgress) -> PairOutcome:
    done = progress.status is Status.TARGET
    held = progress.first_hit_seconds if progress.sustained_seconds is None else progress.sustained_seconds
    return PairOutcome(
        str(progress.status),
        held if done else None,
        progress.first_hit_seconds,
        progress.sustained_seconds,
        progress.best_accuracy,
        progress.diverged_at,
        progress.rounds,
        progress.seconds,
    )


def _last_miss(progress: RunProgress, target: float) -> float:
    return next((e.seconds for e in reversed(progress.evaluations) if (e.accuracy or 0.0) < target), 0.0)
