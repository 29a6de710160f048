"""An executor that also records the gradient norms of the versions that it merges."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..algorithms.protocol import Update
from ..planning.records import Round
from ..tasks import Task
from ..training import LocalTraining, Reference
from .objective import Norms

BATCH_VERSIONS = 128  # versions whose gradients are computed together


class GradientRecorder(Reference):
    """Averages ‖∇F(w^t)‖² over t < ``rounds`` or over every ``every``-th version, and keeps the largest staleness."""

    def __init__(self, task: Task, recipe: LocalTraining, norms: Norms, rounds: int, every: int = 1) -> None:
        super().__init__(task, recipe)
        self._norms = norms
        self._rounds, self._every = rounds, every
        self._pending: list[Tensor] = []
        self._sum, self._count = 0.0, 0
        self.max_staleness = 0
        self._record(0, self.versions[0])

    def merge(self, record: Round, deltas: Mapping[Update, Tensor]) -> Tensor:
        """Merge the updates and record the new version."""
        merged = super().merge(record, deltas)
        self.max_staleness = max(self.max_staleness, *record.merge.staleness)
        self._record(record.merge.version, merged)
        return merged

    def _record(self, version: int, weights: Tensor) -> None:
        # One version represents ``every`` consecutive ones: the middle one.
        if version < self._rounds and version % self._every == self._every // 2:
            self._pending.append(weights)
            if len(self._pending) == BATCH_VERSIONS:
                self._compute_pending()

    def _compute_pending(self) -> None:
        if self._pending:
            self._sum += float(self._norms(torch.stack(self._pending)).double().sum())
            self._count += len(self._pending)
            self._pending.clear()

    @property
    def mean(self) -> float:
        """The mean of the recorded squared norms."""
        self._compute_pending()
        return self._sum / self._count
