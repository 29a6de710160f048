"""Runs a study in its run folder. Every result is written when it is made, so that an early end loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ..config.build import make_executor, make_simulator
from ..config.renamed_settings import current_label
from ..config.study import Study, SweepPoint
from ..errors import UserError
from ..fileio import read_text, write_whole
from ..jsonio import finite, json_line
from ..runstore.client_results import client_figures
from ..runstore.in_memory import folder_of_study
from ..runstore.journal import JournalPosition
from ..runstore.metrics import metric_field
from ..runstore.provenance import provenance
from ..runstore.reader import PartitionCounts, RunFolder
from ..runstore.summary import run_entry
from ..runstore.writer import write_client_rows, write_partition, write_summary
from ..tasks import class_counts
from ..training import Evaluation
from .checkpointing import SavedSession
from .compute import ComputeConfig
from .earlier_results import evaluations_by_run, finished_results
from .plan_files import PlanFile
from .run_clients import client_rows_of
from .run_events import Event, RunFinished, RunSpec, Watch
from .session_folder import SessionFolder
from .simulation import Simulation
from .sweep import Sweep

MAX_CLIENTS_SHOWN = 1_000  # in the figure of a partition
EVALUATION_FIELDS = {item.name for item in fields(Evaluation)}


class StudyRun:
    """A study and its run folder; ``notes`` are lines for the user.

    The options of sessions are those of ``SessionFolder``.
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
        self.study = study
        self.folder = folder
        self.sweep = Sweep(compute or ComputeConfig(), self._checkpoint, on_begin=self._record_plan)
        self._session = SessionFolder(
            study, folder, self.sweep, force=force, resume=resume, checkpoint_interval=checkpoint_interval,
            notify=notify,
        )  # fmt: skip
        self.points = study.points()
        self.entries: list[dict[str, Any]] = []
        self.finished = False
        self._specs = [RunSpec(point, point.settings, seed) for point in self.points for seed in study.seeds]
        self._positions = {spec: position for position, spec in enumerate(self._specs)}
        self._plans: dict[RunSpec, PlanFile] = {}
        self._evaluations: dict[str, list[Evaluation]] = {}
        self._check()
        compute = self.sweep.compute
        self._origin = provenance(executor=compute.executor, device=compute.device, precision=compute.precision)
        self._files = self._session.files
        self._session.open(self._resume)

    @property
    def notes(self) -> list[str]:
        """Lines for the user."""
        return self.sweep.notes

    @property
    def stop_requested(self) -> bool:
        """Whether Ctrl-C was pressed, even if the runs finished before they could be stopped."""
        return self._session.stop.requested

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
        if files.rate_points.exists():
            raise self._is_search()
        self._session.check_study()
        finished = finished_results(
            files,
            ((spec.label, spec.seed, self.sweep.task(spec.settings, spec.seed).metric_name) for spec in self._specs),
        )
        if finished is not None:
            self.finished = True
            self.entries, self._origin = finished
            text = read_text(files.metrics)
        else:
            self._session.load_checkpoint("study")
            if self._session.saved.search is not None:
                raise self._is_search()
            self._session.check_positions(len(self._specs))
            self.entries = [dict(entry) for entry in self._session.saved.entries]
            text = self._session.saved_journal()
        self._evaluations = evaluations_by_run(files.metrics, text, _run_key)

    def _is_search(self) -> UserError:
        what = "holds a search for learning rates; continue it with `defedavg tune --resume`, or use another name"
        return UserError(f"{self.folder} {what}")

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
        with self._session.in_use():
            self._begin()
            if not self.finished:
                with self._session.computing():
                    self.finished = self._run(watch)
                if self.finished:
                    self._write_summary(finished=True)
            if self.finished:
                self._session.clear_checkpoints()
        return self.finished

    def _begin(self) -> None:
        self._session.begin()
        if self._partition is not None:
            write_partition(self._files, self._partition)
            self._note_unheld_classes(self._partition)
        if not self.finished:
            self._write_summary(finished=False)

    def _run(self, watch: Watch) -> bool:
        remaining = [spec for spec in self._specs if not self._is_finished(spec)]
        resumed = {
            self._specs[position]: (state, self._earlier(self._specs[position]))
            for position, state in self._session.saved.runs.items()
        }
        try:
            for event in self.sweep.events(remaining, resumed, self._session.saved.batch_limits):
                self._handle(event)
                watch(event)
        except KeyboardInterrupt:
            if self._session.old.pending:
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
        self._session.checkpoint(self._state)

    def _state(self, metrics: JournalPosition) -> SavedSession:
        runs = {self._positions[spec]: state for spec, state in self.sweep.run_states().items()}
        return SavedSession(metrics, self.entries, runs, self.sweep.batch_limits)

    def _record_plan(self, spec: RunSpec, run: Simulation) -> None:
        path = self._files.plan(spec.label, spec.seed)
        self._plans[spec] = PlanFile(path, run)

    def _handle(self, event: Event) -> None:
        if isinstance(event, RunFinished) or event.evaluation.round > 0:
            self._session.old.commit()
        if isinstance(event, RunFinished):
            self._finish(event)
        else:
            head = {**_identity(event.spec), **metric_field(event.metric)}
            self._session.append({**head, **event.evaluation.by_name()})

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
