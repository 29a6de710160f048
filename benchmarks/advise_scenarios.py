"""Fleets and tasks drawn by key, for ``advise.py``.

A scenario is a task (softmax regression or an MLP on scikit-learn's digits, or least squares), a split, a fleet and a
target. The key of a family and a number draw all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from defedavg import make_task
from defedavg.algorithms import ALGORITHMS
from defedavg.config import study as config
from defedavg.rng import below, extend, generator, key, permutation
from defedavg.tasks import Task
from defedavg.tasks.least_squares_task import least_squares

STEPS = 6000  # local steps of the whole fleet within the horizon
EVALUATIONS = 150


@dataclass(frozen=True)
class Scenario:
    """A task, a fleet as lines of a trace, and a study that names them."""

    name: str
    summary: str
    task: Task
    trace: str
    tables: dict[str, Any]

    def study(self, folder: Path) -> config.Study:
        """Return the study; the trace is written to the folder."""
        path = folder / f"{self.name}.csv"
        path.write_text(self.trace)
        clients = {"trace": str(path), "model_megabytes": 1.0, "num_clients": self.task.num_clients}
        return config.study({**self.tables, "clients": clients})


def pick(k: int, values: tuple[Any, ...]) -> Any:
    """Return one of the values."""
    return values[below(k, len(values))]


@cache
def digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return scikit-learn's digits, from its file: importing the package is slow, and the file alone is enough."""
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the digits come with scikit-learn; install it, or put its folder datasets/data on the path")
    rows = np.loadtxt(Path(found.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)


def digits_task(k: int, clients: int, kind: str, split: str) -> Task:
    """Return a task of digits; the split depends on the key alone."""
    inputs, labels = digits()
    order = permutation(extend(k, 1), len(inputs))
    x, y = (inputs[order] / 16).astype(np.float32), labels[order]
    train = np.arange(1400)
    draws = generator(extend(k, 2))
    if split == "iid":
        parts = np.array_split(train, clients)
    elif split == "classes":
        by_class = train[np.argsort(y[:1400], kind="stable")]
        shards = np.array_split(by_class, 2 * clients)
        dealt = permutation(extend(k, 3), 2 * clients).tolist()
        parts = [np.concatenate([shards[dealt[2 * i]], shards[dealt[2 * i + 1]]]) for i in range(clients)]
    else:
        owner = np.empty(1400, np.int64)
        for c in range(10):
            mine = train[y[:1400] == c]
            owner[mine] = draws.choice(clients, len(mine), p=draws.dirichlet(np.full(clients, 0.3)))
        owner[np.arange(2 * clients)] = np.arange(2 * clients) % clients  # none is empty
        parts = [np.flatnonzero(owner == i) for i in range(clients)]
    model = (
        partial(nn.Linear, 64, 10)
        if kind == "softmax"
        else lambda: nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    )
    return make_task(model=model, train=(x[:1400], y[:1400]), test=(x[1400:], y[1400:]), clients=parts, classes=10)


def least_squares_task(k: int, clients: int, heterogeneity: float) -> Task:
    """Return least squares whose metric is the share of the initial excess loss that is gone."""
    problem = least_squares(
        clients, dimension=16, heterogeneity=heterogeneity, curvature=(0.02, 1.0), seed=k % 2**31, start=4.0
    )
    start, least = problem.value(np.full(16, 4.0)), problem.minimum

    def excess_gone(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = 0.5 * (outputs - targets).square().sum(1).mean()
        return ((start - loss) / (start - least)).clamp(0.0, 1.0)

    return replace(problem.task, metric=excess_gone)


def draw(family: str, number: int) -> Scenario:
    """Draw a scenario."""
    k = key(number, f"benchmarks.advise.{family}")
    kind = pick(extend(k, 10), ("softmax", "softmax", "mlp", "least-squares"))
    clients = pick(extend(k, 11), (10, 16, 24))
    split = pick(extend(k, 12), ("iid", "dirichlet", "classes"))
    speeds = pick(extend(k, 13), ("equal", "uniform(1, 5)", "lognormal(0.8)", "two-speed"))
    link = pick(extend(k, 14), (0.5, 5.0, 20.0))  # transfer of a model, in steps of the fastest client
    windows = pick(extend(k, 15), (False, False, True))
    draws = generator(extend(k, 16))
    slow = {
        "equal": np.ones(clients),
        "uniform(1, 5)": draws.uniform(1, 5, clients),
        "lognormal(0.8)": draws.lognormal(0.0, 0.8, clients),
        "two-speed": np.where(draws.random(clients) < 0.3, 8.0, 1.0),
    }[speeds]
    if kind == "least-squares":
        spread = {"iid": 0.0, "dirichlet": 0.5, "classes": 1.5}[split]
        task, target = least_squares_task(extend(k, 17), clients, spread), 0.98
    else:
        task = digits_task(extend(k, 17), clients, kind, split)
        target = {"iid": 0.9, "dirichlet": 0.88, "classes": 0.85}[split]
    step = 0.01 * slow
    megabits = 8.0 / (0.01 * link)  # a message has one megabyte
    horizon = STEPS / float((10 / (10 * step + 0.02 * link)).sum())
    lines = ["client,step_seconds,up_mbps,down_mbps" + (",available_from,available_to,repeat_every" if windows else "")]
    for i in range(clients):
        row = f"{i},{step[i]:.6g},{megabits:.6g},{megabits:.6g}"
        if windows:
            period, begin = horizon / 4, float(draws.random()) * horizon / 4
            row += f",{begin:.6g},{begin + 0.7 * period:.6g},{period:.6g}"
        lines.append(row)
    tables: dict[str, Any] = {
        "name": f"{family}-{number}",
        "training": {
            "updates_per_round": [max(1, clients // 8), clients // 2],
            "local_steps": [5, 20],
            "local_lr": [0.02, 0.1, 0.5],
            "global_lr": [0.3, 1.0],
            "timeout_seconds": [0.0],
        },
        "stop": {
            "target_accuracy": target,
            "max_seconds": horizon / (0.7 if windows else 1.0),
            "eval_every_seconds": horizon / EVALUATIONS,
        },
        "asysg": {"global_lr": [0.02, 0.1, 0.5]},
        "fadas": {"global_lr": [0.003, 0.03]},
        "fedbuff": {"concurrency": [clients // 2, 0]},
        **{name: {"wait_seconds": [float(f"{np.median(10 * step) / 2:.2g}")]} for name in ("favano", "quafl")},
    }
    for name, algorithm in ALGORITHMS.items():
        if name != "fedbuff" and "concurrency" in algorithm.settings_type.__dataclass_fields__:
            tables.setdefault(name, {})["concurrency"] = [0]
    summary = f"{kind}, {split}, {clients} clients, {speeds}, transfer {link:g} steps" + (
        ", windows" if windows else ""
    )
    return Scenario(f"{family}-{number}", summary, task, "\n".join(lines) + "\n", tables)
