"""A trainer that shares its batches: idle workers train a part of each batch.

The owner of a run puts a version into the object store once. Ray transfers it to a node at most once, for all workers
and jobs there. If a helper fails, the owner trains that part itself.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...algorithms.protocol import Update
from ...training import LocalTraining, Trainer
from ...training.local_training import TrainingJob

MIN_SECONDS = 0.05  # of work in a batch that is worth sharing


class SharedJob(NamedTuple):
    """A ``TrainingJob`` whose task and vectors are references to the object store."""

    local_training: LocalTraining
    task: Any
    start: Any
    update: Update
    rate: float | None
    centre: Any
    correction: Any


class SharedTrainer(Trainer):
    """Trains jobs with the help of idle workers, if there are any."""

    def __init__(self, busy: AbstractContextManager[Any], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._busy = busy  # one batch at a time
        self.helpers: list[Any] = []  # handles of idle workers
        self.assignments: dict[int, Any] = {}  # id of a task -> an assignment with that task
        self.helped = 0  # jobs that helpers trained
        self._refs: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._seconds_per_job = 0.0

    def train(self, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        """Return Δ of every job, in the order of the jobs."""
        helpers = self.helpers if self._seconds_per_job * len(jobs) > MIN_SECONDS else []
        parts = [jobs[slot :: len(helpers) + 1] for slot in range(len(helpers) + 1)]
        requests = [
            (part, self._request(helper, part)) for helper, part in zip(helpers, parts[1:], strict=True) if part
        ]
        began = time.perf_counter()
        deltas = dict(zip(map(id, parts[0]), self.train_locally(parts[0]), strict=True))
        if parts[0]:
            self._seconds_per_job = (time.perf_counter() - began) / len(parts[0])
        for part, request in requests:
            answer = self._result(request)
            self.helped += 0 if answer is None else len(part)
            deltas.update(zip(map(id, part), self.train_locally(part) if answer is None else answer, strict=True))
        return [deltas[id(job)] for job in jobs]

    def train_locally(self, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        """Train without helpers: two workers that request help from each other would deadlock."""
        with self._busy:
            return super().train(jobs)

    def _request(self, helper: Any, part: Sequence[TrainingJob]) -> Any:
        assignment = self.assignments[id(part[0].task)]
        share = [
            SharedJob(
                job.local_training, self.assignments[id(job.task)].task, self._put(job.start), job.update, job.rate,
                *(None if vector is None else self._put(vector) for vector in (job.centre, job.correction)),
            )
            for job in part
        ]  # fmt: skip
        return helper.train.remote(assignment, share)

    def _result(self, request: Any) -> list[Tensor] | None:
        import ray

        try:
            return [delta.to(self._device) for delta in ray.get(request)]
        except ray.exceptions.RayError:  # the helper is lost or lacks an object; the scheduler notices, too
            self.helpers = []
            return None

    def _put(self, version: Tensor) -> Any:
        import ray

        name = id(version)
        if name not in self._refs:
            alive = weakref.ref(version, lambda _: self._refs.pop(name, None))
            self._refs[name] = alive, ray.put(version.cpu().numpy())
        return self._refs[name][1]


def fetch(ref: Any, device: torch.device) -> Tensor:
    """Return a version, or another vector, from the object store."""
    import ray

    return torch.tensor(ray.get(ref), device=device)
