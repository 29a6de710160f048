"""Groups of jobs, each of which one thread of the CPU trains together, and their steps without autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..tasks import Task
from .augmentation import augmentation_of
from .local_training import TrainingJob
from .scoring import output_gradient
from .stacked_optimizer import LocalMethod, StackedOptimizer
from .stacking.direct import DirectStep
from .stacking.layer_registry import StackedLayer, StackedPass
from .tensor_rng import extend_all

SMALL_GROUP = 4  # jobs; the jobs of larger groups are so short that an uneven end costs little


def groups_of(
    jobs: Sequence[TrainingJob], largest: int, concurrent: int, *, even_end: bool
) -> list[Sequence[TrainingJob]]:
    """Return groups of jobs, one for a thread at a time, such that all threads end at about the same time.

    Few jobs are divided among all threads. With ``even_end`` groups become smaller towards the end, down to one job.
    """
    size = min(largest, -(-len(jobs) // concurrent))
    groups = []
    while jobs:
        count = min(size, -(-len(jobs) // (2 * concurrent))) if even_end else size
        groups.append(jobs[:count])
        jobs = jobs[count:]
    return groups


def active_counts(steps: Sequence[int]) -> Iterator[int]:
    """Yield for every step how many jobs do it; ``steps`` are the jobs' numbers of steps, the largest first."""
    active = len(steps)
    for step in range(steps[0]):
        while steps[active - 1] <= step:
            active -= 1
        yield active


@dataclass(frozen=True, slots=True, eq=False)
class JobGroup:
    """Jobs in the order of their numbers of steps, the longest first."""

    weights: Mapping[str, Tensor]  # (C, …), trained in place
    steps: Sequence[int]
    samples: Tensor  # (C, steps, B)
    rates: Tensor  # (C,)
    keys: Tensor  # (C,): random operations draw from them

    def active_steps(self, stopped: Callable[[], bool]) -> Iterator[tuple[int, int]]:
        """Yield the number of every step, and how many jobs, the first ones, do it."""
        for step, active in enumerate(active_counts(self.steps)):
            if stopped():
                return
            yield step, active


def train_directly(
    group: JobGroup, task: Task, layers: Sequence[StackedLayer], method: LocalMethod,
    optimizer: StackedOptimizer | None, stopped: Callable[[], bool],
) -> None:  # fmt: skip
    """Do all steps of a group without autograd; without an ``optimizer``, those of plain SGD."""
    size, augmentation = group.samples.shape[2], augmentation_of(method.augment)
    order = group.samples.transpose(0, 1).reshape(group.steps[0], -1)
    prepared, clients = None, 0
    for step, active in group.active_steps(stopped):
        if prepared is None or active != clients:
            weights, clients = {name: w[:active] for name, w in group.weights.items()}, active
            into = {} if optimizer is None else {name: g[:active] for name, g in optimizer.gradients.items()}
            rates = group.rates[:active] if optimizer is None else -torch.ones_like(group.rates[:active])
            prepared = DirectStep(layers, StackedPass(weights, rates, targets=into))
        chosen = order[step, : active * size]
        inputs, targets = (values.index_select(0, chosen) for values in task.train.tensors)
        if augmentation is not None:
            inputs = augmentation.stacked(inputs, extend_all(group.keys[:active], torch.tensor(step)))
        for gradient in into.values():
            gradient.zero_()
        prepared(inputs, partial(output_gradient, task, targets=targets, size=size))
        if optimizer is not None:
            optimizer.step(weights)
