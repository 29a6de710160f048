"""Mini-batches drawn on a CUDA device by the same keys as on the host, so that nobody waits for a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..tasks import LazyPartition, Task
from .minibatches import batch_key
from .tensor_rng import below, extend_all, signed

if TYPE_CHECKING:
    from .trainer import TrainingJob


def host_samples(jobs: Sequence[TrainingJob], steps: int) -> NDArray[np.int64]:
    """The samples that jobs see, (C, steps, batch); after a job's own steps they mean nothing."""
    whole = np.zeros((len(jobs), steps, jobs[0].recipe.batch_size), dtype=np.int64)
    for place, job in enumerate(jobs):
        whole[place, : job.update.steps] = job.recipe.samples(job.task, job.update)
    return whole


class Shares:
    """Which samples every client of every task has, in one table on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tasks: dict[int, tuple[Task, list[int]]] = {}
        self._table = torch.zeros(0, dtype=torch.int64, device=device)

    def send(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Values on the device; neither the host nor the device waits."""
        return torch.tensor(values, dtype=dtype).pin_memory().to(self._device, non_blocking=True)

    def samples(self, jobs: Sequence[TrainingJob], steps: int) -> Tensor:
        """As ``host_samples``, on the device."""
        size = jobs[0].recipe.batch_size
        if any(job.recipe.sampling != "replacement" or isinstance(job.task.clients, LazyPartition) for job in jobs):
            return torch.from_numpy(host_samples(jobs, steps)).pin_memory().to(self._device, non_blocking=True)
        rows = []
        for job in jobs:
            starts, client = self._starts(job.task), job.update.client
            start = batch_key(job.recipe.seed, client, job.update.index)
            rows.append([signed(start), starts[client], len(job.task.clients[client])])
        keys, first, sizes = self.send(rows).unsqueeze(-1).unbind(1)
        drawn = below(extend_all(keys, torch.arange(steps * size, device=self._device)), sizes)
        return self._table[first + drawn].view(len(jobs), steps, size)

    def _starts(self, task: Task) -> list[int]:
        """Where the samples of a task's clients begin in the table."""
        if id(task) not in self._tasks:
            ends = np.cumsum([0, *(len(own) for own in task.clients)]) + len(self._table)
            # The task is kept, so that no other can get its id.
            self._tasks[id(task)] = task, ends[:-1].tolist()
            own = torch.from_numpy(np.concatenate(task.clients)).to(self._device)
            self._table = torch.cat([self._table, own])
        return self._tasks[id(task)][1]
