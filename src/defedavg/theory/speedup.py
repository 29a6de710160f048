"""The measured speedup: rounds to a mean squared gradient norm of ε against the updates merged per round.

A theorem's rates depend on T. The rounds needed for ε are therefore the smallest T for which a run of T rounds with the
rates for T has (1/T) Σ_{t<T} ‖∇F(w^t)‖² ≤ ε. A bracketing search finds it for every n and seed. All runs of one task
and algorithm share the batches of one trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..algorithms.protocol import Update
from ..config.build import make_simulator
from ..errors import UserError
from ..planning.records import Record, Round, Stall
from ..tasks import Task
from ..training import BatchedRun, LocalTraining, Reference, RunProgress, Status, StoppingRule, Trainer, run_batched
from .estimates import Norms
from .formulas import rounds_to_reach, theorem
from .speedup_cases import SpeedupCase
from .speedup_result import Speedup, SpeedupTrial, summarise

BATCH_VERSIONS = 128  # versions whose gradients are computed together
INTERPOLATED_TRIALS = 8  # trials after which every step bisects the bracket
MAX_BATCH_JOBS = 128
LOOSENESS = {"defedavg-iid": 32, "defedavg-niid": 256}  # the bounds require about this many times the rounds needed

OnTrial = Callable[[SpeedupTrial], None]


class GradientRecorder(Reference):
    """Averages ‖∇F(w^t)‖² over t < ``rounds`` or over every ``every``-th version, and keeps the largest staleness."""

    def __init__(self, task: Task, recipe: LocalTraining, norms: Norms, rounds: int, every: int = 1) -> None:
        super().__init__(task, recipe)
        self._norms = norms
        self._rounds, self._every = rounds, every
        self._pending: list[Tensor] = []
        self._sum, self._count = 0.0, 0
        self.max_staleness = 0
        self._record(0, self.versions[0])

    def merge(self, record: Round, deltas: Mapping[Update, Tensor]) -> Tensor:
        """Merge the updates and record the new version."""
        merged = super().merge(record, deltas)
        self.max_staleness = max(self.max_staleness, *record.merge.staleness)
        self._record(record.merge.version, merged)
        return merged

    def _record(self, version: int, weights: Tensor) -> None:
        # One version represents ``every`` consecutive ones: the middle one.
        if version < self._rounds and version % self._every == self._every // 2:
            self._pending.append(weights)
            if len(self._pending) == BATCH_VERSIONS:
                self._compute_pending()

    def _compute_pending(self) -> None:
        if self._pending:
            self._sum += float(self._norms(torch.stack(self._pending)).double().sum())
            self._count += len(self._pending)
            self._pending.clear()

    @property
    def mean(self) -> float:
        """The mean of the recorded squared norms."""
        self._compute_pending()
        return self._sum / self._count


@dataclass
class HorizonSearch:
    """A bracketing search: it proposes ``rounds`` and takes the mean squared norm of a run of that many rounds.

    A run succeeds if its mean is at most ``epsilon``. The mean decreases roughly as 1/sqrt(T), which guides the first
    trials. The result is a T that succeeded and exceeds a T that failed by no more than the share ``tolerance``.
    """

    epsilon: float
    rounds: int  # of the next trial
    tolerance: float = 0.05
    max_rounds: int = 1_000_000
    failure: tuple[int, float] | None = None
    success: tuple[int, float] | None = None
    trials: int = 0

    def record(self, mean: float) -> None:
        """Record the mean of a run of ``rounds`` rounds (infinite if it diverged) and choose the next trial."""
        trial, self.trials = (self.rounds, mean), self.trials + 1
        succeeded = mean <= self.epsilon
        if succeeded:
            self.success = trial
        else:
            self.failure = trial
        if self.done or self.failed:
            return
        rounds = self._crossing(trial)
        if self.success is None or self.failure is None or self.trials < INTERPOLATED_TRIALS:
            # Overshoot a little, so that the next run is likely to have the other outcome and to close the bracket.
            rounds *= 1 / (1 + self.tolerance / 2) if succeeded else 1 + self.tolerance / 2
        low = self.failure[0] + 1 if self.failure else 1
        high = self.success[0] - 1 if self.success else self.max_rounds
        self.rounds = min(max(round(rounds), low), high)

    def _crossing(self, trial: tuple[int, float]) -> float:
        """Estimate the T at which the mean crosses ``epsilon``."""
        rounds, mean = trial
        if self.success is None or self.failure is None:
            factor = (mean / self.epsilon) ** 2 if math.isfinite(mean) else 2.0
            return rounds * min(max(factor, 1 / 2), 2.0)
        (low, above), (high, below) = self.failure, self.success
        if self.trials >= INTERPOLATED_TRIALS or not math.isfinite(above) or below <= 0:
            return math.sqrt(low * high)
        part = math.log(above / self.epsilon) / math.log(above / below)
        return low * math.exp(part * math.log(high / low))

    @property
    def done(self) -> bool:
        """Whether the result is known to the tolerance."""
        if self.success is None:
            return False
        if self.failure is None:
            return self.success[0] == 1
        low, high = self.failure[0], self.success[0]
        return high - low <= 1 or high <= low * (1 + self.tolerance)

    @property
    def failed(self) -> bool:
        """Whether a run of ``max_rounds`` failed."""
        return self.success is None and self.failure is not None and self.failure[0] >= self.max_rounds


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
    batch_size = case.estimates.batch_size
    module = Reference(case.task, LocalTraining(0, batch_size)).module
    trainer = Trainer(case.task, module, batch_size=batch_size, max_batch_jobs=MAX_BATCH_JOBS)

    def search(n: int, seed: int, guess: float) -> _RoundsSearch:
        first = max(2, min(max_rounds, round(guess)))
        return _RoundsSearch(case, n, seed, HorizonSearch(case.epsilon, first, tolerance, max_rounds))

    # The result of the middle n is the first guess for the other n; it has no other influence on them.
    first = _complete([search(middle, seed, promised / LOOSENESS[case.algorithm]) for seed in seeds], trainer, on_trial)
    guesses = [(n, trial.seed, trial.rounds * middle / n) for n in ns if n != middle for trial in first]
    others = _complete([search(*guess) for guess in guesses], trainer, on_trial)
    return summarise(case, ns, seeds, [*first, *others])


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


def _complete(searches: Sequence[_RoundsSearch], trainer: Trainer, on_trial: OnTrial | None) -> list[SpeedupTrial]:
    """Run trials until every search is done; return the trial of each with the smallest T that reached ε."""
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
    return [search.last_success for search in searches if search.last_success]


def _trials(pending: Iterable[_RoundsSearch], trainer: Trainer) -> Iterator[SpeedupTrial]:
    """Run one trial of every search in shared batches; yield each as it ends."""
    open_runs = {id(run): (run, search) for run, search in ((search.next_run(), search) for search in pending)}
    for run, _ in run_batched([run for run, _ in open_runs.values()], trainer):
        if not run.running:
            _, search = open_runs.pop(id(run))
            yield search.record(run)
    for run, search in open_runs.values():  # a run that diverges ends without an evaluation
        yield search.record(run)
