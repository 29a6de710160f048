"""The handler of one client's messages: hello, train and exchange. It loads the client's data and knows no Flower.

It trains with the executor of the simulation and the same random keys, so a job yields the same update in both.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ...algorithms.protocol import ClientPolicy, Update
from ...config.task_module import MakeTask, task_from_module
from ...errors import UserError
from ...training import LocalTraining, Reference
from ..transport import POLICY_FIELDS, TRAINING_FIELDS, Vector, model_signature
from .background_training import BackgroundTrainer, LocalJob, ShouldContinue

Answer = tuple[dict[str, Any], Vector | None]
"""The fields of a reply and perhaps an update."""


class ClientHandler:
    """Answers the messages to one client; ``step_seconds`` is the minimum duration of a local step."""

    def __init__(self, task: str | MakeTask, config: Mapping[str, Any], client: int, step_seconds: float = 0.0) -> None:
        self.client = client
        self._task = task_from_module(task, config, client)
        self._step_seconds = step_seconds
        self._executor = functools.cache(functools.partial(Reference, self._task))
        self._background: BackgroundTrainer | None = None

    def answer(
        self,
        kind: str,
        fields: Mapping[str, Any],
        weights: Vector | None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Answer:
        """Return the answer to a message of that kind; a job ends early when its answer is no longer ``wanted``."""
        if kind == "hello":
            # Two samples, because batch normalisation cannot be trained on one.
            executor = self._executor(LocalTraining(seed=0, batch_size=2))
            signature = model_signature(executor.module, executor.layout.statistics)
            return {"client": self.client, "signature": signature}, None
        if kind == "train":
            return self._train(fields, weights, wanted)
        if kind == "exchange":
            return self._exchange(fields, weights)
        raise UserError(f"unknown kind of message {kind[:20]!r}; use the same version of defedavg on both sides")

    def close(self) -> None:
        """End the background training."""
        if self._background is not None:
            self._background.close()

    def _train(self, fields: Mapping[str, Any], weights: Vector | None, wanted: Callable[[], bool]) -> Answer:
        assert weights is not None
        job = self._job(fields, int(fields["index"]), int(fields["version"]), weights)
        delta, steps, seconds = self._train_job(job, lambda _: wanted())
        reply = {"index": job.update.index, "version": job.update.version, "steps": steps, "seconds": seconds}
        return {"client": self.client, **reply}, delta

    def _exchange(self, fields: Mapping[str, Any], weights: Vector | None) -> Answer:
        if self._background is None:
            policy = ClientPolicy(hold_until_requested=True, **{name: bool(fields.get(name)) for name in POLICY_FIELDS})
            self._background = BackgroundTrainer(self.client, policy, self._train_job)
        reply, update = self._background.exchange(fields, weights, self._job)
        return {"client": self.client, **reply}, update

    def _job(self, fields: Mapping[str, Any], index: int, version: int, weights: Vector) -> LocalJob:
        training = LocalTraining(**{name: fields[name] for name in TRAINING_FIELDS})
        update = Update(self.client, index, version, int(fields["steps"]))
        return LocalJob(update, training, weights, float(fields["rate"]))

    def _train_job(self, job: LocalJob, should_continue: ShouldContinue) -> tuple[Vector, int, float]:
        samples = self._task.clients[self.client if self._task.num_clients > 1 else 0]
        start = torch.from_numpy(np.array(job.weights))
        began = time.monotonic()

        def paced(step: int) -> bool:
            # Sleep in short intervals, so that an interruption takes effect at once.
            while (remaining := began + step * self._step_seconds - time.monotonic()) > 0:
                if not should_continue(step):
                    return False
                time.sleep(min(remaining, 0.02))
            return should_continue(step)

        delta, steps = self._executor(job.training).train(job.update, start, samples, paced, rate=job.rate)
        if steps == job.update.steps:
            paced(steps)
        return delta.numpy(), steps, time.monotonic() - began
