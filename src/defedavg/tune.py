"""Which rates are best: a grid of pairs × seeds as one sweep in shared batches, hopeless pairs stopped on the way.

Pairs of one setting compete. At a part of the time they have, all wait for each other, and the worse half is dropped
(successive halving: Jamieson, Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter Optimization, 2016).
A pair is judged by its seeds together: how many reached the target, how soon on average, else how accurate they got.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from . import __version__
from .algorithms import ALGORITHMS
from .config import Point, Study
from .errors import UserError
from .execute import Lane, Progress, Status
from .files import write_whole, writing
from .provenance import provenance
from .report.jsons import finite
from .sweep import Event, Finished, Item, Means, Measured, Sweep, Watch

GLOBAL = (0.1, 1.0)
LOCAL = (0.001, 0.005, 0.01, 0.05, 0.1)
RUNGS = (0.125, 0.25, 0.5)  # parts of the time at which the worse half is dropped


@dataclass(frozen=True, slots=True)
class Pair:
    """A setting with one pair of rates; a rate that the algorithm does not have is None."""

    point: Point
    global_lr: float | None
    local_lr: float | None

    @property
    def label(self) -> str:
        """The setting and the rates."""
        rates = [f"{name}={value:g}" for name, value in (("η", self.global_lr), ("η̄", self.local_lr)) if value]
        return " ".join([self.point.label, *rates])


@dataclass(slots=True)
class Outcome:
    """How one run of a pair stands."""

    status: str = "running"
    first_hit_seconds: float | None = None
    sustained_seconds: float | None = None
    best_accuracy: float | None = None
    diverged_at: int | None = None
    rounds: int = 0
    seconds: float = 0.0


def pairs_of(study: Study, global_rates: Sequence[float], local_rates: Sequence[float]) -> list[Pair]:
    """The grid for every point of a study, over the rates that its algorithm has."""
    for name, rates in (("global", global_rates), ("local", local_rates)):
        if not rates or not all(0 < rate < math.inf for rate in rates):
            raise UserError(f"the {name} rates are {list(rates)}; give numbers above zero")
        if len(set(rates)) < len(rates):
            raise UserError(f"the {name} rates name one twice: {list(rates)}")
    found = []
    for point in study.points():
        kind = ALGORITHMS[point.settings.algorithm]
        training = point.settings.training
        for wide in global_rates if kind.uses_global_lr else (None,):
            for near in local_rates if kind.uses_local_lr else (None,):
                trained = replace(
                    training,
                    global_lr=training.global_lr if wide is None else wide,
                    local_lr=training.local_lr if near is None else near,
                )
                found.append(Pair(replace(point, settings=replace(point.settings, training=trained)), wide, near))
    return found


class Tuning:
    """A grid being searched; ``outcomes`` is up to date at any moment."""

    def __init__(self, study: Study, pairs: Sequence[Pair], means: Means, rungs: Sequence[float] = RUNGS) -> None:
        if not all(point.settings.stop.target_accuracy for point in study.points()):
            raise UserError("rates are judged by the time to a target; set stop.target_accuracy")
        self.study = study
        self.pairs = list(pairs)
        self.sweep = Sweep(means)
        self.outcomes: dict[Pair, dict[int, Outcome]] = {
            pair: {seed: Outcome() for seed in study.seeds} for pair in pairs
        }
        self._rungs = tuple(rungs)
        self._at: dict[Item, int] = {}  # rungs passed
        self._held: dict[Item, Lane] = {}
        self._provenance = provenance(executor=means.executor, device=means.device, precision=means.precision)

    def carry_out(self, watch: Watch, metrics: Path | None = None) -> bool:
        """Search, with every measurement appended to a file; False if Ctrl-C ended it, with all that is known kept."""
        items = [Item(pair, pair.point.settings, seed) for pair in self.pairs for seed in self.study.seeds]
        with ExitStack() as stack:
            out = None
            if metrics is not None:
                stack.enter_context(writing(metrics))
                out = stack.enter_context(metrics.open("a", encoding="utf-8"))
            try:
                for event in self.sweep.events(items):
                    self._take(event)
                    if out is not None and isinstance(event, Measured):
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
        if isinstance(event, Finished):
            self._at[item] = len(self._rungs)
            self._held.pop(item, None)
            return
        passed = self._at.get(item, 0)
        if event.lane is not None and passed < len(self._rungs) and event.part >= self._rungs[passed]:
            event.lane.held = True
            self._held[item] = event.lane

    def _judge(self) -> None:
        """Where all of a setting's runs stand at a rung or are over, drop the worse half and let the others go on."""
        for rivals in self._rivals():
            waiting = [item for item in self._held if _pair(item) in rivals]
            under_way = sum(o.status == "running" for pair in rivals for o in self.outcomes[pair].values())
            if not waiting or len(waiting) < under_way:
                continue
            left = [pair for pair in rivals if not self._dropped(pair)]
            left.sort(key=lambda pair: score(self.outcomes[pair].values()))
            good = set(left[: math.ceil(len(left) / 2)])
            for item in waiting:
                lane = self._held.pop(item)
                lane.held = False
                self._at[item] = self._at.get(item, 0) + 1
                if _pair(item) not in good:
                    lane.progress.status = Status.DROPPED
                    self.outcomes[_pair(item)][item.seed].status = str(Status.DROPPED)

    def _dropped(self, pair: Pair) -> bool:
        return any(outcome.status == Status.DROPPED for outcome in self.outcomes[pair].values())

    def _rivals(self) -> Iterator[list[Pair]]:
        """The pairs of each setting."""
        groups: dict[Any, list[Pair]] = {}
        for pair in self.pairs:
            groups.setdefault((pair.point.settings.algorithm, pair.point.swept), []).append(pair)
        yield from groups.values()

    def best(self) -> list[Pair]:
        """The best pair of each setting; refuses a grid in which nothing stayed finite."""
        found = []
        for rivals in self._rivals():
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

    def save(self, folder: Path, finished: bool) -> None:
        """Every point, and the best, into a folder."""
        best = [
            {"label": pair.point.label, "global_lr": pair.global_lr, "local_lr": pair.local_lr}
            for pair in (self.best() if finished else ())
        ]
        head = {"name": self.study.name, "version": __version__, "finished": finished, "provenance": self._provenance}
        summary = {**head, "best": best}
        points = "".join(json.dumps(finite(record), allow_nan=False) + "\n" for record in self.records())
        write_whole(folder / "config.toml", self.study.to_toml().encode())
        write_whole(folder / "points.jsonl", points.encode())
        write_whole(folder / "summary.json", (json.dumps(summary, indent=1, ensure_ascii=False) + "\n").encode())


def score(outcomes: Sequence[Outcome] | Any) -> tuple[float, float, float]:
    """Less is better: seeds that did not reach the target, their mean time to it, and how inaccurate they were."""
    outcomes = list(outcomes)
    hits = [o.first_hit_seconds for o in outcomes if o.first_hit_seconds is not None]
    accuracies = [0.0 if o.diverged_at is not None or o.best_accuracy is None else o.best_accuracy for o in outcomes]
    return len(outcomes) - len(hits), fmean(hits) if hits else math.inf, -fmean(accuracies)


def _line(event: Measured) -> str:
    """A measurement as a line of JSON."""
    pair = _pair(event.item)
    what = {"algorithm": pair.point.settings.algorithm, "label": pair.label, "seed": event.item.seed}
    return json.dumps(finite({**what, **asdict(event.evaluation)}), allow_nan=False) + "\n"


def _pair(item: Item) -> Pair:
    assert isinstance(item.name, Pair)
    return item.name


def _outcome(progress: Progress) -> Outcome:
    return Outcome(
        str(progress.status),
        progress.first_hit_seconds,
        progress.sustained_seconds,
        progress.best_accuracy,
        progress.diverged_at,
        progress.rounds,
        progress.seconds,
    )
