"""Training between messages: the machine of one client, and a thread that trains its jobs.

The machine has two buffers: one version to start from, and one finished update. ``exchange`` handles one message, which
may bring a newer version or request the update, and returns all events of the machine since the last message.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...algorithms.protocol import ClientAction, ClientMachine, ClientPolicy, Drop, Start, Update, Upload
from ...training import LocalTraining
from ..transport import Vector

CLOSE_SECONDS = 10.0


@dataclass(frozen=True, eq=False)
class LocalJob:
    """A job: which update to compute, with which local training, from which weights, at which local rate."""

    update: Update
    training: LocalTraining
    weights: Vector
    rate: float | None = None  # None: local_lr


ShouldContinue = Callable[[int], bool]
"""Step -> whether the job continues with it."""

TrainJob = Callable[[LocalJob, ShouldContinue], tuple[Vector, int, float]]
"""Train a job; return its update, the steps done and the seconds used."""

MakeJob = Callable[[Mapping[str, Any], int, int, Vector], LocalJob]
"""(fields of the message, index, version, weights) -> the job."""


class BackgroundTrainer:
    """The machine of one client and the thread that trains for it."""

    def __init__(self, client: int, policy: ClientPolicy, train_job: TrainJob) -> None:
        self._client, self._policy = client, policy
        self._train_job = train_job
        self._changed = threading.Condition()
        self._epoch, self._closed = -1, False
        self._reset(0, -1)
        self._start_thread()

    def _start_thread(self) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: one that trains while the process ends could abort it."""
        with self._changed:
            self._closed, self._epoch = True, -2
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _reset(self, jobs: int, trained: int) -> None:
        """Empty all buffers; the result of a running job will be ignored."""
        self._machine = ClientMachine(self._client, self._policy)
        self._machine.jobs, self._machine.trained = jobs, trained
        self._model: tuple[int, Callable[[int], LocalJob]] | None = None
        self._queue: list[LocalJob] = []
        self._stopped: set[int] = set()  # jobs that a request has stopped; their updates are sent
        self._dropped: set[int] = set()  # running jobs whose results will be ignored
        self._done: dict[int, tuple[Update, Vector, float]] = {}  # what was trained, and the seconds it took
        self._sending: int | None = None
        self._reports: list[tuple[str, int, float]] = []

    def exchange(
        self, fields: Mapping[str, Any], weights: Vector | None, make_job: MakeJob
    ) -> tuple[dict[str, Any], Vector | None]:
        """Handle one message; return the fields of the reply, and the update if it was requested and is ready."""
        wanted, version = bool(fields["wanted"]), int(fields["version"])
        with self._changed:
            if int(fields["epoch"]) != self._epoch:  # the server has started a new epoch: discard everything
                self._epoch = int(fields["epoch"])
                self._reset(int(fields["jobs"]), int(fields["trained"]))
                if self._error is not None:  # the error has ended the thread
                    self._start_thread()
            if weights is not None and self._machine.model(version):
                self._report("model", version)
                self._model = (version, lambda index: make_job(fields, index, version, weights))
            if wanted and self._sending is None:
                self._apply("request", self._machine.request())
            self._go()
            epoch = self._epoch
            if wanted:
                self._changed.wait_for(
                    lambda: self._error is not None or self._epoch != epoch or self._sending in self._done,
                    float(fields["patience"]),
                )
            if self._error is not None:
                raise self._error
            return self._reply()

    def _reply(self) -> tuple[dict[str, Any], Vector | None]:
        fields: dict[str, Any] = {"seconds": 0.0, "update": False, "reports": "[]"}
        delta: Vector | None = None
        if self._sending is not None and self._sending in self._done:
            update, delta, seconds = self._done.pop(self._sending)
            self._sending = None
            fields |= {"update": True, "index": update.index, "version": update.version}
            fields |= {"steps": update.steps, "seconds": seconds}
            delta = delta if update.steps else None
        if self._sending is None:  # otherwise the reports would contain an upload whose update is not ready
            fields["reports"], self._reports = json.dumps(self._reports), []
        fields["clock"] = time.monotonic()
        return fields, delta

    def _report(self, kind: str, version: int = -1) -> None:
        self._reports.append((kind, version, time.monotonic()))

    def _go(self) -> None:
        actions = self._machine.go()
        if actions:
            self._apply("go", actions)

    def _apply(self, kind: str, actions: tuple[ClientAction, ...]) -> None:
        """Report an event that the machine has handled, and carry out its actions."""
        self._report(kind)
        for action in actions:
            if isinstance(action, Start):
                assert self._model is not None
                version, make_job = self._model
                assert version == action.version
                self._queue.append(make_job(action.index))
            elif isinstance(action, Upload):
                self._sending = action.index
                if action.index not in self._done:
                    self._stopped.add(action.index)
            elif isinstance(action, Drop):
                self._drop(action.index)
        self._changed.notify_all()

    def _drop(self, index: int) -> None:
        """Delete what was trained for a job, or keep it from being trained."""
        if self._done.pop(index, None) is not None:
            return
        queued = [job for job in self._queue if job.update.index == index]
        for job in queued:
            self._queue.remove(job)
        if not queued:
            self._dropped.add(index)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if self._closed:
                    return
                job, epoch = self._queue.pop(0), self._epoch
            index = job.update.index

            def should_continue(step: int, epoch: int = epoch, index: int = index) -> bool:  # noqa: ARG001 (signature)
                return self._epoch == epoch and index not in self._stopped and index not in self._dropped

            try:
                delta, steps, seconds = self._train_job(job, should_continue)
            except Exception as error:  # the next exchange raises it: a thread cannot report it
                with self._changed:
                    if self._is_ignored(index, epoch):
                        continue
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                if not self._is_ignored(index, epoch):
                    self._finish(job.update, delta, steps, seconds)

    def _is_ignored(self, index: int, epoch: int) -> bool:
        """Return whether the result of a job that has stopped is of no use: of an earlier epoch, or dropped."""
        if self._epoch != epoch:
            return True
        dropped = index in self._dropped
        self._dropped.discard(index)
        return dropped

    def _finish(self, asked: Update, delta: Vector, steps: int, seconds: float) -> None:
        index = asked.index
        self._done[index] = (replace(asked, steps=steps), delta, seconds)
        if index in self._stopped:
            self._stopped.remove(index)
        else:
            self._apply("ended", self._machine.ended())
            self._go()
        self._changed.notify_all()
