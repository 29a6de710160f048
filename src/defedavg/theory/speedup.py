"""The measured speedup: rounds to a mean squared gradient norm of ε against the updates merged per round.

A theorem's rates depend on T. The rounds needed for ε are therefore the smallest T for which a run of T rounds with the
rates for T has (1/T) Σ_{t<T} ‖∇F(w^t)‖² ≤ ε. A bracketing search finds it for every n and seed. All runs of one task
and algorithm share the batches of one trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..config.build import make_simulator
from ..errors import UserError
from ..planning.records import Record, Round, Stall
from ..training import BatchedRun, LocalTraining, RunProgress, Status, StoppingRule, Trainer, run_batched
from .formulas import theorem
from .gradient_recorder import GradientRecorder
from .horizon_search import HorizonSearch
from .required_rounds import rounds_to_reach
from .speedup_cases import SpeedupCase
from .speedup_result import Speedup, SpeedupTrial, summarise

MAX_BATCH_JOBS = 128
LOOSENESS = {"defedavg-iid": 32, "defedavg-niid": 256}  # the bounds require about this many times the rounds needed

OnTrial = Callable[[SpeedupTrial], None]


@dataclass
class _RoundsSearch:
    """The search for one n and seed, with the plan made so far and the last trial that reached ε."""

    case: SpeedupCase
    n: int
    seed: int
    horizon: HorizonSearch
    plan: list[Round | Stall] = field(default_factory=list)
    last_success: SpeedupTrial | None = None

    def __post_init__(self) -> None:
        self._simulator = iter(make_simulator(self.case.settings(self.n), self.seed))

    def records(self) -> Iterator[Record]:
        """Yield the rounds of the plan, which all trials share."""
        position = 0
        while True:
            while position >= len(self.plan):
                record = next(self._simulator)
                if isinstance(record, Round | Stall):
                    self.plan.append(record)
            yield self.plan[position]
            position += 1

    def next_run(self) -> BatchedRun:
        """Return the run of the next trial."""
        case, rounds = self.case, self.horizon.rounds
        rates = theorem(case.algorithm).rates(case.constants(self.n, rounds))
        recipe = LocalTraining(self.seed, case.estimates.batch_size, rates.global_lr, rates.local_lr)
        every = 1 if case.sampled_versions is None else -(-rounds // case.sampled_versions)
        recorder = GradientRecorder(case.task, recipe, case.norms, rounds, every)
        return BatchedRun(recorder, self.records(), StoppingRule(max_rounds=rounds, every_rounds=2**62), RunProgress())

    @property
    def result(self) -> SpeedupTrial:
        """The trial with the smallest T that reached ε."""
        assert self.last_success is not None
        return self.last_success

    def record(self, run: BatchedRun) -> SpeedupTrial:
        """Record a finished run and return it as a trial."""
        recorder = run.reference
        assert isinstance(recorder, GradientRecorder)
        mean = math.inf if run.progress.status is Status.DIVERGED else recorder.mean
        mean = mean if math.isfinite(mean) else math.inf
        case, rounds = self.case, self.horizon.rounds
        trial = SpeedupTrial(
            case.name, case.algorithm, self.n, self.seed, rounds, mean, recorder.max_staleness, case.epsilon
        )
        self.horizon.record(mean)
        if mean <= case.epsilon:
            self.last_success = trial
        return trial


def measure(
    case: SpeedupCase,
    ns: Sequence[int],
    seeds: Sequence[int],
    *,
    on_trial: OnTrial | None = None,
    tolerance: float = 0.05,
    max_rounds: int = 200_000,
) -> Speedup:
    """Search the rounds needed for every n and seed; ``on_trial`` receives every trial as it ends."""
    check_lists(ns, seeds)
    middle = sorted(ns)[len(ns) // 2]
    promised = rounds_to_reach(theorem(case.algorithm), case.constants(middle), case.epsilon)
    trainer = _trainer(case)

    def search(n: int, seed: int, guess: float) -> _RoundsSearch:
        first = max(2, min(max_rounds, round(guess)))
        return _RoundsSearch(case, n, seed, HorizonSearch(case.epsilon, first, tolerance, max_rounds))

    # The result of the middle n is the first guess for the other n; it has no other influence on them.
    first = {seed: search(middle, seed, promised / LOOSENESS[case.algorithm]) for seed in seeds}
    _complete(list(first.values()), trainer, on_trial)
    others = [search(n, seed, s.result.rounds * middle / n) for n in ns if n != middle for seed, s in first.items()]
    _complete(others, trainer, on_trial)
    return summarise(case, ns, seeds, [each.result for each in (*first.values(), *others)])


def check_lists(ns: Sequence[int], seeds: Sequence[int]) -> None:
    """Raise a UserError if a list is empty or has duplicates, or if a slope cannot be fitted."""
    for name, values in (("the list of n", ns), ("the list of seeds", seeds)):
        if not values:
            raise UserError(f"{name} is empty; give at least one")
        if len(set(values)) != len(values):
            raise UserError(f"{name} has a value twice: {', '.join(map(str, values))}; give each value once")
    if min(ns) < 1:
        raise UserError(f"n is {min(ns)}; it must be at least 1")
    if len(ns) < 2:
        raise UserError(f"n has only the value {ns[0]}; a slope needs at least two values")


def _trainer(case: SpeedupCase) -> Trainer:
    executor = GradientRecorder(case.task, LocalTraining(0, case.estimates.batch_size), case.norms, 1)
    return Trainer(case.task, executor.module, batch_size=case.estimates.batch_size, max_batch_jobs=MAX_BATCH_JOBS)


def _complete(searches: Sequence[_RoundsSearch], trainer: Trainer, on_trial: OnTrial | None) -> None:
    """Run trials until every search is done."""
    while pending := [search for search in searches if not search.horizon.done]:
        for trial in _trials(pending, trainer):
            if on_trial:
                on_trial(trial)
        for search in pending:
            if search.horizon.failed:
                case, max_rounds = search.case, search.horizon.max_rounds
                raise UserError(
                    f"{case.name}, {case.algorithm}, n = {search.n}: {max_rounds} rounds do not bring the mean squared "
                    f"gradient norm to {case.epsilon:g}; use a larger epsilon"
                )


def _trials(pending: Iterable[_RoundsSearch], trainer: Trainer) -> Iterator[SpeedupTrial]:
    """Run one trial of every search in shared batches; yield each as it ends."""
    open_runs = {id(run): (run, search) for run, search in ((search.next_run(), search) for search in pending)}
    for run, _ in run_batched([run for run, _ in open_runs.values()], trainer):
        if not run.running:
            _, search = open_runs.pop(id(run))
            yield search.record(run)
    for run, search in open_runs.values():  # a run that diverges ends without an evaluation
        yield search.record(run)
