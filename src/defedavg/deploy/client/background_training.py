"""A client that trains on between messages: the client machine, with a thread that does its jobs.

Buffers are the machine's: one version to start from, one finished update. ``exchange`` is one message: it may bring a
newer version, may ask for the update, and tells all that the machine has seen since the last time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...algorithms.protocol import ClientAction, ClientMachine, ClientPolicy, Drop, Start, Update, Upload
from ...training import LocalTraining
from ..transport import Vector


@dataclass(frozen=True, eq=False)
class Work:
    """A job: what to train, how, and from which weights."""

    update: Update
    recipe: LocalTraining
    weights: Vector


CarryOut = Callable[[Work, Callable[[int], bool]], tuple[Vector, int, float]]
MakeWork = Callable[[Mapping[str, Any], int, int, Vector], Work]


@dataclass(frozen=True, eq=False)
class _FinishedJob:
    update: Update
    delta: Vector
    seconds: float


class Background:
    """The machine of one client and the thread that trains for it."""

    def __init__(self, client: int, policy: ClientPolicy, carry_out: CarryOut) -> None:
        self._client, self._policy = client, policy
        self._carry_out = carry_out
        self._changed = threading.Condition()
        self._epoch = -1
        self._error: Exception | None = None
        self._forget(0, -1)
        self._begin()

    def _begin(self) -> None:
        self._error = None
        threading.Thread(target=self._run, daemon=True).start()

    def _forget(self, jobs: int, trained: int) -> None:
        """Begin anew: buffers empty, and nothing of what runs now will count."""
        self._machine = ClientMachine(self._client, self._policy)
        self._machine.jobs, self._machine.trained = jobs, trained
        self._model: tuple[int, Vector, Callable[[int], Work]] | None = None
        self._queue: list[Work] = []
        self._stopped: set[int] = set()
        self._done: dict[int, _FinishedJob] = {}
        self._sending: int | None = None
        self._reports: list[tuple[str, int, float]] = []

    def exchange(
        self, fields: Mapping[str, Any], weights: Vector | None, make: MakeWork
    ) -> tuple[dict[str, Any], Vector | None]:
        """One message: what is told, and the update, if there is one and it was asked for."""
        wanted, version = bool(fields["wanted"]), int(fields["version"])
        with self._changed:
            if int(fields["epoch"]) != self._epoch:
                self._epoch = int(fields["epoch"])
                self._forget(int(fields["jobs"]), int(fields["trained"]))
                if self._error is not None:  # its thread ended with it
                    self._begin()
            if weights is not None and self._machine.model(version):
                self._report("model", version)
                self._model = (version, weights, lambda index: make(fields, index, version, weights))
            if wanted and self._sending is None:
                actions = self._machine.request()
                self._report("request")
                self._act(actions)
            self._go()
            epoch = self._epoch
            if wanted:
                self._changed.wait_for(
                    lambda: self._error is not None or self._epoch != epoch or self._ready, float(fields["patience"])
                )
            if self._error is not None:
                raise self._error
            return self._told()

    @property
    def _ready(self) -> bool:
        return self._sending is not None and self._sending in self._done

    def _told(self) -> tuple[dict[str, Any], Vector | None]:
        told: dict[str, Any] = {"seconds": 0.0, "update": False}
        update: Vector | None = None
        if self._ready:
            assert self._sending is not None
            done = self._done.pop(self._sending)
            self._sending = None
            told |= {"update": True, "index": done.update.index, "version": done.update.version}
            told |= {"steps": done.update.steps, "seconds": done.seconds}
            update = done.delta if done.update.steps else None
        if self._sending is None:  # otherwise its upload would be told before it is here
            told["reports"], self._reports = json.dumps(self._reports), []
        else:
            told["reports"] = "[]"
        told["clock"] = time.monotonic()
        return told, update

    def _report(self, kind: str, version: int = -1) -> None:
        self._reports.append((kind, version, time.monotonic()))

    def _go(self) -> None:
        actions = self._machine.go()
        if actions:
            self._report("go")
            self._act(actions)

    def _act(self, actions: tuple[ClientAction, ...]) -> None:
        for action in actions:
            if isinstance(action, Start):
                assert self._model is not None
                version, _, make = self._model
                assert version == action.version
                self._queue.append(make(action.index))
            elif isinstance(action, Upload):
                self._sending = action.index
                if action.index not in self._done:
                    self._stopped.add(action.index)
            elif isinstance(action, Drop):
                self._done.pop(action.index, None)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                work, epoch = self._queue.pop(0), self._epoch
            index = work.update.index

            def goes_on(step: int, epoch: int = epoch, index: int = index) -> bool:
                return self._epoch == epoch and index not in self._stopped

            try:
                delta, steps, seconds = self._carry_out(work, goes_on)
            except Exception as error:  # told to the next who asks: a thread has nobody to tell
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                if self._epoch == epoch:
                    self._finished(work, delta, steps, seconds)

    def _finished(self, work: Work, delta: Vector, steps: int, seconds: float) -> None:
        index, asked = work.update.index, work.update
        self._done[index] = _FinishedJob(Update(asked.client, index, asked.version, steps), delta, seconds)
        if index in self._stopped:
            self._stopped.remove(index)
        else:
            actions = self._machine.ended()
            self._report("ended")
            self._act(actions)
            self._go()
        self._changed.notify_all()
