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
from ..planning.rate_schedules import schedule_of
from ..rng import Keys, below_all, extend, extend_all, key, permutation
from ..tasks import LazyPartition, Task
from . import tensor_rng
from .server_optimizers import SGD, ServerOptimizer

BATCH, LAYERS = "batch", "layers"  # the purposes of keys
MAX_SORTED = 1 << 22  # numbers that a device sorts at once to shuffle samples; beyond them, the host shuffles


def positions(
    seed: int, client: int, index: int, *, steps: int, batch_size: int, size: int, sampling: str = "replacement"
) -> NDArray[np.int64]:
    """Return the positions of every step's mini-batch in the client's samples, (steps, batch_size).

    ``replacement`` draws every position independently; ``shuffle`` draws a new order of the samples for each epoch, and
    a mini-batch at the end of an epoch continues into the next one.
    """
    start, count = key(seed, BATCH, client, index), steps * batch_size
    if sampling == "replacement":
        drawn = below_all(extend_all(start, np.arange(count)), np.uint64(size))
    else:
        epochs = [permutation(extend(start, epoch), size) for epoch in range(-(-count // size))]
        drawn = np.concatenate([np.zeros(0, np.int64), *epochs])[:count]
    return drawn.reshape(steps, batch_size)


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """Hyperparameters of the local training and of the merge that follows it; the defaults are plain SGD."""

    seed: int
    batch_size: int = 10
    global_lr: float = 1.0
    local_lr: float = 0.05
    sampling: str = "replacement"
    optimizer: str = "sgd"  # or adam, adamw
    momentum: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    prox: float = 0.0
    clip_norm: float = 0.0
    local_schedule: str = "constant"
    global_schedule: str = "constant"
    schedule_by: str = "version"  # or seconds
    augment: str = "none"
    server: ServerOptimizer = SGD

    def local_rate(self, version: int, seconds: float) -> float:
        """Return the local rate of a job that starts from a version made at ``seconds``."""
        return self.local_lr * schedule_of(self.local_schedule).factor(self._position(version, seconds))

    def global_rate(self, version: int, seconds: float) -> float:
        """Return the global rate of a merge; version and time are those of the newest version before it."""
        return self.global_lr * schedule_of(self.global_schedule).factor(self._position(version, seconds))

    def _position(self, version: int, seconds: float) -> float:
        return float(version) if self.schedule_by == "version" else seconds

    def layer_key(self, update: Update) -> int:
        """Return the key from which random layers, such as dropout, draw during a job."""
        return key(self.seed, LAYERS, update.client, update.index)

    def samples(self, task: Task, update: Update, client_samples: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return the training samples of a job, (steps, batch_size).

        ``client_samples`` replaces the client's samples of the task.
        """
        samples = task.clients[update.client] if client_samples is None else client_samples
        sizes = {"steps": update.steps, "batch_size": self.batch_size, "size": len(samples)}
        return samples[positions(self.seed, update.client, update.index, **sizes, sampling=self.sampling)]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingJob:
    """One client's job: its hyperparameters and data, the weights that it starts from, and its update's identity.

    ``rate`` is its local rate, ``local_lr`` if None. The proximal term pulls towards ``centre``, the start if None.
    ``correction`` is added to every gradient. Both are vectors with the layout of a version.
    """

    local_training: LocalTraining
    task: Task
    start: Tensor
    update: Update
    rate: float | None = None
    centre: Tensor | None = None
    correction: Tensor | None = None

    @property
    def local_rate(self) -> float:
        """The local rate of every step."""
        return self.local_training.local_lr if self.rate is None else self.rate


def job_keys(jobs: Sequence[TrainingJob], purpose: str) -> Keys:
    """Return ``key(seed, purpose, client, index)`` of every job, in a few operations for all of them."""
    seeds = [job.local_training.seed for job in jobs]
    of_seed = {seed: key(seed, purpose) for seed in seeds}
    numbers = np.array([(job.update.client, job.update.index) for job in jobs], np.int64)
    return extend_all(extend_all(np.array([of_seed[seed] for seed in seeds], np.uint64), numbers[:, 0]), numbers[:, 1])


def layer_keys(jobs: Sequence[TrainingJob]) -> NDArray[np.int64]:
    """Return ``LocalTraining.layer_key`` of every job, as the signed integer with the same bits."""
    return job_keys(jobs, LAYERS).view(np.int64)


def host_minibatches(jobs: Sequence[TrainingJob], steps: int) -> NDArray[np.int64]:
    """Return the samples of jobs, (C, steps, batch); entries after a job's last step are unused."""
    samples = np.zeros((len(jobs), steps, jobs[0].local_training.batch_size), dtype=np.int64)
    with_replacement = all(job.local_training.sampling == "replacement" for job in jobs)
    if not with_replacement:
        for slot, job in enumerate(jobs):
            samples[slot, : job.update.steps] = job.local_training.samples(job.task, job.update)
        return samples
    # What ``positions`` draws for every job, in a few operations for all of them.
    clients = [job.task.clients[job.update.client] for job in jobs]
    sizes = np.array([[len(own)] for own in clients], np.uint64)
    drawn = below_all(extend_all(job_keys(jobs, BATCH)[:, None], np.arange(samples[0].size)), sizes)
    for slot, own in enumerate(clients):
        samples[slot] = own[drawn[slot]].reshape(samples.shape[1:])
    return samples


class DeviceMinibatches:
    """Draws mini-batches on a device, which holds one table of the samples of every client of every task."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tasks: dict[int, tuple[Task, list[int]]] = {}
        self._table = torch.zeros(0, dtype=torch.int64, device=device)

    def send(self, values: Sequence[Any] | NDArray[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return values on the device; neither the host nor the device waits."""
        return torch.tensor(values, dtype=dtype).pin_memory().to(self._device, non_blocking=True)

    def draw(self, jobs: Sequence[TrainingJob], steps: int) -> Tensor:
        """Return what ``host_minibatches`` returns, on the device."""
        size = jobs[0].local_training.batch_size
        kinds = {(job.local_training.sampling, isinstance(job.task.clients, LazyPartition)) for job in jobs}
        count, shuffles = steps * size, kinds == {("shuffle", False)}
        own = [len(job.task.clients[job.update.client]) for job in jobs] if shuffles else []
        widest, epochs = max(own, default=0), -(-count // min(own, default=1))
        fits = shuffles and len(jobs) * epochs * widest <= MAX_SORTED
        if not (fits or kinds == {("replacement", False)}):
            return torch.from_numpy(host_minibatches(jobs, steps)).pin_memory().to(self._device, non_blocking=True)
        spans = []
        for job in jobs:
            client = job.update.client
            spans.append((self._starts(job.task)[client], len(job.task.clients[client])))
        rows = np.column_stack([job_keys(jobs, BATCH).view(np.int64), np.array(spans)])
        keys, first, sizes = self.send(rows).unsqueeze(-1).unbind(1)
        if shuffles:
            drawn = tensor_rng.shuffled(keys, sizes, widest, epochs, count)
        else:
            elements = torch.arange(count, device=self._device)
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
