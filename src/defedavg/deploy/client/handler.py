"""A client at its desk: answers hello, train and exchange messages; it knows its own data and nothing of Flower.

The training is the executor's, with the same keys, so a job gives the same update here as in a simulation.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...algorithms.protocol import ClientPolicy, Update
from ...errors import UserError
from ...tasks import Task
from ...training import LocalTraining, Reference
from ..model_identity import signature
from ..transport import POLICY_FIELDS, Vector
from .background_training import Background, Work

MakeTask = Callable[[Mapping[str, Any], int | None], Task]
"""(the run's settings, the client's number or None on the server) -> the task, as in simulation.

On a client, a task with the data of one client only is enough.
"""

GoesOn = Callable[[int], bool]


def find_task(place: str | MakeTask) -> MakeTask:
    """The function that makes the task, from ``module:function``."""
    if callable(place):
        return place
    module, colon, name = place.partition(":")
    try:
        found: MakeTask = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"the task {place!r} cannot be loaded: {error}; name it as 'module:function'") from None
    if not colon or not callable(found):
        raise UserError(f"the task {place!r} is no function; name it as 'module:function'")
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back."""

    fields: dict[str, Any]
    update: Vector | None = None


class ClientHandler:
    """One client. ``step_seconds`` makes it slow: a step then lasts so long at least."""

    def __init__(self, make: MakeTask, config: Mapping[str, Any], client: int, step_seconds: float = 0.0) -> None:
        self.client = client
        self._task = make(config, client)
        self._step_seconds = step_seconds
        self._executors: dict[LocalTraining, Reference] = {}
        self._background: Background | None = None

    def answer(self, kind: str, fields: Mapping[str, Any], weights: Vector | None) -> Answer:
        """The answer to a message of that kind."""
        if kind == "hello":
            recipe = LocalTraining(seed=0, batch_size=1)
            return Answer({"client": self.client, "signature": signature(self._executor(recipe).module)})
        if kind == "train":
            return self._train(fields, weights)
        if kind == "exchange":
            return self._exchange(fields, weights)
        raise UserError(f"a message of kind {kind[:20]!r} is not known here; use the same version on both sides")

    def _train(self, fields: Mapping[str, Any], weights: Vector | None) -> Answer:
        assert weights is not None
        work = self._work(fields, int(fields["index"]), int(fields["version"]), weights)
        delta, steps, seconds = self.carry_out(work, lambda step: True)
        named = {"index": work.update.index, "version": work.update.version, "steps": steps, "seconds": seconds}
        return Answer({"client": self.client, **named}, delta)

    def _exchange(self, fields: Mapping[str, Any], weights: Vector | None) -> Answer:
        if self._background is None:
            policy = ClientPolicy(hold_until_requested=True, **{name: bool(fields[name]) for name in POLICY_FIELDS})
            self._background = Background(self.client, policy, self.carry_out)
        found, update = self._background.exchange(fields, weights, self._work)
        return Answer({"client": self.client, **found}, update)

    def _work(self, fields: Mapping[str, Any], index: int, version: int, weights: Vector) -> Work:
        recipe = LocalTraining(
            seed=int(fields["seed"]),
            batch_size=int(fields["batch_size"]),
            local_lr=float(fields["local_lr"]),
            sampling=str(fields["sampling"]),
        )
        return Work(Update(self.client, index, version, int(fields["steps"])), recipe, weights)

    def _executor(self, recipe: LocalTraining) -> Reference:
        if recipe not in self._executors:
            self._executors[recipe] = Reference(self._task, recipe)
        return self._executors[recipe]

    def carry_out(self, work: Work, goes_on: GoesOn) -> tuple[Vector, int, float]:
        """Train a job: its update, the steps it did, and the seconds it took."""
        own = self._task.clients[self.client if self._task.num_clients > 1 else 0]
        start = torch.from_numpy(np.array(work.weights))
        began = time.monotonic()

        def paced(step: int) -> bool:
            # In small pieces, so that an interruption is seen at once.
            while (left := began + step * self._step_seconds - time.monotonic()) > 0:
                if not goes_on(step):
                    return False
                time.sleep(min(left, 0.02))
            return goes_on(step)

        executor = self._executor(work.recipe)
        delta, steps = executor.train(work.update, start, own, paced)
        if steps == work.update.steps:
            paced(steps)
        return delta.numpy(), steps, time.monotonic() - began
