"""Runs a study in its run folder. Every result is written when it is made, so that an early end loses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ..config.build import make_executor, make_simulator
from ..config.renamed_settings import current_label, current_name
from ..config.study import Study, SweepPoint
from ..errors import UserError
from ..fileio import FolderLock, read_text, write_whole
from ..jsonio import finite, json_line
from ..runstore.client_results import client_figures
from ..runstore.in_memory import folder_of_study
from ..runstore.journal import Journal, read_until
from ..runstore.layout import RunFiles
from ..runstore.metrics import metric_field
from ..runstore.provenance import provenance
from ..runstore.reader import PartitionCounts, RunFolder
from ..runstore.replacement import Replacement
from ..runstore.summary import run_entry
from ..runstore.writer import begin_run, check_folder, write_client_rows, write_partition, write_summary
from ..tasks import class_counts
from ..training import Evaluation
from .checkpointing import (
    CheckpointDir,
    CheckpointWriter,
    SavedSession,
    check_study,
    evaluation_of,
    finished_results,
)
from .compute import ComputeConfig
from .deferred_stop import DeferredStop
from .plan_files import PlanFile
from .run_clients import client_rows_of
from .run_events import Event, RunFinished, RunSpec, Watch
from .simulation import Simulation
from .sweep import Sweep

MAX_CLIENTS_SHOWN = 1_000  # in the figure of a partition
EVALUATION_FIELDS = {item.name for item in fields(Evaluation)}


class StudyRun:
    """A study and its run folder; ``notes`` are lines for the user.

    With ``resume`` it continues an earlier session, if there is one. ``checkpoint_interval`` is the real time between
    checkpoints in seconds; None: a minute, or more if checkpoints would take more than a twentieth of the time. Ctrl-C
    saves one, too: ``notify`` receives a line while the runs end their batch.
    """

    def __init__(
        self,
        study: Study,
        folder: Path,
        *,
        force: bool = False,
        compute: ComputeConfig | None = None,
        resume: bool = False,
        checkpoint_interval: float | None = None,
        notify: Callable[[str], None] = lambda _line: None,
    ) -> None:
        if force and resume:
            raise UserError("--force starts again and --resume continues; give one of them")
        self.study = study
        self.folder = folder
        self.sweep = Sweep(compute or ComputeConfig(), self._checkpoint, on_begin=self._record_plan)
        self.points = study.points()
        self.entries: list[dict[str, Any]] = []
        self.finished = False
        self._specs = [RunSpec(point, point.settings, seed) for point in self.points for seed in study.seeds]
        self._positions = {spec: position for position, spec in enumerate(self._specs)}
        self._plans: dict[RunSpec, PlanFile] = {}
        self._journal: Journal | None = None
        self._session = SavedSession()
        self._evaluations: dict[str, list[Evaluation]] = {}
        self._stop = DeferredStop(notify)
        self._check()
        compute = self.sweep.compute
        self._origin = provenance(executor=compute.executor, device=compute.device, precision=compute.precision)
        self._files = RunFiles(folder)
        self._directory = CheckpointDir(self._files.checkpoints)
        self._checkpoints = CheckpointWriter(self._directory, study, checkpoint_interval)
        self._lock = FolderLock(folder)
        self._old = Replacement(folder)
        try:
            if self._old.recover():
                self.notes.append(f"restored the run in {folder}, which a killed process was about to replace")
            self._resumed = resume and not self._files.is_empty()
            if self._resumed:
                self._resume()
            else:
                check_folder(folder, force=force, resumable=bool(self._directory.paths()))
        except BaseException:
            self._lock.release()
            raise

    @property
    def notes(self) -> list[str]:
        """Lines for the user."""
        return self.sweep.notes

    @property
    def stop_requested(self) -> bool:
        """Whether Ctrl-C was pressed, even if the runs finished before they could be stopped."""
        return self._stop.requested

    def _check(self) -> None:
        """Find errors in settings, data and models before anything is written."""
        checked = {("", "none")}
        for spec in self._specs:
            make_simulator(spec.settings, spec.seed)
            task, chosen = self.sweep.task(spec.settings, spec.seed), (spec.settings.task, spec.settings.training)
            key = chosen[0].module, chosen[1].augment
            if key not in checked:
                make_executor(spec.settings, spec.seed, task)  # refuses a model or options that do not fit the data
                checked.add(key)
        self.sweep.check(self._specs)

    # Resuming.

    def _resume(self) -> None:
        """Load the state of an earlier session; nothing is written."""
        files = self._files
        files.refuse_links()
        if files.foreign() and not files.config.exists():
            raise UserError(f"{self.folder} holds something other than a run and is not resumed; use another name")
        if files.config.exists():
            check_study(self.folder, read_text(files.config), self.study)
        elif self._directory.paths():
            SavedSession.load(self._directory, self.study, self.sweep.compute)  # refuses another study
        elif files.has_results():
            raise UserError(
                f"{self.folder} holds runs, but no {files.config.name} that says of which study; use another --out or "
                "name, or remove the folder"
            )
        finished = finished_results(
            files,
            ((spec.label, spec.seed, self.sweep.task(spec.settings, spec.seed).metric_name) for spec in self._specs),
        )
        if finished is not None:
            self.finished = True
            self.entries, self._origin = finished
            text = read_text(files.metrics)
        else:
            self._load_session()
            text = read_until(files.metrics, self._session.metrics).decode()
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                values = {current_name(name): value for name, value in json.loads(line).items()}
                values["label"] = current_label(values["label"])
                evaluation = evaluation_of(values)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise UserError(f"{files.metrics}, line {number} is damaged; start again with --force") from None
            self._evaluations.setdefault(_run_key(values), []).append(evaluation)

    def _load_session(self) -> None:
        session, notes = SavedSession.load(self._directory, self.study, self.sweep.compute)
        self.notes.extend(notes)
        if session is None:
            self.notes.append("there is no checkpoint yet, so the study starts from the beginning")
            return
        self._session = session
        self.entries = [dict(entry) for entry in session.entries]

    def _is_finished(self, spec: RunSpec) -> bool:
        return any((spec.label, spec.seed) == (current_label(entry["label"]), entry["seed"]) for entry in self.entries)

    def _earlier(self, spec: RunSpec) -> list[Evaluation]:
        """Return the evaluations of a finished run, or those of earlier sessions."""
        return self._evaluations.get(_run_key(_identity(spec)), [])

    # Running.

    def run(self, watch: Watch) -> bool:
        """Compute all runs; return False if Ctrl-C stopped them, with everything evaluated so far saved.

        A run that this one replaces is removed after the first round; if the new one ends before, it is restored.
        """
        try:
            self._begin()
            if not self.finished:
                self._journal = Journal(self._files.metrics, self._session.metrics)
                try:
                    with self._stop:
                        self.finished = self._run(watch)
                finally:
                    self._journal.close()
                if self.finished:
                    self._write_summary(finished=True)
            if self.finished:
                self._directory.clear()
        except BaseException:
            self._old.restore()
            raise
        finally:
            self._lock.release()
        return self.finished

    def _begin(self) -> None:
        if not self._resumed:
            self._old.set_aside()
        begin_run(self._files, self.study.to_toml())
        if self._partition is not None:
            write_partition(self._files, self._partition)
            self._note_unheld_classes(self._partition)
        if not self.finished:
            self._write_summary(finished=False)

    def _run(self, watch: Watch) -> bool:
        remaining = [spec for spec in self._specs if not self._is_finished(spec)]
        resumed = {
            self._specs[position]: (state, self._earlier(self._specs[position]))
            for position, state in self._session.runs.items()
        }
        try:
            for event in self.sweep.events(remaining, resumed, self._session.batch_limits):
                self._handle(event)
                watch(event)
        except KeyboardInterrupt:
            if self._old.pending:
                raise
            for event in self.sweep.interrupt():
                self._handle(event)
            return False
        finally:
            for plan in self._plans.values():
                plan.discard()
        return True

    def _checkpoint(self) -> None:
        for plan in self._plans.values():
            plan.commit()
        stopping = self._stop.requested and not self._old.pending  # before the first round there is nothing to save
        if self._journal is not None and (self._checkpoints.due or stopping):
            self._checkpoints.save(self.sweep, self._positions, self._journal.position(), self.entries)
        self._stop.stop_if_requested()

    def _record_plan(self, spec: RunSpec, run: Simulation) -> None:
        path = self._files.plan(spec.label, spec.seed)
        self._plans[spec] = PlanFile(path, run)

    def _handle(self, event: Event) -> None:
        if isinstance(event, RunFinished) or event.evaluation.round > 0:
            self._old.commit()
        if isinstance(event, RunFinished):
            self._finish(event)
        elif self._journal is not None:
            head = {**_identity(event.spec), **metric_field(event.metric)}
            self._journal.append(json_line({**head, **event.evaluation.by_name()}))

    def _finish(self, event: RunFinished) -> None:
        spec, run = event.spec, event.run
        point = _point(spec)
        plan = self._plans.pop(spec)
        stats, plan_hash = plan.finish()
        rows = client_rows_of(run, plan.totals)
        if rows:
            write_client_rows(self._files.clients(spec.label, spec.seed), rows)
        weights = safetensors.torch.save(run.executor.named(run.weights))
        write_whole(self._files.weights(spec.label, spec.seed), weights)
        self._evaluations[_run_key(_identity(spec))] = run.progress.evaluations
        entry = run_entry(
            point,
            spec.seed,
            run.progress,
            stats,
            plan_hash,
            metric=run.task.metric_name,
            wall_seconds=event.wall_seconds,
            threads=torch.get_num_threads(),
            clients=client_figures(rows),
        )
        self.entries.append(finite(entry))
        # Runs in shared batches end in any order; they are listed in the order of the study.
        order = {point.label: position for position, point in enumerate(self.points)}
        self.entries.sort(
            key=lambda entry: (order[current_label(entry["label"])], self.study.seeds.index(entry["seed"]))
        )
        self._write_summary(finished=False)

    def _note_unheld_classes(self, partition: PartitionCounts) -> None:
        """Say of which classes no client holds a sample; this is unknown unless all clients are counted."""
        unheld = [str(label) for label, counts in enumerate(zip(*partition.counts, strict=True)) if not any(counts)]
        if unheld and len(partition.counts) == self.points[0].settings.clients.num_clients:
            names = ", ".join(unheld[:10]) + (", …" if len(unheld) > 10 else "")
            self.notes.append(
                f"no client holds a sample of {len(unheld)} of the {len(partition.counts[0])} classes ({names}), which "
                "limits the accuracy; use more clients, more classes per client, or another partition"
            )

    # Results.

    @cached_property
    def _partition(self) -> PartitionCounts | None:
        """Samples of clients by class, of the first setting and seed; None if the task has no classes."""
        task = self.sweep.task(self.points[0].settings, self.study.seeds[0])
        if task.classes is None:
            return None
        shown = task.clients[:MAX_CLIENTS_SHOWN]
        counts = class_counts(shown, task.train.targets.cpu().numpy(), task.classes)
        part = "" if len(shown) == task.num_clients else f", the first {len(shown)} of {task.num_clients} clients"
        swept = self.points[0].swept  # this partition belongs to one of the swept tasks
        values = "".join(f", {name[5:]} {value}" for name, value in swept if name.startswith("task."))
        return PartitionCounts(f"{task.name}{values}, seed {self.study.seeds[0]}{part}", counts.tolist())

    def run_folder(self) -> RunFolder:
        """Return the results for a report from memory; only the plans are read from disk."""
        evaluations = {(spec.label, spec.seed): self._earlier(spec) for spec in self._specs}
        results = [
            (entry, map(Evaluation.by_name, evaluations[current_label(entry["label"]), entry["seed"]]))
            for entry in self.entries
        ]
        return folder_of_study(
            self.folder,
            self.study,
            results,
            finished=self.finished,
            origin=self._origin,
            partition=self._partition,
        )

    def _write_summary(self, *, finished: bool) -> None:
        write_summary(self._files, self.study.name, self._origin, {"runs": self.entries}, finished=finished)


def _point(spec: RunSpec) -> SweepPoint:
    assert isinstance(spec.name, SweepPoint)
    return spec.name


def _identity(spec: RunSpec) -> dict[str, Any]:
    """Return the fields of a metrics line that identify its run."""
    return {
        "algorithm": spec.settings.algorithm,
        "label": spec.label,
        **dict(_point(spec).swept),
        "seed": spec.seed,
    }


def _run_key(line: Mapping[str, Any]) -> str:
    """Return a key of the run that a metrics line belongs to."""
    return json_line({name: value for name, value in line.items() if name not in (*EVALUATION_FIELDS, "metric")})
