"""An executor that also sees the gradient of every version it merges."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..algorithms.protocol import Update
from ..planning.records import Round
from ..tasks import Task
from ..training import LocalTraining, Reference
from .objective import Norms

TOGETHER = 128  # versions whose gradients are computed at once


class GradientRecorder(Reference):
    """Adds up ‖∇F(w^t)‖² over t < ``rounds``, or every ``every``-th of these; also keeps the largest staleness."""

    def __init__(self, task: Task, recipe: LocalTraining, norms: Norms, rounds: int, every: int = 1) -> None:
        super().__init__(task, recipe)
        self._norms = norms
        self._rounds, self._every = rounds, every
        self._waiting: list[Tensor] = []
        self._sum, self._count = 0.0, 0
        self.max_staleness = 0
        self._see(0, self.versions[0])

    def merge(self, record: Round, deltas: Mapping[Update, Tensor]) -> Tensor:
        """Merge, and look at what came of it."""
        merged = super().merge(record, deltas)
        self.max_staleness = max(self.max_staleness, *record.merge.staleness)
        self._see(record.merge.version, merged)
        return merged

    def _see(self, version: int, weights: Tensor) -> None:
        # Of several versions that one stands for, the middle one.
        if version < self._rounds and version % self._every == self._every // 2:
            self._waiting.append(weights)
            if len(self._waiting) == TOGETHER:
                self._look()

    def _look(self) -> None:
        if self._waiting:
            self._sum += float(self._norms(torch.stack(self._waiting)).double().sum())
            self._count += len(self._waiting)
            self._waiting.clear()

    @property
    def mean(self) -> float:
        """The mean of the squared norms seen."""
        self._look()
        return self._sum / self._count
