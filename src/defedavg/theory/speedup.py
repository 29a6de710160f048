"""Linear speedup, measured: rounds to a mean squared gradient norm of ε, against the updates merged per round.

A theorem's rates depend on T, so the rounds needed for ε are the smallest T for which a run of T rounds, with the
rates for T, has (1/T) Σ_{t<T} ‖∇F(w^t)‖² ≤ ε. It is searched for every n and seed by bracketing. All runs of one task
and algorithm share the batches of one executor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config import study as config
from ..config.build import make_simulator
from ..config.study import Settings
from ..errors import UserError
from ..planning.records import Record, Round, Stall
from ..tasks import Task
from ..training import BatchedRun, LocalTraining, RunProgress, Status, StoppingRule, Trainer, run_batched
from .estimates import Estimates
from .formulas import Constants, rounds_to_reach, theorem
from .gradient_recorder import GradientRecorder
from .horizon_search import Search
from .objective import Norms
from .slope_fit import SlopeFit, fit

WIDTH = 128
FIRST = {"defedavg-iid": 32, "defedavg-niid": 256}  # the bounds ask for many times the rounds that are needed


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A task with its constants, an algorithm, and ε."""

    name: str
    algorithm: str
    task: Task
    estimates: Estimates
    norms: Norms
    epsilon: float
    local_steps: int
    slowness: str = "uniform(1, 2)"
    step_seconds: float = 1.0
    looks: int | None = None  # versions of a run whose gradient is computed; all if not given

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise UserError(f"epsilon is {self.epsilon:g}; it must be a number above zero")

    def constants(self, n: int, rounds: int = 1, max_staleness: int = 1) -> Constants:
        """Those of a run."""
        return self.estimates.constants(
            updates_per_round=n,
            local_steps=self.local_steps,
            rounds=rounds,
            max_staleness=max(1, max_staleness),
            num_clients=self.task.num_clients,
        )

    def settings(self, n: int) -> Settings:
        """What the clock is told: computing takes long, the links are the paper's."""
        clients = {
            "num_clients": self.task.num_clients, "slowness": self.slowness, "step_seconds": self.step_seconds
        }  # fmt: skip
        training = {
            "updates_per_round": n, "local_steps": self.local_steps, "batch_size": self.estimates.batch_size
        }  # fmt: skip
        (point,) = config.study({"algorithms": [self.algorithm], "clients": clients, "training": training}).points()
        return point.settings


@dataclass(frozen=True, slots=True)
class SpeedupTrial:
    """One run of T rounds with the rates for T; the mean is not finite where it diverged."""

    task: str
    algorithm: str
    n: int
    seed: int
    rounds: int
    mean: float
    max_staleness: int
    epsilon: float


Tell = Callable[[SpeedupTrial], None]


@dataclass
class _Quest:
    """One n and seed: its search, its plan as far as it was made, its last run that was good."""

    case: Case
    n: int
    seed: int
    search: Search
    plan: list[Round | Stall] = field(default_factory=list)
    trial: SpeedupTrial | None = None

    def __post_init__(self) -> None:
        self._clock = iter(make_simulator(self.case.settings(self.n), self.seed))

    def records(self) -> Iterator[Record]:
        """The rounds, planned once and read again at every try."""
        place = 0
        while True:
            while place >= len(self.plan):
                record = next(self._clock)
                if isinstance(record, Round | Stall):
                    self.plan.append(record)
            yield self.plan[place]
            place += 1

    def lane(self) -> BatchedRun:
        """The run that the search asks for."""
        case, rounds = self.case, self.search.rounds
        rates = theorem(case.algorithm).rates(case.constants(self.n, rounds))
        recipe = LocalTraining(self.seed, case.estimates.batch_size, rates.global_lr, rates.local_lr)
        every = 1 if case.looks is None else -(-rounds // case.looks)
        watched = GradientRecorder(case.task, recipe, case.norms, rounds, every)
        return BatchedRun(watched, self.records(), StoppingRule(max_rounds=rounds, every_rounds=2**62), RunProgress())

    @property
    def found(self) -> SpeedupTrial:
        """The answer of a search that is done."""
        assert self.trial is not None
        return self.trial

    def finished(self, lane: BatchedRun) -> SpeedupTrial:
        """Take in what a run gave."""
        watched = lane.reference
        assert isinstance(watched, GradientRecorder)
        mean = math.inf if lane.progress.status is Status.DIVERGED else watched.mean
        mean = mean if math.isfinite(mean) else math.inf
        case, rounds = self.case, self.search.rounds
        found = SpeedupTrial(
            case.name, case.algorithm, self.n, self.seed, rounds, mean, watched.max_staleness, case.epsilon
        )
        self.search.tell(mean)
        if mean <= case.epsilon:
            self.trial = found
        return found


@dataclass(frozen=True, slots=True)
class SpeedupPoint:
    """The rounds that one n needed: of every seed, and their geometric mean."""

    n: int
    rounds: tuple[int, ...]
    mean_rounds: float
    max_staleness: int
    conditions_hold: bool
    promised_rounds: int  # for which the corrected bound is ε
    first_share: float  # of the corrected bound's first term in it, at the rounds needed


@dataclass(frozen=True, slots=True)
class Speedup:
    """What was measured of one task and algorithm."""

    task: str
    algorithm: str
    epsilon: float
    local_steps: int
    num_clients: int
    estimates: Estimates
    points: tuple[SpeedupPoint, ...]
    fit: SlopeFit

    def json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "task": self.task,
            "algorithm": self.algorithm,
            "slope": self.fit.slope,
            "slope_low": self.fit.low,
            "slope_high": self.fit.high,
            "level": self.fit.level,
            "epsilon": self.epsilon,
            "local_steps": self.local_steps,
            "num_clients": self.num_clients,
            "constants": asdict(self.estimates),
            "points": [asdict(point) for point in self.points],
        }


def measure(
    case: Case,
    ns: Sequence[int],
    seeds: Sequence[int],
    *,
    tell: Tell | None = None,
    tolerance: float = 0.05,
    most: int = 200_000,
) -> Speedup:
    """Search the rounds needed for every n and seed; ``tell`` hears of every run as it ends."""
    check_lists(ns, seeds)
    hub = sorted(ns)[len(ns) // 2]
    promised = rounds_to_reach(theorem(case.algorithm), case.constants(hub), case.epsilon)
    trainer = _trainer(case)

    def search(n: int, seed: int, guess: float) -> _Quest:
        first = max(2, min(most, round(guess)))
        return _Quest(case, n, seed, Search(case.epsilon, first, tolerance, most))

    # One n goes first: what it needed tells the others where to start, and no more than that.
    hubs = {seed: search(hub, seed, promised / FIRST[case.algorithm]) for seed in seeds}
    _settle(list(hubs.values()), trainer, tell)
    others = [search(n, seed, q.found.rounds * hub / n) for n in ns if n != hub for seed, q in hubs.items()]
    _settle(others, trainer, tell)
    return _summary(case, ns, seeds, [*hubs.values(), *others])


def check_lists(ns: Sequence[int], seeds: Sequence[int]) -> None:
    """Whether there is something to measure and to fit."""
    for name, values in (("the list of n", ns), ("the list of seeds", seeds)):
        if not values:
            raise UserError(f"{name} is empty; give at least one")
        if len(set(values)) != len(values):
            raise UserError(f"{name} names something twice: {', '.join(map(str, values))}")
    if min(ns) < 1:
        raise UserError(f"n is {min(ns)}; it must be at least 1")
    if len(ns) < 2:
        raise UserError("a slope needs at least two values of n")


def _trainer(case: Case) -> Trainer:
    executor = GradientRecorder(case.task, LocalTraining(0, case.estimates.batch_size), case.norms, 1)
    return Trainer(case.task, executor.module, batch_size=case.estimates.batch_size, max_batch_jobs=WIDTH)


def _settle(quests: Sequence[_Quest], trainer: Trainer, tell: Tell | None) -> None:
    """Run until every search is done."""
    while pending := [quest for quest in quests if not quest.search.done]:
        for trial in _turn(pending, trainer):
            if tell:
                tell(trial)
        for quest in pending:
            if quest.search.failed:
                case, most = quest.case, quest.search.most
                raise UserError(
                    f"{case.name}, {case.algorithm}, n = {quest.n}: {most} rounds do not bring the mean squared "
                    f"gradient norm to {case.epsilon:g}; use a larger epsilon"
                )


def _turn(pending: Iterable[_Quest], trainer: Trainer) -> Iterator[SpeedupTrial]:
    """One run for every search; each is given as it ends."""
    quests = {id(lane): (lane, quest) for lane, quest in ((quest.lane(), quest) for quest in pending)}
    for lane, _ in run_batched([lane for lane, _ in quests.values()], trainer):
        if not lane.running:
            _, quest = quests.pop(id(lane))
            yield quest.finished(lane)
    for lane, quest in quests.values():  # those that diverged end without a measurement
        yield quest.finished(lane)


def _summary(case: Case, ns: Sequence[int], seeds: Sequence[int], quests: Sequence[_Quest]) -> Speedup:
    kind = theorem(case.algorithm)
    points = []
    for n in ns:
        trials = [quest.found for quest in quests if quest.n == n]
        stale = max(trial.max_staleness for trial in trials)
        runs = [case.constants(n, trial.rounds, trial.max_staleness) for trial in trials]
        bounds = [kind.bound(run) for run in runs]
        points.append(
            SpeedupPoint(
                n=n,
                rounds=tuple(trial.rounds for trial in trials),
                mean_rounds=statistics.geometric_mean(trial.rounds for trial in trials),
                max_staleness=stale,
                conditions_hold=all(each.holds for run in runs for each in kind.conditions(run)),
                promised_rounds=rounds_to_reach(kind, runs[0], case.epsilon),
                first_share=min(bound.first / bound.total for bound in bounds),
            )
        )
    lines = {seed: [(point.n, float(point.rounds[i])) for point in points] for i, seed in enumerate(seeds)}
    return Speedup(
        case.name,
        case.algorithm,
        case.epsilon,
        case.local_steps,
        case.task.num_clients,
        case.estimates,
        tuple(points),
        fit(lines),
    )


def with_epsilon(case: Case, epsilon: float | None) -> Case:
    """The same case for another ε, if one is given."""
    return case if epsilon is None else replace(case, epsilon=epsilon)
