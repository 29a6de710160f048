"""A run on the server, independent of the transport: engine, executor, log, saved state and evaluations.

Order of writing. ``handle`` lets the engine decide and computes merges, in memory. ``commit`` writes everything that
was handled since the last call: first the updates, in one file with one flush, then their events, with one flush of
the log. Only then may the server act on it, that is, send the messages that ``handle`` returned. ``save`` writes state
vectors, versions and ``state.json``, in this order, and then deletes files that are no longer needed. It may be later:
until then, the updates since the last ``save`` stay on disk.

A crash at any moment therefore leaves a log and files from which ``Session.resume`` continues: no update is merged
twice, and no logged update is lost. Merges since the last ``save`` are computed again, from the state then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...algorithms.protocol import FROM_VERSION, Discard, StateVector, Update
from ...config.build import make_executor, make_stopping_rule, shares_of
from ...errors import UserError
from ...fileio import writing
from ...planning.records import Round, Sent
from ...runstore.layout import RunFiles
from ...runstore.metrics import metric_field
from ...runstore.writer import append_lines, write_lines
from ...tasks import Task
from ...training import (
    EvalCounters,
    EvalResult,
    EvalSchedule,
    Evaluation,
    PendingEval,
    RunProgress,
    Status,
    evaluate_version,
)
from ..deploy_config import DeployConfig, make_engine, read_deploy_config
from ..engine import event_log as logs
from ..engine.event_log import EventLog, EventLogWriter, LogNote, notes_for
from ..engine.events import Event, Exchange, Resumed, Train
from ..transport import Vector
from .state_store import StateStore, UpdateKey

LogLine = Callable[[str], None]
MAX_RECEIVED_BYTES = 256 << 20  # of updates that are kept in memory until they are merged
SAVE_SECONDS = 0.5  # between two saves of the state; a resumed run computes the merges since the last one again
SAVE_MODELS, SAVE_BYTES_LEAST, SAVE_BYTES_MOST = 16, 4 << 20, 64 << 20
"""Updates between two saves stay on disk until the second: this many, but their bytes are bounded."""


def save_bytes(model: int) -> int:
    """Return how many bytes of updates may wait on disk for a save, from the bytes of a model."""
    return min(max(SAVE_MODELS * model, SAVE_BYTES_LEAST), SAVE_BYTES_MOST)


def _spent(log: EventLog | None) -> float:
    """Return the real seconds up to the last evaluation in a log; what its server did later is lost or not known."""
    measured = () if log is None else log.notes("measured")
    return max((logs.read_number(note.fields["wall_seconds"]) for note in measured), default=0.0)


class Session:
    """One run: call ``handle`` for events, ``commit``, send the messages, then ``evaluate`` and ``save_if_due``."""

    def __init__(
        self,
        config: DeployConfig,
        flat: dict[str, Any],
        task: Task,
        folder: Path,
        log: EventLog | None = None,
        run: str = "",
        log_line: LogLine = print,
        save_seconds: float = SAVE_SECONDS,
    ) -> None:
        self.config = config
        self.files = RunFiles(folder)
        shares = shares_of(task) if config.settings.training.weighting == "samples" else None
        self.executor = make_executor(config.settings, config.seed, task)
        self.engine = make_engine(config, shares)
        self.progress = RunProgress()
        self.stopping_rule = make_stopping_rule(config.settings)
        self.store = StateStore(self.files.server_state, self.executor.versions[0])
        self.in_flight: Callable[[], list[dict[str, Any]]] = list
        self._log_line = log_line
        self._schedule = EvalSchedule(task, self.stopping_rule, self.progress, EvalCounters(wall_seconds=_spent(log)))
        self._pending_evals: list[PendingEval] = [self._schedule.start(self.executor.versions[0])]
        self._vectors: dict[int, Vector] = {}
        self._received: dict[UpdateKey, Tensor] = {}  # updates that are in memory, besides on disk
        self._unwritten: dict[UpdateKey, Tensor] = {}  # updates that the next commit writes
        self._assigned_by: dict[StateVector, int] = {}  # state vector -> the version whose merge assigned it last
        self._unsaved_vectors: set[StateVector] = set()
        self._saved_versions = {0}
        self._changed = False  # whether there is anything to save
        self._save_seconds, self._saved_at, self._bytes_since = save_seconds, time.monotonic(), 0
        self._save_bytes = save_bytes(self.executor.versions[0].nbytes)
        if log is None:
            self.seconds = 0.0
            first = self.executor.versions[0]
            self.store.save_version(0, first)
            self.store.sync()
            head = {"settings": flat, "model_bytes": first.numel() * first.element_size(), "run": run}
            head |= {} if shares is None else {"shares": list(shares)}
            self.log = EventLogWriter(self.files.event_log, head)
        else:
            self.seconds = log.seconds
            self._restore(log)
            with writing(self.files.event_log):
                os.truncate(self.files.event_log, log.size)
            self.log = EventLogWriter(self.files.event_log, lines=len(log.lines))
            try:
                self.save()
            except BaseException:
                self.log.abandon()
                raise

    @classmethod
    def resume(
        cls,
        config: DeployConfig,
        flat: dict[str, Any],
        task: Task,
        folder: Path,
        log_line: LogLine = print,
        save_seconds: float = SAVE_SECONDS,
    ) -> Session:
        """Continue the run in a folder."""
        log = logs.read(RunFiles(folder).event_log)
        before = read_deploy_config(log.settings, stored=True)
        if (before.settings, before.seed) != (config.settings, config.seed):
            raise UserError(f"the run in {folder} has other settings; resume it with the same, or start another run")
        if any(note.fields.get("status") != str(Status.STALLED) for note in log.notes("done")):
            raise UserError(f"the run in {folder} is finished; start another run")
        return cls(config, flat, task, folder, log, log_line=log_line, save_seconds=save_seconds)

    def vector(self, version: int) -> Vector:
        """Return the weights of a version, always the same object, so that the transport uploads it once."""
        if version not in self._vectors:
            self._vectors[version] = self.executor.versions[version].numpy()
        return self._vectors[version]

    def start(self, client: int, version: int) -> Vector:
        """Return the weights from which a client's job starts; jobs that start from the version share one object."""
        if self.executor.state.layout.job_start == FROM_VERSION:
            return self.vector(version)
        return self.executor.start_of(Update(client, 0, version, 0)).numpy()

    def local_rate(self, version: int) -> float:
        """Return the local rate of jobs that start from a version."""
        return self.executor.local_training.local_rate(version, self.executor.version_seconds[version])

    def add_update(self, client: int, index: int, values: Vector) -> None:
        """Add an update, which belongs to the session now, before its event is handled; ``commit`` writes it."""
        update = torch.from_numpy(values if values.flags.writeable else values.copy())  # PyTorch needs the former
        self._unwritten[client, index] = self._received[client, index] = update

    @property
    def wall_seconds(self) -> float:
        """Real seconds that the run has taken, over all its servers."""
        return self._schedule.wall_seconds

    @property
    def finished(self) -> bool:
        """Whether the run is over and ignores further events."""
        return self.engine.finished or self.progress.status is not Status.RUNNING

    def handle(self, event: Event) -> list[Train | Exchange]:
        """Let the engine handle an event, merge in memory, and return the messages to send after ``commit``."""
        commands = self.engine.handle(event)
        self.log.add(event, *notes_for(event.t, commands))
        self.seconds = event.t
        for command in commands:
            if isinstance(command, Round):
                self._merge(command)
        if any(isinstance(command, Round | Discard) for command in commands):
            self._received = {key: value for key, value in self._received.items() if key in self.engine.received}
            self._changed = True
        return [command for command in commands if isinstance(command, Train | Exchange)]

    def commit(self) -> None:
        """Write and flush everything that was handled: one flush for all updates, then one for all events."""
        if self._unwritten:
            self.store.save_updates(self.log.lines + 1, self._unwritten)
            self._bytes_since += sum(update.nbytes for update in self._unwritten.values())
            self._unwritten = {}
        self.log.write()
        kept = sum(update.nbytes for update in self._received.values())
        while kept > MAX_RECEIVED_BYTES and len(self._received) > 1:  # a merge reads the others from disk
            kept -= self._received.pop(next(iter(self._received))).nbytes

    def resumed(self) -> None:
        """Log that the server restarted and that all clients have to join again."""
        self.handle(Resumed(self.seconds))
        self.commit()

    def note(self, name: str, **fields: Any) -> None:
        """Log a note that no machine depends on; it follows the events that were handled before."""
        self.log.add(LogNote(name, self.seconds, fields))

    def _merge(self, record: Round) -> None:
        self.executor.merge(record, self._deltas(record))
        self._assign(record)
        self._pending_evals.append(self._schedule.round(record, self.executor.versions[record.merge.version]))
        for freed in record.freed:
            self._vectors.pop(freed, None)

    def _assign(self, record: Round) -> None:
        assigned = self._assigned(record)
        self._assigned_by |= assigned
        self._unsaved_vectors.update(assigned)

    def _deltas(self, record: Round) -> dict[Update, Tensor]:
        updates = (update for update, _ in record.merge.updates if update.steps)
        return {update: self._update(update) for update in updates}

    def _update(self, update: Update) -> Tensor:
        kept = self._received.get((update.client, update.index))
        return self.store.update(update) if kept is None else kept

    def _assigned(self, record: Round) -> dict[StateVector, int]:
        """Return the state vectors that a merge assigns, with those of the server's optimiser, and its version."""
        targets = (assignment.target for assignment in record.merge.assignments)
        return dict.fromkeys((*targets, *self.executor.local_training.server.vectors), record.merge.version)

    def save_if_due(self) -> None:
        """Save the state if something has changed, and the last time is long ago or many bytes wait for it."""
        long_ago = time.monotonic() - self._saved_at >= self._save_seconds
        if self._changed and (long_ago or self._bytes_since >= self._save_bytes):
            self.save()

    def save(self) -> None:
        """Save what a resumed run needs beside the log, then delete the files that this replaces. Commit before."""
        for vector in self._unsaved_vectors:
            self.store.save_vector(vector, self._assigned_by[vector], self.executor.state[vector])
        for version in sorted(self.engine.versions - self._saved_versions):
            self.store.save_version(version, self.executor.versions[version])
        self.store.save_state(
            {
                "version": max(self.engine.versions),
                "lines": self.log.flushed_lines,  # it has all events, and some notes may follow
                "seconds": self.seconds,
                "server_state": self.engine.server.state(),
                "in_flight": self.in_flight(),
                "buffer": [asdict(update) for update in self.engine.received.values()],
                "versions": sorted(self.engine.versions),
            }
        )
        self._unsaved_vectors, self._saved_versions = set(), set(self.engine.versions)
        self.store.keep(self.engine.versions, self.engine.received, self._assigned_by)
        self._changed, self._saved_at, self._bytes_since = False, time.monotonic(), 0

    @property
    def commit_due(self) -> bool:
        """Whether ``commit`` should not wait for more events: an evaluation is due, or updates take much memory."""
        waiting = sum(update.nbytes for update in self._unwritten.values())
        return any(pending.evaluate for pending in self._pending_evals) or waiting >= SAVE_BYTES_MOST

    def evaluate(self) -> None:
        """Evaluate the versions made since the last call; ``progress`` then says whether the run is over."""
        pending_evals, self._pending_evals = self._pending_evals, []
        for pending in pending_evals:
            if self.progress.status is not Status.RUNNING:
                break
            evaluation = self._schedule.record(pending, evaluate_version(self.executor, self._schedule, pending))
            if evaluation is not None:
                self.note("measured", **metric_field(self.executor.task.metric_name), **asdict(evaluation))
                self.log.write()
                append_lines(self.files.metrics, self._metrics([evaluation]))

    def end(self, status: Status) -> None:
        """End the run with a status that does not come from an evaluation."""
        self.evaluate()
        if self.progress.status is Status.RUNNING:
            newest = self.executor.versions[max(self.executor.versions)]
            self._pending_evals.append(self._schedule.ended(Sent(0, None, self.seconds), newest))
            self.evaluate()
            if self.progress.diverged_at is None:
                self.progress.status = status
        self.progress.seconds = self.seconds

    def stall(self) -> None:
        """End the session, but not the run: it can be resumed, so it gets no last evaluation."""
        self.evaluate()
        if self.progress.status is Status.RUNNING:
            self.note("stalled")
            self.log.write()
            self.progress.status, self.progress.seconds = Status.STALLED, self.seconds

    def _metrics(self, evaluations: list[Evaluation]) -> list[dict[str, Any]]:
        metric = metric_field(self.executor.task.metric_name)
        shared = {"algorithm": self.config.settings.algorithm, "seed": self.config.seed, **metric}
        return [{**shared, **asdict(evaluation)} for evaluation in evaluations]

    def _restore(self, log: EventLog) -> None:
        """Replay the log and load the vectors from disk; compute again the merges since the state was saved."""
        state = self.store.state()
        rounds = self._replay(log, state)
        saved = 0 if state is None else state["version"]
        complete = sum(record.merge.version <= saved for record in rounds)
        self._load(rounds[:complete])
        for record in rounds[complete:]:
            self.executor.merge(record, self._deltas(record))
            self._assign(record)
        self._restore_evaluations(log, rounds)
        write_lines(self.files.metrics, self._metrics(self.progress.evaluations))

    def _load(self, rounds: list[Round]) -> None:
        """Load the versions and the state vectors that these rounds leave."""
        times = {0: 0.0}
        for record in rounds:
            times[record.merge.version] = record.time
            for version in record.freed:
                del times[version]
            self._assigned_by |= self._assigned(record)
        self.executor.version_seconds, self._saved_versions = times, set(times)
        self.executor.versions.replace({version: self.store.version(version) for version in times})
        values = {vector: self.store.vector(vector, version) for vector, version in self._assigned_by.items()}
        self.executor.state.restore({vector: value for vector, value in values.items() if value is not None})

    def _replay(self, log: EventLog, state: dict[str, Any] | None) -> list[Round]:
        """Let the engine handle the logged events, compare it with the saved state, and return the rounds."""
        if state is not None and state["lines"] > len(log.lines):
            raise UserError(f"the log in {self.files.folder} is shorter than its state says; a part of it is missing")
        rounds: list[Round] = []
        for number, line in enumerate(log.lines, start=1):
            if not isinstance(line, LogNote):
                rounds += [command for command in self.engine.handle(line) if isinstance(command, Round)]
            if state is not None and number == state["lines"]:
                self._check_state(state)
        return rounds

    def _check_state(self, state: dict[str, Any]) -> None:
        if "machine" in state and "server_state" not in state:
            self._log_line("state.json is from an earlier version; the replayed state is not compared with it")
        elif state.get("server_state") != self.engine.server.state():
            folder = self.files.folder
            raise UserError(f"the log in {folder} does not lead to the state that was saved; one of them was changed")

    def _restore_evaluations(self, log: EventLog, rounds: list[Round]) -> None:
        """Restore the logged evaluations; versions without one are evaluated later, if they still exist."""
        logged = {note.fields.get("round"): note.fields for note in log.notes("measured")}
        self._settle_logged(logged)
        for record in rounds:
            weights = self.executor.versions.get(record.merge.version)
            pending = self._schedule.round(record, torch.zeros(1) if weights is None else weights)
            if weights is None and pending.round not in logged:
                pending = replace(pending, evaluate=False)  # the version was freed before its evaluation
            self._pending_evals.append(pending)
            self._settle_logged(logged)

    def _settle_logged(self, logged: dict[Any, dict[str, Any]]) -> None:
        while self._pending_evals and (not self._pending_evals[0].evaluate or self._pending_evals[0].round in logged):
            pending = self._pending_evals.pop(0)
            if self.progress.status is not Status.RUNNING:
                continue
            if not pending.evaluate:
                self._schedule.record(pending, EvalResult(finite=True))
                continue
            old = logged[pending.round]
            found = self._schedule.record(pending, EvalResult(True, old["loss"], old["accuracy"], old["train_loss"]))
            assert found is not None
            self.progress.evaluations[-1] = replace(found, wall_seconds=old["wall_seconds"])
