"""Searches learning rates: a grid of pairs × seeds as one sweep in shared batches, with early stopping of bad pairs.

The pairs of one setting compete. At certain shares of their limits, all runs of a setting pause until the slowest has
arrived. If a pair has reached the target, pairs that can no longer be faster are dropped: they cannot win. From an
eighth of the limit on, the worse half is dropped too (successive halving: Jamieson, Talwalkar: Non-stochastic Best Arm
Identification and Hyperparameter Optimization, 2016). A pair is ranked by all its seeds: how many reached the target,
their mean time to it, and otherwise their accuracy. If a run must hold the target (``stop.consecutive_hits``), the time
of the sustained hit counts. Where seeds have data of their own, they are computed one after the other, and none waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from ..algorithms import ALGORITHMS
from ..config.study import SweepPoint
from ..errors import UserError
from ..runstore.metrics import metric_field
from ..runstore.summary import label_with_rates
from ..training import CheckpointHook, RunProgress, Status
from .compute import ComputeConfig
from .run_events import Event, PausableRun, ResumedRun, RunFinished, RunSpec, Watch
from .sweep import Sweep

RUNGS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the limits at which pairs are compared."""

HALVING = 1 / 8
"""From this rung on the worse half is dropped; before, accuracy says too little."""


@dataclass(frozen=True, slots=True)
class RatePair:
    """A setting with one pair of learning rates; a rate that the algorithm does not have is None."""

    point: SweepPoint
    global_lr: float | None
    local_lr: float | None

    @property
    def label(self) -> str:
        """The setting and the rates."""
        return label_with_rates(self.point.label, self.global_lr, self.local_lr)


@dataclass(slots=True)
class PairOutcome:
    """The result so far of one run of a pair."""

    status: str = "running"
    hit_seconds: float | None = None  # of the first of the consecutive hits that ended the run
    first_hit_seconds: float | None = None
    sustained_seconds: float | None = None
    best_accuracy: float | None = None
    diverged_at: int | None = None
    rounds: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one run of a search stands."""

    outcome: PairOutcome
    passed: int = 0  # rungs
    held: bool = False  # at the next one
    last_miss: float | None = None  # when the run was last below the target


def pairs_of(
    points: Sequence[SweepPoint], global_rates: Sequence[float], local_rates: Sequence[float]
) -> list[RatePair]:
    """Return the grid for every point, over the rates that its algorithm has."""
    for name, rates in (("global", global_rates), ("local", local_rates)):
        if not rates or not all(0 < rate < math.inf for rate in rates):
            raise UserError(f"the {name} rates are {list(rates)}; give numbers above zero")
        if len({f"{rate:g}" for rate in rates}) < len(rates):  # labels would be equal
            raise UserError(f"the {name} rates contain one twice: {list(rates)}")
    pairs = []
    for point in points:
        kind = ALGORITHMS[point.settings.algorithm]
        for global_lr in global_rates if point.settings.uses_global_lr else (None,):
            pairs += [
                RatePair(_with_rates(point, global_lr, local_lr), global_lr, local_lr)
                for local_lr in (local_rates if kind.uses_local_lr else (None,))
            ]
    return pairs


def _with_rates(point: SweepPoint, global_lr: float | None, local_lr: float | None) -> SweepPoint:
    training = point.settings.training
    training = replace(training, global_lr=global_lr or training.global_lr, local_lr=local_lr or training.local_lr)
    stop = replace(point.settings.stop, stop_at_target=True)  # pairs are ranked by the time to the target
    return replace(point, settings=replace(point.settings, training=training, stop=stop))


class Tuning:
    """A search over a grid; ``outcomes`` is always up to date.

    ``known`` are pairs that were computed before, on all seeds. ``decided`` is called with the pairs of a setting when
    their competition ends. ``checkpoint_hook`` is that of the sweep; ``standings`` are then those of all runs.
    """

    def __init__(
        self,
        pairs: Sequence[RatePair],
        seeds: Sequence[int],
        compute: ComputeConfig,
        rungs: Sequence[float] = RUNGS,
        *,
        known: Mapping[RatePair, Mapping[int, PairOutcome]] | None = None,
        decided: Callable[[Sequence[RatePair]], None] | None = None,
    ) -> None:
        if not all(pair.point.settings.stop.target_accuracy for pair in pairs):
            raise UserError("rates are ranked by the time to a target; set stop.target_accuracy")
        self.pairs = list(pairs)
        self.seeds = tuple(seeds)
        self.specs = [RunSpec(pair, pair.point.settings, seed) for pair in pairs for seed in seeds]
        self.rungs = tuple(rungs)
        self.sweep = Sweep(compute, self._at_checkpoint, rungs, on_resume=self._on_resume)
        self.checkpoint_hook: CheckpointHook = lambda: None
        self._known = dict(known or {})
        self.outcomes: dict[RatePair, dict[int, PairOutcome]] = {
            pair: dict(self._known.get(pair, {seed: PairOutcome() for seed in seeds})) for pair in pairs
        }
        self._decided = decided
        self._passed: dict[RunSpec, int] = {}  # rungs
        self._paused: dict[RunSpec, PausableRun] = {}
        self._last_misses: dict[RunSpec, float] = {}  # when a run was last below the target
        self._resumed: Mapping[RunSpec, ResumedRun] = {}
        self._batch_limits: Sequence[int] | None = None
        self._to_hold: set[RunSpec] = set()  # resumed runs that were paused and have not yet begun
        self._apart: set[RunSpec] = set()  # runs that do not share batches with all rivals, and wait for none
        settings: dict[Any, list[RatePair]] = {}
        for pair in pairs:
            settings.setdefault((pair.point.settings.algorithm, pair.point.swept), []).append(pair)
        self._settings = list(settings.values())
        self._competing = list(self._settings)

    def run(self, watch: Watch) -> bool:
        """Search; return False if Ctrl-C stopped it, with everything known so far in ``outcomes``."""
        unknown = [spec for spec in self.specs if _pair(spec) not in self._known]
        specs = [spec for spec in unknown if self.outcomes[_pair(spec)][spec.seed].status == "running"]
        self.sweep.check(specs)
        self._find_runs_apart(unknown)
        try:
            for event in self.sweep.events(specs, self._resumed, self._batch_limits):
                self._handle(event)
                watch(event)
                self._compare()
        except KeyboardInterrupt:
            for event in self.sweep.interrupt():
                self._handle(event)
            for outcome in (o for seeds in self.outcomes.values() for o in seeds.values()):
                if outcome.status == "running":  # it had not started
                    outcome.status = str(Status.INTERRUPTED)
            return False
        return True

    def _find_runs_apart(self, specs: Sequence[RunSpec]) -> None:
        """Find the settings whose runs do not all share batches: these are computed one group after the other."""
        if not self.rungs or self.sweep.compute.executor == "reference":
            return
        for rivals in map(set, self._settings):
            own = [spec for spec in specs if _pair(spec) in rivals]
            if len(set(map(self.sweep.group_of, own))) > 1:
                self._apart.update(own)
        if self._apart:
            self.sweep.notes.append("data or model differ from seed to seed, so no pair of rates is dropped early")

    def resume(
        self, standings: Sequence[Standing], runs: Mapping[int, ResumedRun], batch_limits: Sequence[int] | None
    ) -> None:
        """Continue an earlier search; ``runs`` are those in progress, by their position in ``specs``."""
        for spec, standing in zip(self.specs, standings, strict=True):
            self.outcomes[_pair(spec)][spec.seed] = replace(standing.outcome)
            self._passed[spec] = standing.passed
            if standing.last_miss is not None:
                self._last_misses[spec] = standing.last_miss
            if standing.held:
                self._to_hold.add(spec)
        self._resumed = {self.specs[position]: run for position, run in runs.items()}
        self._batch_limits = batch_limits
        self._competing = [rivals for rivals in self._settings if self._running(rivals)]

    def standings(self) -> list[Standing]:
        """Return where every run stands, in the order of ``specs``; only within the hook of the sweep."""
        return [
            Standing(
                replace(self.outcomes[_pair(spec)][spec.seed]),
                self._passed.get(spec, 0),
                spec in self._paused or spec in self._to_hold,
                self._last_misses.get(spec),
            )
            for spec in self.specs
        ]

    def _on_resume(self, spec: RunSpec, run: PausableRun) -> int:
        if spec in self._to_hold:
            self._to_hold.remove(spec)
            run.held = True
            self._paused[spec] = run
        return self._passed.get(spec, 0)

    def _at_checkpoint(self) -> None:
        self._compare()  # the last run that all others wait for may have been paused again without an evaluation
        self.checkpoint_hook()

    def _running(self, rivals: Sequence[RatePair]) -> int:
        return sum(o.status == "running" for pair in rivals for o in self.outcomes[pair].values())

    def _handle(self, event: Event) -> None:
        spec, progress = event.spec, event.run.progress
        outcome = _outcome(progress)
        if not isinstance(event, RunFinished) and outcome.status != Status.DROPPED:
            outcome.status = "running"  # the evaluation that ends a run is reported before its end
        self.outcomes[_pair(spec)][spec.seed] = outcome
        self._last_misses[spec] = _last_miss(progress, spec.settings.stop.target_accuracy)
        if isinstance(event, RunFinished):
            self._passed[spec] = len(self.rungs)
            self._paused.pop(spec, None)
            return
        passed = self._passed.get(spec, 0)
        reached = passed < len(self.rungs) and event.completed_share >= self.rungs[passed]
        if event.pausable is not None and reached:
            if spec in self._apart:
                self._passed[spec] = passed + 1
            else:
                event.pausable.held = True
                self._paused[spec] = event.pausable

    def _compare(self) -> None:
        """Where all runs of a setting have paused or ended, drop some pairs and let the others continue."""
        for rivals in list(self._competing):
            running = self._running(rivals)
            if not running:
                self._competing.remove(rivals)
                if self._decided is not None:
                    self._decided(rivals)
                continue
            paused = [spec for spec in self._paused if _pair(spec) in rivals]
            if len(paused) == running:
                self._drop_at_rung(rivals, paused)

    def _drop_at_rung(self, rivals: Sequence[RatePair], paused: Sequence[RunSpec]) -> None:
        left = [pair for pair in rivals if not self._is_dropped(pair)]
        left.sort(key=lambda pair: score(self.outcomes[pair].values()))
        kept = left
        if any(self.rungs[self._passed.get(spec, 0)] >= HALVING for spec in paused):
            kept = left[: math.ceil(len(left) / 2)]
        missed, soonest, _ = score(self.outcomes[left[0]].values())
        if not missed:  # the time of the best pair is final
            kept = [pair for pair in kept if pair is left[0] or self._earliest(pair) < soonest]
        for spec in paused:
            run = self._paused.pop(spec)
            run.held = False
            self._passed[spec] = self._passed.get(spec, 0) + 1
            if _pair(spec) not in kept:
                run.progress.status = Status.DROPPED
                self.outcomes[_pair(spec)][spec.seed] = _outcome(run.progress)  # final, even before the run ends

    def _earliest(self, pair: RatePair) -> float:
        """Return the mean time to the target if every run without a hit held it from its last miss on."""
        runs = ((RunSpec(pair, pair.point.settings, seed), o) for seed, o in self.outcomes[pair].items())
        return fmean(
            self._last_misses.get(spec, o.seconds) if o.hit_seconds is None else o.hit_seconds for spec, o in runs
        )

    def _is_dropped(self, pair: RatePair) -> bool:
        return any(outcome.status == Status.DROPPED for outcome in self.outcomes[pair].values())

    def best(self, *, compared_only: bool = False) -> list[RatePair]:
        """Return the best pair of each setting; raise ``UserError`` if all pairs of one diverged.

        With ``compared_only`` this leaves out a setting with a pair that was interrupted.
        """
        best = []
        for rivals in self._settings:
            if compared_only and any(o.status == Status.INTERRUPTED for p in rivals for o in self.outcomes[p].values()):
                continue
            if all(o.diverged_at is not None for pair in rivals for o in self.outcomes[pair].values()):
                raise UserError(f"every pair of rates diverged for {rivals[0].point.label}; give smaller rates")
            best.append(min(rivals, key=lambda pair: score(self.outcomes[pair].values())))
        return best

    def records(self) -> list[dict[str, Any]]:
        """Return every pair and seed as JSON values."""
        return [
            {
                "label": pair.label,
                "algorithm": pair.point.settings.algorithm,
                "swept": dict(pair.point.swept),
                "global_lr": pair.global_lr,
                "local_lr": pair.local_lr,
                "seed": seed,
                **metric_field(self.sweep.task(pair.point.settings, seed).metric_name),
                "target_accuracy": pair.point.settings.stop.target_accuracy,
                **asdict(outcome),
            }
            for pair in self.pairs
            for seed, outcome in self.outcomes[pair].items()
        ]


def score(outcomes: Iterable[PairOutcome]) -> tuple[float, float, float]:
    """Return a rank, lower is better: seeds that missed the target, mean time to it, and negative accuracy."""
    outcomes = list(outcomes)
    hits = [o.hit_seconds for o in outcomes if o.hit_seconds is not None]
    accuracies = [0.0 if o.diverged_at is not None or o.best_accuracy is None else o.best_accuracy for o in outcomes]
    return len(outcomes) - len(hits), fmean(hits) if hits else math.inf, -fmean(accuracies)


def _pair(spec: RunSpec) -> RatePair:
    assert isinstance(spec.name, RatePair)
    return spec.name


def _outcome(progress: RunProgress) -> PairOutcome:
    hit = progress.first_hit_seconds if progress.sustained_seconds is None else progress.sustained_seconds
    return PairOutcome(
        str(progress.status),
        hit if progress.status is Status.TARGET else None,
        progress.first_hit_seconds,
        progress.sustained_seconds,
        progress.best_accuracy,
        progress.diverged_at,
        progress.rounds,
        progress.seconds,
    )


def _last_miss(progress: RunProgress, target: float) -> float:
    return next((e.seconds for e in reversed(progress.evaluations) if (e.accuracy or 0.0) < target), 0.0)
