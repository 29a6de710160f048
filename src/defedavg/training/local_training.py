"""Local training: the hyperparameters of a run's jobs, the samples that a job draws, and one job with its start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..algorithms.protocol import Update
from ..rng import key
from ..tasks import Task
from .minibatches import positions


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """Hyperparameters of the local training and of the merge that follows it."""

    seed: int
    batch_size: int = 10
    global_lr: float = 1.0
    local_lr: float = 0.05
    sampling: str = "replacement"

    def layer_key(self, update: Update) -> int:
        """Return the key from which random layers, such as dropout, draw during a job."""
        return key(self.seed, "layers", update.client, update.index)

    def samples(self, task: Task, update: Update, client_samples: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return the training samples of a job, (steps, batch_size).

        ``client_samples`` replaces the client's samples of the task.
        """
        available = task.clients[update.client] if client_samples is None else client_samples
        drawn = positions(
            self.seed,
            update.client,
            update.index,
            steps=update.steps,
            batch_size=self.batch_size,
            size=len(available),
            sampling=self.sampling,
        )
        return available[drawn]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingJob:
    """One client's job: its hyperparameters and data, the weights that it starts from, and its update's identity."""

    local_training: LocalTraining
    task: Task
    start: Tensor
    update: Update
