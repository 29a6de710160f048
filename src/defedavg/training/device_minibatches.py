"""Mini-batches drawn on a CUDA device from the same keys as on the host, so that no job waits for a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..tasks import LazyPartition, Task
from .local_training import TrainingJob
from .minibatches import batch_key
from .tensor_rng import below, extend_all, signed


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
        if any(
            job.local_training.sampling != "replacement" or isinstance(job.task.clients, LazyPartition) for job in jobs
        ):
            return torch.from_numpy(host_minibatches(jobs, steps)).pin_memory().to(self._device, non_blocking=True)
        rows = []
        for job in jobs:
            starts, client = self._starts(job.task), job.update.client
            start = batch_key(job.local_training.seed, client, job.update.index)
            rows.append([signed(start), starts[client], len(job.task.clients[client])])
        keys, first, sizes = self.send(rows).unsqueeze(-1).unbind(1)
        drawn = below(extend_all(keys, torch.arange(steps * size, device=self._device)), sizes)
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
