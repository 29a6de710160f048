"""A trainer that lets others help: part of a batch is trained by workers that have no run of their own.

A version is put into the object store once, by whoever has the run; Ray brings it to a node at most once, however many
workers and jobs there need it. What a helper does not bring back is trained here.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...training import Trainer
from ...training.local_training import TrainingJob

WORTH = 0.05  # seconds of work; for less nobody is asked


class Shared(Trainer):
    """Trains jobs with helpers, if there are any."""

    def __init__(self, busy: AbstractContextManager[Any], *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._busy = busy  # one batch at a time, whoever wants it
        self.helpers: list[Any] = []  # handles of workers
        self.orders: dict[int, Any] = {}  # id of a task -> the order that brought it
        self.helped = 0  # jobs that others trained
        self._refs: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._each = 0.0  # seconds for a job

    def train(self, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        """Δ of every job, in their order."""
        helpers = self.helpers if self._each * len(jobs) > WORTH else []
        parts = [jobs[place :: len(helpers) + 1] for place in range(len(helpers) + 1)]
        asked = [(part, self._ask(helper, part)) for helper, part in zip(helpers, parts[1:], strict=True) if part]
        began = time.perf_counter()
        deltas = dict(zip(map(id, parts[0]), self.alone(parts[0]), strict=True))
        if parts[0]:
            self._each = (time.perf_counter() - began) / len(parts[0])
        for part, answer in asked:
            found = self._answer(answer)
            self.helped += len(part) if found is not None else 0
            deltas.update(zip(map(id, part), self.alone(part) if found is None else found, strict=True))
        return [deltas[id(job)] for job in jobs]

    def alone(self, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        """Without asking anybody: two who ask each other would wait for ever."""
        with self._busy:
            return super().train(jobs)

    def _ask(self, helper: Any, part: Sequence[TrainingJob]) -> Any:
        order = self.orders[id(part[0].task)]
        share = [(job.local_training, self.orders[id(job.task)].task, self._put(job.start), job.update) for job in part]
        return helper.train.remote(order, share)

    def _answer(self, answer: Any) -> list[Tensor] | None:
        import ray

        try:
            return [delta.to(self._device) for delta in ray.get(answer)]
        except ray.exceptions.RayError:  # it is lost, or did not get what it needs: whoever hands out runs will hear
            self.helpers = []
            return None

    def _put(self, version: Tensor) -> Any:
        import ray

        name = id(version)
        if name not in self._refs:
            gone = weakref.ref(version, lambda _: self._refs.pop(name, None))
            self._refs[name] = gone, ray.put(version.cpu().numpy())
        return self._refs[name][1]


def fetch(ref: Any, device: torch.device) -> Tensor:
    """A version from the object store, for reading."""
    import ray

    return torch.tensor(ray.get(ref), device=device)
