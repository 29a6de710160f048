"""Background clients for tests: on the real clock, with steps that a test releases."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from defedavg.algorithms.protocol import ClientPolicy, Update
from defedavg.deploy.client.background_training import BackgroundTrainer, LocalJob
from defedavg.deploy.transport import Vector
from defedavg.training import LocalTraining
from helpers.deployments import Clock, World

WAIT = 60.0


class RealClock(Clock):
    """A clock that shows the real time."""

    def __init__(self) -> None:
        super().__init__()
        self._start = time.monotonic()

    @property
    def now(self) -> float:
        return time.monotonic() - self._start

    @now.setter
    def now(self, value: float) -> None:
        pass

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.005))


class ManualTrainer:
    """A background client whose steps complete when the test releases them."""

    def __init__(self, policy: ClientPolicy) -> None:
        self.policy = policy
        self.step = threading.Semaphore(0)
        self.started: list[int] = []
        self.background = BackgroundTrainer(3, policy, self._train_job)
        self.epoch = 1

    def _train_job(self, job: LocalJob, should_continue: Any) -> tuple[Vector, int, float]:
        self.started.append(job.update.version)
        done = 0
        while done < job.update.steps and should_continue(done):
            if self.step.acquire(timeout=0.01):
                done += 1
        return np.full(2, float(done)), done, 0.1

    def exchange(
        self, version: int | None, wanted: bool, patience: float = 0.05
    ) -> tuple[dict[str, Any], Vector | None]:
        """Send one message."""
        fields: dict[str, Any] = {"wanted": wanted, "version": -1 if version is None else version, "epoch": self.epoch}
        fields |= {"jobs": 0, "trained": -1, "patience": patience}
        weights = None if version is None else np.zeros(2)
        return self.background.exchange(fields, weights, self._make_job)

    def _make_job(self, fields: Any, index: int, version: int, weights: Vector) -> LocalJob:
        return LocalJob(Update(3, index, version, 2), LocalTraining(seed=0), weights)

    def until_started(self, count: int) -> None:
        deadline = time.monotonic() + WAIT
        while len(self.started) < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def kinds(reply: dict[str, Any]) -> list[str]:
    return [kind for kind, _, _ in json.loads(reply["reports"])]


def real(folder_: Path, changes: dict[str, Any], **more: Any) -> World:
    world = World(folder_, deploy__patience_seconds=0.05, deploy__poll_seconds=0.001, **changes, **more)
    for node in world.transport.members.values():
        node.delay = 0.002 * (1 + node.handler.client)
    return world
