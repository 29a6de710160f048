"""Local training: the hyperparameters of a run's jobs, and the mini-batches that a job draws.

Mini-batches are a pure function of (seed, client, job), whatever else is computed. A CUDA device draws them from the
same keys as the host, so that no job waits for a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..algorithms.protocol import Update
from ..rng import extend, extend_all, key, permutation
from ..tasks import LazyPartition, Task
from . import tensor_rng
from .server_optimizers import SGD, ServerOptimizer


def positions(
    seed: int, client: int, index: int, *, steps: int, batch_size: int, size: int, sampling: str = "replacement"
) -> NDArray[np.int64]:
    """Return the positions of every step's mini-batch in the client's samples, (steps, batch_size).

    ``replacement`` draws every position independently; ``shuffle`` draws a new order of the samples for each epoch, and
    a mini-batch at the end of an epoch continues into the next one.
    """
    start, count = key(seed, "batch", client, index), steps * batch_size
    if sampling == "replacement":
        keys = extend_all(start, np.arange(count))
        drawn = (((keys >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
    else:
        epochs = [permutation(extend(start, epoch), size) for epoch in range(-(-count // size))]
        drawn = np.concatenate([np.zeros(0, np.int64), *epochs])[:count]
    return drawn.reshape(steps, batch_size)


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """Hyperparameters of the local training and of the merge that follows it."""

    seed: int
    batch_size: int = 10
    global_lr: float = 1.0
    local_lr: float = 0.05
    sampling: str = "replacement"
    server: ServerOptimizer = SGD

    def layer_key(self, update: Update) -> int:
        """Return the key from which random layers, such as dropout, draw during a job."""
        return key(self.seed, "layers", update.client, update.index)

    def samples(self, task: Task, update: Update, client_samples: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return the training samples of a job, (steps, batch_size).

        ``client_samples`` replaces the client's samples of the task.
        """
        samples = task.clients[update.client] if client_samples is None else client_samples
        sizes = {"steps": update.steps, "batch_size": self.batch_size, "size": len(samples)}
        return samples[positions(self.seed, update.client, update.index, **sizes, sampling=self.sampling)]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingJob:
    """One client's job: its hyperparameters and data, the weights that it starts from, and its update's identity."""

    local_training: LocalTraining
    task: Task
    start: Tensor
    update: Update


def host_minibatches(jobs: Sequence[TrainingJob], steps: int) -> NDArray[np.int64]:
    """Return the samples of jobs, (C, steps, batch); entries after a job's last step are unused."""
    samples = np.zeros((len(jobs), steps, jobs[0].local_training.batch_size), dtype=np.int64)
    for slot, job in enumerate(jobs):
        samples[slot, : job.update.steps] = job.local_training.samples(job.task, job.update)
    return samples


class DeviceMinibatches:
    """Draws mini-batches on a device, which holds one table of the samples of every client of every task."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tasks: dict[int, tuple[Task, list[int]]] = {}
        self._table = torch.zeros(0, dtype=torch.int64, device=device)

    def send(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return values on the device; neither the host nor the device waits."""
        return torch.tensor(values, dtype=dtype).pin_memory().to(self._device, non_blocking=True)

    def draw(self, jobs: Sequence[TrainingJob], steps: int) -> Tensor:
        """Return what ``host_minibatches`` returns, on the device."""
        size = jobs[0].local_training.batch_size
        kinds = {(job.local_training.sampling, isinstance(job.task.clients, LazyPartition)) for job in jobs}
        if kinds != {("replacement", False)}:
            return torch.from_numpy(host_minibatches(jobs, steps)).pin_memory().to(self._device, non_blocking=True)
        rows = []
        for job in jobs:
            starts, client = self._starts(job.task), job.update.client
            start = key(job.local_training.seed, "batch", client, job.update.index)
            rows.append([tensor_rng.signed(start), starts[client], len(job.task.clients[client])])
        keys, first, sizes = self.send(rows).unsqueeze(-1).unbind(1)
        elements = torch.arange(steps * size, device=self._device)
        drawn = tensor_rng.below(tensor_rng.extend_all(keys, elements), sizes)
        return self._table[first + drawn].view(len(jobs), steps, size)

    def _starts(self, task: Task) -> list[int]:
        """Return the offsets of the clients' samples in the table, to which a new task is added."""
        if id(task) not in self._tasks:
            ends = np.cumsum([0, *(len(samples) for samples in task.clients)]) + len(self._table)
            # The reference to the task keeps its id from being reused.
            self._tasks[id(task)] = task, ends[:-1].tolist()
            samples = torch.from_numpy(np.concatenate(task.clients)).to(self._device)
            self._table = torch.cat([self._table, samples])
        return self._tasks[id(task)][1]
