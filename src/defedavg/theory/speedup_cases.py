"""The tasks on which speedup is measured by default.

Both have 128 clients, one to two times slower than the fastest, whose computing takes long compared with their links;
n goes up to half of them. Least squares is chosen such that the conditions of the theorems hold at every n, with the
largest staleness that occurs, and that the bound's second term does not matter.
"""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F
from torch import nn

from ..errors import unknown
from ..tasks import Task, least_squares, load, make_task, split
from .estimates import Probe, Say, estimate, known
from .objective import exact_norms, full_norms
from .speedup import Case

CLIENTS: Final = 128
ALGORITHMS: Final = ("defedavg-iid", "defedavg-niid")
TASKS: Final = ("least-squares", "network")


def make_case(task: str, algorithm: str, say: Say | None = None) -> Case:
    """One of the tasks, with data that suit the algorithm: alike for DeFedAvg-IID, of different kinds for the other."""
    check_names(task, algorithm)
    return quadratic(algorithm) if task == "least-squares" else network(algorithm, say)


def check_names(task: str, algorithm: str) -> None:
    """Whether there are such a task and such an algorithm here."""
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, ALGORITHMS)


def quadratic(algorithm: str) -> Case:
    """Least squares in 256 dimensions, of which all constants are known; so many that single runs scatter little."""
    mixed = algorithm == "defedavg-niid"
    problem = least_squares(
        CLIENTS,
        dimension=256,
        samples_per_client=100,
        noise=2.0 if mixed else 1.0,
        heterogeneity=0.3 if mixed else 0.0,
        curvature=(0.5, 1.0),
        start=0.1,
    )
    epsilon = 0.24 if mixed else 0.16
    return Case("least-squares", algorithm, problem.task, known(problem, 1), exact_norms(problem), epsilon, 2)


def network(algorithm: str, say: Say | None = None) -> Case:
    """A network with one hidden layer of 16 units (tanh) on 2,000 digits of 7×7 pixels; nothing about it is convex."""
    task = digits("classes" if algorithm == "defedavg-niid" else "iid")
    found = estimate(task, Probe(batch_size=4), say=say)
    return Case("network", algorithm, task, found, full_norms(task), 0.1, 4, looks=100)


def digits(kind: str) -> Task:
    """Every second digit of mnist5k, averaged over 4×4 pixels, split over the clients."""
    train, test, classes = load("mnist5k")
    inputs, targets = F.avg_pool2d(train.inputs[::2], 4), train.targets[::2]
    return make_task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(49, 16), nn.Tanh(), nn.Linear(16, classes)),
        train=(inputs, targets),
        test=(F.avg_pool2d(test.inputs, 4), test.targets),
        clients=split(kind, targets.numpy(), CLIENTS, 0),
        classes=classes,
        name="network",
    )
