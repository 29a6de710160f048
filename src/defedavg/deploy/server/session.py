"""A run on the server's side, whatever carries its messages: engine, executor, log, saved state and measurements.

Order of writing: an update is saved, then its event goes to the log, then it is acted on, and after a merge the new
version and ``state.json`` are saved before anything that is no longer needed goes. So a crash at any moment leaves a
log and files from which ``Session.resume`` goes on: nothing is merged twice, and nothing the log knows of is lost.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...algorithms.client_pool import ClientPool
from ...algorithms.protocol import Merge, Update
from ...config.build import make_executor, make_stopping_rule
from ...errors import UserError
from ...fileio import write_whole, writing
from ...jsonio import finite
from ...planning.records import Round, Sent, Stall
from ...tasks import Task
from ...training import EvalResult, EvalSchedule, Evaluation, PendingEval, RunProgress, Status, evaluate_version
from ..deploy_config import DeployConfig
from ..engine import event_log as logs
from ..engine.event_log import LOG, Log, LogFile, Note
from ..engine.events import Combine, DiscardUpdate, Event, Exchange, Resumed, Train
from ..engine.setup import make_engine, notes_of, orders_of
from ..transport import Vector
from .state_store import StateStore


class Session:
    """One run; ``handle`` every event, send what it gives, then ``measure``."""

    def __init__(
        self,
        orders: DeployConfig,
        flat: dict[str, Any],
        task: Task,
        folder: Path,
        log: Log | None = None,
        run: str = "",
    ) -> None:
        self.orders = orders
        self.task = task
        self.folder = folder
        self.engine = make_engine(orders)
        self.executor = make_executor(orders.settings, orders.seed, task)
        self.progress = RunProgress()
        self.goal = make_stopping_rule(orders.settings)
        self.store = StateStore(folder / "state")
        self.in_flight: Callable[[], list[dict[str, Any]]] = list
        self._meter = EvalSchedule(task, self.goal, self.progress)
        self._dues: list[PendingEval] = [self._meter.start(self.executor.versions[0])]
        self._vectors: dict[int, Vector] = {}
        if log is None:
            self.seconds = 0.0
            self.store.save_version(0, self.executor.versions[0])
            self.log = LogFile(folder / LOG, {"settings": flat, "model_bytes": self.model_bytes, "run": run})
        else:
            self.seconds = log.seconds
            self._restore(log)
            with writing(folder / LOG):
                os.truncate(folder / LOG, log.size)
            self.log = LogFile(folder / LOG)
            self.log.lines = len(log.lines)

    @classmethod
    def resume(cls, orders: DeployConfig, flat: dict[str, Any], task: Task, folder: Path) -> Session:
        """Go on with the run in a folder."""
        log = logs.read(folder / LOG)
        before = orders_of(log)
        if (before.settings, before.seed) != (orders.settings, orders.seed):
            raise UserError(f"the run in {folder} has other settings; resume it with the same, or begin another")
        if log.notes("done"):
            raise UserError(f"the run in {folder} is finished; begin another")
        return cls(orders, flat, task, folder, log)

    @property
    def model_bytes(self) -> int:
        """The size of a version."""
        first = next(iter(self.executor.versions.values()))
        return first.numel() * first.element_size()

    def vector(self, version: int) -> Vector:
        """A version as it is sent: the same object every time, so that it can be sent once for all."""
        if version not in self._vectors:
            self._vectors[version] = self.executor.versions[version].numpy()
        return self._vectors[version]

    def save_update(self, client: int, index: int, values: Vector) -> None:
        """Bring an update to the disk, before its event is handled."""
        self.store.save_update(client, index, torch.from_numpy(values.copy()))

    # Events.

    @property
    def over(self) -> bool:
        """Whether nothing that happens now belongs to the run any more."""
        return self.engine.over or self.progress.status is not Status.RUNNING

    def handle(self, event: Event) -> list[Train | Exchange]:
        """Log an event, carry out what follows from it, and give the messages that are to be sent."""
        orders = self.engine.handle(event)
        self.log.add(event, *notes_of(event.t, orders))
        self.seconds = event.t
        messages: list[Train | Exchange] = []
        for order in orders:
            if isinstance(order, Combine):
                self._combine(event.t, order)
            elif isinstance(order, Train | Exchange):
                messages.append(order)
        if any(isinstance(order, Combine | DiscardUpdate) for order in orders):
            self.store.keep(self.engine.versions, self.engine.received)
        return messages

    def note(self, name: str, **fields: Any) -> None:
        """Write down something that no machine needs to know."""
        self.log.add(Note(name, self.seconds, fields))

    def _combine(self, t: float, order: Combine) -> None:
        record = Round(t, order.merge, order.freed)
        deltas = {u: self.store.update(u) for u, _ in order.merge.updates if u.steps}
        self._keep(self.executor.merge(record, deltas), order.merge)
        self._dues.append(self._meter.round(record, self.executor.versions[order.merge.version]))
        for version in order.freed:
            self._vectors.pop(version, None)

    def _keep(self, weights: Tensor, merge: Merge) -> None:
        self.store.save_version(merge.version, weights)
        self.store.save_state(
            {
                "version": merge.version,
                "lines": self.log.lines,
                "seconds": self.seconds,
                "machine": plain(vars(self.engine.server)),
                "in_flight": self.in_flight(),
                "buffer": [asdict(update) for update in self.engine.received.values()],
                "versions": sorted(self.engine.versions),
            }
        )

    # Measuring.

    def measure(self) -> list[Evaluation]:
        """Look at the versions that were made since the last time; ``progress`` then knows whether the run is over."""
        found = []
        dues, self._dues = self._dues, []
        for due in dues:
            if self.progress.status is not Status.RUNNING:
                break
            evaluation = self._meter.record(due, evaluate_version(self.executor, self._meter, due))
            if evaluation is not None:
                self._record(evaluation)
                found.append(evaluation)
        return found

    def end(self, status: Status) -> None:
        """The run is over for a reason of its own."""
        self.measure()
        if self.progress.status is Status.RUNNING:
            newest = self.executor.versions[max(self.executor.versions)]
            record = Stall(self.seconds) if status is Status.STALLED else Sent(0, None, self.seconds)
            self._dues.append(self._meter.ended(record, newest))
            self.measure()
            if self.progress.diverged_at is None:
                self.progress.status = status
        self.progress.seconds = self.seconds

    def _record(self, evaluation: Evaluation) -> None:
        self.note("measured", **asdict(evaluation))
        self._write_metrics([evaluation], fresh=False)

    def _write_metrics(self, evaluations: list[Evaluation], *, fresh: bool) -> None:
        shared = {"algorithm": self.orders.settings.algorithm, "seed": self.orders.seed}
        rows = [json.dumps(finite({**shared, **asdict(e)}), allow_nan=False) + "\n" for e in evaluations]
        path = self.folder / "metrics.jsonl"
        if fresh:
            write_whole(path, "".join(rows).encode())
            return
        with writing(path), path.open("a", encoding="utf-8") as out:
            out.writelines(rows)

    # After a crash.

    def _restore(self, log: Log) -> None:
        """Feed the machines what they have seen, and take weights from the disk; at most the last merge is computed."""
        state = self.store.state()
        rounds: list[Round] = []
        for number, line in enumerate(log.lines, start=1):
            if not isinstance(line, Note):
                merges = [order for order in self.engine.handle(line) if isinstance(order, Combine)]
                rounds.extend(Round(line.t, order.merge, order.freed) for order in merges)
            if state is not None and number == state.get("lines"):
                self._agree(state)
        if state is not None and state.get("lines", 0) > len(log.lines):
            raise UserError(f"the log in {self.folder} is shorter than its state says; a part of it is missing")
        last = rounds[-1] if rounds else None
        if last is not None and not self.store.has_version(last.merge.version):
            self._finish(last)
        self.executor.versions = {version: self.store.version(version) for version in self.engine.versions}
        measured = {note.fields.get("round"): note.fields for note in log.notes("measured")}
        self._settle(measured)
        for record in rounds:
            weights = self.executor.versions.get(record.merge.version)
            due = self._meter.round(record, torch.zeros(1) if weights is None else weights)
            if weights is None and due.round not in measured:
                due = replace(due, evaluate=False)  # it was freed before it could be looked at
            self._dues.append(due)
            self._settle(measured)
        self._write_metrics(self.progress.evaluations, fresh=True)

    def _agree(self, state: dict[str, Any]) -> None:
        if state.get("machine") != plain(vars(self.engine.server)):
            raise UserError(
                f"the log in {self.folder} does not lead to the state that was saved; one of them was changed"
            )

    def _finish(self, record: Round) -> None:
        """Compute the merge in whose middle the server was lost."""
        for version in {*(v for v, _ in record.merge.past), *(u.version for u, _ in record.merge.updates)}:
            self.executor.versions[version] = self.store.version(version)
        deltas = {u: self.store.update(u) for u, _ in record.merge.updates if u.steps}
        self.store.save_version(record.merge.version, self.executor.merge(replace(record, freed=()), deltas))

    def _settle(self, measured: dict[Any, dict[str, Any]]) -> None:
        """Take in what was measured before the crash; what was not is measured later."""
        while self._dues and (not self._dues[0].evaluate or self._dues[0].round in measured):
            due = self._dues.pop(0)
            if self.progress.status is not Status.RUNNING:
                continue
            if not due.evaluate:
                self._meter.record(due, EvalResult(finite=True))
                continue
            old = measured[due.round]
            found = self._meter.record(due, EvalResult(True, old["loss"], old["accuracy"], old["train_loss"]))
            assert found is not None
            self.progress.evaluations[-1] = replace(found, wall_seconds=old["wall_seconds"])

    def resumed(self) -> None:
        """Say that all clients are to join again."""
        self.handle(Resumed(self.seconds))


def plain(value: Any) -> Any:
    """A machine's state as JSON has it, in an order that does not depend on how it came about."""
    if isinstance(value, Update):
        return [value.client, value.index, value.version, value.steps]
    if isinstance(value, ClientPool):
        return [value[position] for position in range(len(value))]
    if isinstance(value, Counter | dict):
        return [[plain(name), plain(item)] for name, item in sorted(value.items(), key=lambda pair: str(pair[0]))]
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return plain({name: getattr(value, name) for name in value.__dataclass_fields__})
