"""The tasks on which the speedup is measured by default.

Both have 128 clients, up to twice as slow as the fastest one, and a local step takes long compared with a transfer; n
is at most half of the clients. The parameters of least squares make the theorems' conditions hold at every n with the
largest staleness that occurs, and make the second term of the bound negligible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch.nn.functional as F
from torch import nn

from ..config import study as config
from ..config.study import Settings
from ..errors import UserError, unknown
from ..tasks import Task, least_squares, load, make_task, split
from .estimates import EstimateOptions, Estimates, Norms, closed_form_estimates, estimate, exact_norms, full_norms
from .formulas import THEOREMS, Constants

CLIENTS: Final = 128
TASKS: Final = ("least-squares", "network")


@dataclass(frozen=True, slots=True, eq=False)
class SpeedupCase:
    """A task with its constants, an algorithm, and ε."""

    name: str
    algorithm: str
    task: Task
    estimates: Estimates
    norms: Norms
    epsilon: float
    local_steps: int
    sampled_versions: int | None = None  # versions of a run whose gradient is computed; None: all

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise UserError(f"epsilon is {self.epsilon:g}; it must be a number above zero")

    def constants(self, n: int, rounds: int = 1, max_staleness: int = 1) -> Constants:
        """Return the theorems' constants for a run."""
        e, sizes = self.estimates, (n, self.local_steps, rounds, max(1, max_staleness), self.task.num_clients)
        return Constants(e.smoothness, e.noise, e.gap, e.gradient, e.heterogeneity, *sizes)

    def settings(self, n: int) -> Settings:
        """Return the settings of the simulation: long local steps, and the paper's links."""
        clients = {"num_clients": self.task.num_clients, "slowness": "uniform(1, 2)", "step_seconds": 1.0}
        steps = {"local_steps": self.local_steps, "batch_size": self.estimates.batch_size}
        tables = {"algorithms": [self.algorithm], "clients": clients, "training": {"updates_per_round": n, **steps}}
        (point,) = config.study(tables).points()
        return point.settings


def make_case(task: str, algorithm: str) -> SpeedupCase:
    """Return a case whose data suit the algorithm: identically distributed for DeFedAvg-IID, else not."""
    check_names(task, algorithm)
    return _quadratic(algorithm) if task == "least-squares" else _network(algorithm)


def check_names(task: str, algorithm: str) -> None:
    """Raise a UserError if the task or the algorithm is unknown."""
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if algorithm not in THEOREMS:
        raise unknown("algorithm", algorithm, THEOREMS)


def _quadratic(algorithm: str) -> SpeedupCase:
    """Return least squares with constants in closed form; its 256 dimensions keep the variance between runs small."""
    heterogeneous = algorithm == "defedavg-niid"
    problem = least_squares(
        CLIENTS,
        dimension=256,
        samples_per_client=100,
        noise=2.0 if heterogeneous else 1.0,
        heterogeneity=0.3 if heterogeneous else 0.0,
        curvature=(0.5, 1.0),
        start=0.1,
    )
    epsilon, estimates = 0.24 if heterogeneous else 0.16, closed_form_estimates(problem, 1)
    return SpeedupCase("least-squares", algorithm, problem.task, estimates, exact_norms(problem), epsilon, 2)


def _network(algorithm: str) -> SpeedupCase:
    """Return a non-convex task: one hidden layer of 16 units (tanh) on every second digit of mnist5k, 7×7 pixels."""
    kind = "classes" if algorithm == "defedavg-niid" else "iid"
    train, test, classes = load("mnist5k")
    inputs, targets = F.avg_pool2d(train.inputs[::2], 4), train.targets[::2]
    task = make_task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(49, 16), nn.Tanh(), nn.Linear(16, classes)),
        train=(inputs, targets),
        test=(F.avg_pool2d(test.inputs, 4), test.targets),
        clients=split(kind, targets.numpy(), CLIENTS, 0),
        classes=classes,
        name="network",
    )
    estimates = estimate(task, EstimateOptions(batch_size=4))
    return SpeedupCase("network", algorithm, task, estimates, full_norms(task), 0.1, 4, sampled_versions=100)
