"""The settings of the benchmark: tasks, fleets, rates and limits, as code with a version.

A cell is one algorithm on one task and one fleet. The rates of every cell are tuned on a seed that is not reported:
each algorithm has the same number of runs, and each run the same limits of simulated seconds and of merged updates.
The file of a cell has the hash of its settings, and results of other settings are not shown; change ``SUITE_VERSION``
where a change that is not among these settings affects results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypedDict

from ..algorithms import ALGORITHMS, algorithm
from ..config import study as config
from ..config.study import Study
from ..errors import unknown

SUITE_VERSION: Final = 1
SEEDS: Final = (0, 1, 2)
TUNING_SEED: Final = 100
TUNING_SHARE: Final = 0.5
"""The limits of a run that tunes rates, as a share of those of a reported run."""

CLIENTS: Final = 100
UPDATES_PER_ROUND: Final = 10
EVALUATIONS: Final = 100
"""Evaluations of a run that uses all of its updates, at most; they are equally far apart."""
SINGLE_GRADIENTS: Final = 10
"""Updates of a single gradient that count as one update of as many steps or more in the limits: they teach less, but
cost as many bytes."""
HELD: Final = 5
"""Evaluations in a row at the target that end a run: the time of the first of them is reported."""

GLOBAL_RATES: Final = (0.1, 1.0)
"""Of algorithms that merge n updates at a time. One that merges single updates has η/n instead, the same step each."""
ADAPTIVE_RATES: Final = (0.001, 0.01)
"""Global rates of algorithms whose server divides by the root of a mean square: their steps have another scale."""
LOCAL_RATES: Final = (0.01, 0.05, 0.1)
SINGLE_RATES: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Rates of algorithms that have one rate only: as many values as the others have pairs."""
ADAPTIVE_SERVERS: Final = ("adagrad", "adam", "amsgrad", "yogi")

ALGORITHM_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {"asysg": {"concurrency": UPDATES_PER_ROUND}}
"""Settings of algorithms other than their defaults. AsySG: n clients at work, as in the reproduction of the paper."""


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """A task with its target and the limits of its runs.

    A run ends after ``updates`` merged updates; up to ``SINGLE_GRADIENTS`` updates of a single gradient count as one.
    ``rate_scale`` multiplies the local rates of the grid, and all rates of algorithms that have one rate only.
    """

    name: str
    summary: str
    data: str
    model: str
    split: str
    target: float
    updates: int
    seconds: float
    phone_seconds: float
    step_seconds: float
    model_megabytes: float
    local_steps: int = 50
    alpha: float = 0.5
    min_samples_per_client: int = 1
    client_test_share: float = 0.2
    rate_scale: float = 1.0
    quick: bool = False

    @property
    def table(self) -> dict[str, Any]:
        """The table [task] of a study."""
        table: dict[str, Any] = {"data": self.data, "model": self.model, "split": self.split}
        if self.split == "dirichlet":
            table["alpha"] = self.alpha
        if self.split == "natural":
            table["min_samples_per_client"] = self.min_samples_per_client
        return {**table, "client_test_share": self.client_test_share}


@dataclass(frozen=True, slots=True)
class SuiteFleet:
    """A fleet of ``CLIENTS`` devices; the duration of a step is the task's, except for phones."""

    name: str
    summary: str
    slowness: str
    links: str = "equal"
    availability: str = "always"
    step_seconds: float | None = None
    timeout_seconds: float = 0.0

    @property
    def has_phones(self) -> bool:
        """Whether the devices are phones, which need days instead of minutes."""
        return self.availability == "phones"


_DAY: Final = 86400.0


class _Mlp(TypedDict):
    step_seconds: float
    local_steps: int
    rate_scale: float


_MLP: Final[_Mlp] = {"step_seconds": 0.01, "local_steps": 20, "rate_scale": 2.0}
"""Two cores train hundreds of updates per second, so that no task needs a GPU."""

TASKS: Final[Mapping[str, SuiteTask]] = {
    task.name: task
    for task in (
        SuiteTask(
            "digits-pairs", "5,000 digits, two classes per client, softmax regression", "mnist5k", "softmax", "classes",
            target=0.85, updates=1600, seconds=60.0, phone_seconds=2 * _DAY, step_seconds=0.01, model_megabytes=0.031,
            local_steps=10, rate_scale=2.0, quick=True,
        ),
        SuiteTask(
            "fashionmnist-iid", "FashionMNIST, IID, MLP", "fashionmnist", "mlp", "iid",
            target=0.82, updates=6000, seconds=120.0, phone_seconds=7 * _DAY, model_megabytes=0.204, **_MLP,
        ),
        SuiteTask(
            "fashionmnist-pairs", "FashionMNIST, two classes per client, MLP", "fashionmnist", "mlp", "classes",
            target=0.72, updates=6000, seconds=120.0, phone_seconds=7 * _DAY, model_megabytes=0.204, **_MLP,
        ),
        SuiteTask(
            "cifar10-dirichlet", "CIFAR-10, Dirichlet(0.5), MLP on pooled images", "cifar10", "pooled-mlp", "dirichlet",
            target=0.38, updates=6000, seconds=120.0, phone_seconds=7 * _DAY, model_megabytes=0.2, **_MLP,
        ),
        SuiteTask(
            "flights", "delays of flights, 100 aircraft, MLP", "flights", "mlp", "natural",
            target=0.79, updates=6000, seconds=120.0, phone_seconds=7 * _DAY, model_megabytes=0.017,
            min_samples_per_client=40, client_test_share=0.0, **_MLP,
        ),
        SuiteTask(
            "mnist-writers", "MNIST, 100 writers, MLP", "mnist-writers", "mlp", "natural",
            target=0.91, updates=6000, seconds=120.0, phone_seconds=7 * _DAY, model_megabytes=0.204, **_MLP,
        ),
        SuiteTask(
            "shakespeare-roles", "characters of 100 roles of Shakespeare, MLP", "shakespeare-roles", "char-mlp",
            "natural", target=0.28, updates=3000, seconds=120.0, phone_seconds=7 * _DAY, step_seconds=0.01,
            model_megabytes=0.035, local_steps=5, min_samples_per_client=10, client_test_share=0.0, rate_scale=10.0,
        ),
    )
}  # fmt: skip

FLEETS: Final[Mapping[str, SuiteFleet]] = {
    fleet.name: fleet
    for fleet in (
        SuiteFleet("equal", "equal devices, 400 Mbit/s", "equal"),
        SuiteFleet("paper", "slowness uniform in [1, 5], 400 Mbit/s", "uniform(1, 5)"),
        SuiteFleet(
            "phones", "measured phones: speed, links, and available some hours a day", "phones", "phones", "phones",
            step_seconds=0.172, timeout_seconds=120.0,
        ),
    )
}  # fmt: skip


PHONE_TARGETS: Final[Mapping[str, float]] = {
    "digits-pairs": 0.7, "fashionmnist-pairs": 0.6, "cifar10-dirichlet": 0.32, "mnist-writers": 0.88,
}  # fmt: skip
"""Lower targets on phones: the phones that are ready during a run do not have all classes in equal parts."""


@dataclass(frozen=True, slots=True)
class SuiteCell:
    """One algorithm on one task and one fleet."""

    task: SuiteTask
    fleet: SuiteFleet
    algorithm: str

    @property
    def label(self) -> str:
        """The cell in one line."""
        return f"{self.task.name} {self.fleet.name} {self.algorithm}"

    @property
    def seconds(self) -> float:
        """The simulated seconds of a reported run, at most."""
        return self.task.phone_seconds if self.fleet.has_phones else self.task.seconds

    @property
    def target(self) -> float:
        """The accuracy to be held."""
        return PHONE_TARGETS.get(self.task.name, self.task.target) if self.fleet.has_phones else self.task.target

    @property
    def steps_per_job(self) -> int:
        """The local steps of a job."""
        return algorithm(self.algorithm).steps_per_job(self.task.local_steps)

    @property
    def counted_as_one(self) -> int:
        """How many of the algorithm's updates count as one in the limits."""
        single = self.steps_per_job < self.task.local_steps
        return min(SINGLE_GRADIENTS, self.task.local_steps) if single else 1

    @property
    def max_rounds(self) -> int:
        """The rounds of a reported run, at most: those that use up its updates."""
        merged = algorithm(self.algorithm).updates_per_merge(UPDATES_PER_ROUND)
        return self.task.updates * self.counted_as_one // merged

    @property
    def settings_sha256(self) -> str:
        """The hash of everything that determines the cell's numbers except the code of the algorithm."""
        fixed = [SUITE_VERSION, SEEDS, TUNING_SEED, TUNING_SHARE, CLIENTS, UPDATES_PER_ROUND, EVALUATIONS, HELD]
        rates = [GLOBAL_RATES, ADAPTIVE_RATES, LOCAL_RATES, SINGLE_RATES]
        own = ALGORITHM_SETTINGS.get(self.algorithm, {})
        target = [] if self.target == self.task.target else [self.target]
        parts = [fixed, rates, asdict(self.task), asdict(self.fleet), self.algorithm, own, *target]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def grid(task: SuiteTask, name: str) -> dict[str, list[float]]:
    """Return the rates that are tried for an algorithm: the same number of runs for each that has a rate."""
    kind = algorithm(name)
    scaled = [rate * task.rate_scale for rate in LOCAL_RATES]
    single = [rate * task.rate_scale for rate in SINGLE_RATES]
    has_global = kind.uses_global_lr or kind.server_optimizer != "sgd"
    if has_global and kind.uses_local_lr:
        merged = kind.updates_per_merge(UPDATES_PER_ROUND)
        adaptive = kind.server_optimizer in ADAPTIVE_SERVERS
        rates = ADAPTIVE_RATES if adaptive else [rate * merged / UPDATES_PER_ROUND for rate in GLOBAL_RATES]
        return {"global_lr": list(rates), "local_lr": scaled}
    if has_global or kind.uses_local_lr:
        return {"global_lr" if has_global else "local_lr": single}
    return {}


def tuning_runs(task: SuiteTask, name: str) -> int:
    """Return the number of runs that tune an algorithm."""
    number = 1
    for rates in grid(task, name).values():
        number *= len(rates)
    return number


def tuning_study(cells: Sequence[SuiteCell], plugins: Sequence[str] = ()) -> Study:
    """Return the study that tries the rates of cells that share task, fleet and limits, on the tuning seed."""
    rates = {cell.algorithm: grid(cell.task, cell.algorithm) for cell in cells}
    return _study(cells, rates, (TUNING_SEED,), TUNING_SHARE, plugins)


def reported_study(
    cells: Sequence[SuiteCell], rates: Mapping[str, Mapping[str, float]], plugins: Sequence[str] = ()
) -> Study:
    """Return the study of the reported seeds at the rates that were chosen for each algorithm."""
    return _study(cells, rates, SEEDS, 1.0, plugins)


def _study(
    cells: Sequence[SuiteCell],
    rates: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    share: float,
    plugins: Sequence[str],
) -> Study:
    first = cells[0]
    task, fleet = first.task, first.fleet
    tables: dict[str, Any] = {
        "name": "suite",
        "algorithms": [cell.algorithm for cell in cells],
        "seeds": list(seeds),
        "task": task.table,
        "clients": {
            "num_clients": CLIENTS,
            "slowness": fleet.slowness,
            "links": fleet.links,
            "availability": fleet.availability,
            "step_seconds": task.step_seconds if fleet.step_seconds is None else fleet.step_seconds,
            "model_megabytes": task.model_megabytes,
        },
        "training": {
            "updates_per_round": UPDATES_PER_ROUND,
            "local_steps": task.local_steps,
            "timeout_seconds": fleet.timeout_seconds,
        },
        "stop": {
            "target_accuracy": first.target,
            "consecutive_hits": HELD,
            "max_rounds": max(1, int(first.max_rounds * share)),
            "max_seconds": first.seconds * share,
            "eval_every_rounds": max(1, first.max_rounds // EVALUATIONS),
        },
    }
    for cell in cells:
        tables[cell.algorithm] = {**ALGORITHM_SETTINGS.get(cell.algorithm, {}), **rates.get(cell.algorithm, {})}
    return config.study(tables, plugins=plugins)


def select_cells(
    tasks: Sequence[str] | None, fleets: Sequence[str] | None, algorithms: Sequence[str] | None
) -> list[SuiteCell]:
    """Return the cells of tasks, fleets and algorithms; None selects all of them."""
    for what, names, known in (("task of the suite", tasks, TASKS), ("fleet of the suite", fleets, FLEETS)):
        for name in names or ():
            if name not in known:
                raise unknown(what, name, known)
    for name in algorithms or ():
        ALGORITHMS.find(name)
    return [
        SuiteCell(TASKS[task], FLEETS[fleet], name)
        for task in dict.fromkeys(tasks or TASKS)
        for fleet in dict.fromkeys(fleets or FLEETS)
        for name in dict.fromkeys(algorithms or ALGORITHMS)
    ]


def batches(cells: Sequence[SuiteCell]) -> list[tuple[SuiteCell, ...]]:
    """Return the cells in groups that one study can compute: they share task, fleet, rounds and steps."""
    groups: dict[tuple[str, str, int, int], list[SuiteCell]] = {}
    for cell in cells:
        key = cell.task.name, cell.fleet.name, cell.max_rounds, cell.steps_per_job
        groups.setdefault(key, []).append(cell)
    return [tuple(group) for group in groups.values()]
