"""Evaluates one version per client: one pass over the samples of all clients, then means by client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..tasks import Task
from ..tasks.client_tests import tested_data
from ..tasks.task import ClientTests
from .reference import Reference
from .scoring import hits, own_metric, sample_losses

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ClientScores:
    """Loss and metric of one version, for every client of ``tests``; NaN for a client without samples.

    ``accuracy`` is the accuracy or the task's own metric, None if the task has neither.
    """

    tests: ClientTests
    samples: NDArray[np.int64]
    loss: Floats
    accuracy: Floats | None


def segment_means(values: Floats, sizes: NDArray[np.int64]) -> Floats:
    """Return the means of consecutive segments; NaN for an empty one."""
    owners = np.repeat(np.arange(len(sizes)), sizes)
    sums = np.bincount(owners, weights=values, minlength=len(sizes))
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan)


def evaluate_clients(executor: Reference, weights: Tensor) -> ClientScores | None:
    """Return the scores of a version; None if the task has no tests of clients, or if the version is not finite."""
    task = executor.task
    tests = task.client_tests
    if tests is None or not bool(torch.isfinite(weights).all()):
        return None
    data = tested_data(task, tests)
    chosen = data[torch.from_numpy(np.concatenate(tests.samples)).to(data.device)]
    sizes = np.array([len(samples) for samples in tests.samples])
    losses, correct, kept = [], [], []
    for part, outputs in executor.outputs(weights, chosen):
        losses.append(sample_losses(task, outputs, part.targets).double())
        if task.metric is not None:
            kept.append(outputs)
        elif task.classes is not None:
            correct.append(hits(outputs, part.targets))
    # The sums are computed on the host: on a CUDA device their order, and so their last bits, could vary.
    loss = segment_means(torch.cat(losses).cpu().numpy(), sizes)
    accuracy: Floats | None = None
    if correct:
        accuracy = segment_means(torch.cat(correct).cpu().double().numpy(), sizes)
    elif kept:
        accuracy = _own_metrics(task, torch.cat(kept), chosen.targets, sizes)
    return ClientScores(tests, sizes, loss, accuracy)


def _own_metrics(task: Task, outputs: Tensor, targets: Tensor, sizes: NDArray[np.int64]) -> Floats:
    """Return the task's own metric of every segment."""
    pairs = zip(*(torch.split(each, sizes.tolist()) for each in (outputs, targets)), strict=True)
    found = [own_metric(task, *pair) if len(pair[1]) else None for pair in pairs]
    return np.array([np.nan if value is None else value for value in found])
