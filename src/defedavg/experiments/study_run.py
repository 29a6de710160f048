"""The run folder: what a study leaves behind. Written as it goes, so that whatever ends it early costs nothing.

runs/NAME/
  config.toml        the study, every key written out
  metrics.jsonl      one line per measurement, appended as it is made
  metrics.parquet    the same as a table, at the end, where pyarrow is installed
  summary.json       one entry per algorithm × swept point × seed, rewritten whole after every run
  plans/*.jsonl.gz   one plan per run
  weights/*          the last version of every run
  checkpoints/*      while it is under way: where it can be taken up
  split.json         samples of every client by class, of the first setting and seed
  plots/*            PNG and PDF
  report.html        the page of all this
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from .. import __version__
from ..config.build import make_simulator, make_stopping_rule
from ..config.study import Study, SweepPoint
from ..errors import UserError
from ..fileio import FolderLock, file_name, read_text, write_whole, writing
from ..jsonio import finite
from ..planning.plan import without_gc
from ..planning.plan_io import Hashed, saved
from ..planning.plan_stats import PlanStats, PlanStatsCollector
from ..report.plots import Curve, accuracy_curves, loss_curves, save, split_map
from ..runstore.catalogue import OURS
from ..runstore.provenance import provenance
from ..tasks import class_counts
from ..training import Evaluation, RunProgress
from .checkpoints import CheckpointDir
from .journal import Journal, JournalPosition, read
from .resume import CheckpointWriter, SavedSession, check_study, evaluation, finished_entries, load
from .simulation import Simulation
from .sweep import ComputeConfig, Event, RunFinished, RunSpec, Sweep, Watch

SHOWN = 1_000  # clients in the drawing of a split
MEASURED = {f.name for f in fields(Evaluation)}


def open_folder(path: Path, force: bool) -> None:
    """Make the folder of a run; one that is there already is refused, or with ``force`` emptied of an earlier run."""
    with writing(path):
        if path.exists():
            if not path.is_dir():
                raise UserError(f"{path} is there and is not a folder; choose another --out or name")
            if any(path.iterdir()):
                if not force:
                    raise UserError(f"{path} is there already; use --force to replace it, or another name")
                if not all((path / name).exists() for name in ("config.toml", "summary.json")):
                    raise UserError(
                        f"{path} holds something else than a run, so it is not replaced; choose another name"
                    )
                for name in OURS:
                    old = path / name
                    shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        path.mkdir(parents=True, exist_ok=True)


class StudyRun:
    """A study being carried out in its folder; ``notes`` is what a user should know.

    With ``resume`` it goes on where an earlier sitting ended, if there was one. ``every`` is how many real seconds pass
    from one checkpoint to the next; None: a minute, or more where that would take more than a twentieth of the time.
    """

    def __init__(
        self,
        study: Study,
        folder: Path,
        *,
        force: bool = False,
        means: ComputeConfig | None = None,
        resume: bool = False,
        every: float | None = None,
    ) -> None:
        if force and resume:
            raise UserError("--force begins anew and --resume goes on; give one of them")
        self.study = study
        self.folder = folder
        self.sweep = Sweep(means or ComputeConfig(), self._rest)
        self.points = study.points()
        self.entries: list[dict[str, Any]] = []
        self.curves: list[Curve] = []
        self.finished = False
        self._items = [RunSpec(point, point.settings, seed) for point in self.points for seed in study.seeds]
        self._numbers = {item: number for number, item in enumerate(self._items)}
        self._shelf = CheckpointDir(folder / "checkpoints")
        self._keeper = CheckpointWriter(self._shelf, study, every)
        self._journal: Journal | None = None
        self._sitting = SavedSession(JournalPosition(), [], {}, None)
        self._measured: dict[str, list[Evaluation]] = {}
        self._check()
        means = self.sweep.means
        self._provenance = provenance(executor=means.executor, device=means.device, precision=means.precision)
        self._claim = FolderLock(folder)
        try:
            if resume and any(folder.iterdir()):
                self._take_up()
            else:
                open_folder(folder, force)
        except BaseException:
            self._claim.release()
            raise
        with writing(folder):
            for name in ("plans", "weights", "plots"):
                (folder / name).mkdir(exist_ok=True)
        write_whole(folder / "config.toml", study.to_toml().encode())
        self._save_split()
        if not self.finished:
            self._save_summary(finished=False)

    @property
    def notes(self) -> list[str]:
        """What a user should know."""
        return self.sweep.notes

    def _check(self) -> None:
        """Find what cannot work before anything is written."""
        for point in self.points:
            for seed in self.study.seeds:
                make_simulator(point.settings, seed)
                self.sweep.task(point.settings, seed)

    def _take_up(self) -> None:
        """Find out where an earlier sitting ended; nothing is written."""
        ours = all(path.name.removesuffix(".part") in OURS for path in self.folder.iterdir())
        config, metrics = self.folder / "config.toml", self.folder / "metrics.jsonl"
        if not ours and not config.exists():
            raise UserError(f"{self.folder} holds something else than a run, so it is not taken up; use another name")
        if config.exists():
            check_study(self.folder, read_text(config), self.study)
        over = finished_entries(self.folder / "summary.json")
        self.finished = over is not None
        found, notes = (None, []) if self.finished else load(self.folder, self._shelf, self.study, self.sweep.means)
        self.notes.extend(notes)
        if found is not None:
            self._sitting = found
        elif not self.finished:
            self.notes.append("there is no checkpoint yet, so it is begun again")
        self.entries = list(over or self._sitting.entries)
        text = read_text(metrics) if self.finished else read(metrics, self._sitting.mark).decode()
        for line in text.splitlines():
            known = json.loads(line)
            self._measured.setdefault(_key(known), []).append(evaluation(known))
        self.curves = [curve_of(_point(item), self._evaluations(item)) for item in self._items if self._is_over(item)]

    def _is_over(self, item: RunSpec) -> bool:
        return any((_point(item).label, item.seed) == (entry["label"], entry["seed"]) for entry in self.entries)

    def _evaluations(self, item: RunSpec) -> list[Evaluation]:
        """What an earlier sitting measured of a run."""
        return self._measured.get(_key(_head(_point(item), item.seed)), [])

    def carry_out(self, watch: Watch) -> bool:
        """Run everything; False if Ctrl-C ended it, with all that was measured kept."""
        try:
            if not self.finished:
                self._journal = Journal(self.folder / "metrics.jsonl", self._sitting.mark)
                try:
                    self.finished = self._carry_out(watch)
                finally:
                    self._journal.close()
            if self.finished:
                self._save_summary(finished=True)
                self._shelf.clear()
        finally:
            self._claim.release()
        return self.finished

    def _carry_out(self, watch: Watch) -> bool:
        left = [item for item in self._items if not self._is_over(item)]
        resumed = {
            self._items[number]: (standing, self._evaluations(self._items[number]))
            for number, standing in self._sitting.open.items()
        }
        try:
            for event in self.sweep.events(left, resumed, self._sitting.fit):
                self._take(event)
                watch(event)
        except KeyboardInterrupt:
            for event in self.sweep.interrupt():
                self._take(event)
            return False
        return True

    def _rest(self) -> None:
        if self._journal is not None and self._keeper.due:
            self._keeper.keep(self.sweep, self._numbers, self._journal.mark(), self.entries)

    def _take(self, event: Event) -> None:
        point, seed = _point(event.item), event.item.seed
        if isinstance(event, RunFinished):
            self._finish(point, seed, event.run, event.wall_seconds)
        elif self._journal is not None:
            line = {**_head(point, seed), **asdict(event.evaluation)}
            self._journal.append(json.dumps(finite(line), allow_nan=False))

    def _finish(self, point: SweepPoint, seed: int, run: Simulation, wall: float) -> None:
        stats, plan_hash = _save_plan(run, self.folder / "plans" / (file_name(point.label, seed) + ".jsonl.gz"))
        weights = safetensors.torch.save(run.executor.named(run.weights))
        write_whole(self.folder / "weights" / (file_name(point.label, seed) + ".safetensors"), weights)
        self.curves.append(curve_of(point, run.progress.evaluations))
        trained = run.executor.updates_trained
        found = entry_of(point, seed, run.progress, stats, plan_hash, trained=trained, wall=wall)
        self.entries.append(finite(found))
        # Runs in shared batches end in any order; they are listed in that of the study.
        place = {point.label: number for number, point in enumerate(self.points)}
        self.entries.sort(key=lambda entry: (place[entry["label"]], self.study.seeds.index(entry["seed"])))
        self.curves.sort(key=lambda curve: place[curve.label])
        self._save_summary(finished=False)

    def draw(self) -> None:
        """Draw what was measured: accuracy and loss over simulated seconds and over rounds, and the split."""
        plots = self.folder / "plots"
        if not self.curves:
            return
        targets = {entry["target_accuracy"] for entry in self.entries}
        draw_curves(plots, self.study.name, self.curves, targets.pop() if len(targets) == 1 else None)
        if self._split is not None:
            save(split_map(*self._split), plots / "split")

    @cached_property
    def _split(self) -> tuple[Any, str] | None:
        """Samples of clients by classes, and a title; None where there are no classes."""
        task = self.sweep.task(self.points[0].settings, self.study.seeds[0])
        if task.classes is None:
            return None
        shown = task.clients[:SHOWN]
        counts = class_counts(shown, task.train.targets.cpu().numpy(), task.classes)
        part = "" if len(shown) == task.num_clients else f", the first {len(shown)} of {task.num_clients} clients"
        return counts, f"{task.name}, seed {self.study.seeds[0]}{part}"

    def _save_split(self) -> None:
        if self._split is not None:
            counts, title = self._split
            whole = {"title": title, "counts": counts.tolist()}
            write_whole(self.folder / "split.json", (json.dumps(whole) + "\n").encode())

    def _save_summary(self, *, finished: bool) -> None:
        head = {"name": self.study.name, "version": __version__, "finished": finished, "provenance": self._provenance}
        whole = {**head, "runs": self.entries}
        text = json.dumps(whole, indent=1, allow_nan=False) + "\n"
        write_whole(self.folder / "summary.json", text.encode())


def _point(item: RunSpec) -> SweepPoint:
    assert isinstance(item.name, SweepPoint)
    return item.name


def _head(point: SweepPoint, seed: int) -> dict[str, Any]:
    """What a line of the metrics says of its run."""
    return {"algorithm": point.settings.algorithm, "label": point.label, **dict(point.swept), "seed": seed}


def _key(line: Mapping[str, Any]) -> str:
    """The run that a line of the metrics is of."""
    return json.dumps(finite({name: value for name, value in line.items() if name not in MEASURED}))


def draw_curves(plots: Path, title: str, curves: Sequence[Curve], target: float | None) -> None:
    """Accuracy and loss, over seconds and over rounds."""
    for against in ("seconds", "rounds"):
        save(accuracy_curves({title: curves}, target=target, against=against), plots / f"accuracy-over-{against}")
        save(loss_curves({title: curves}, against=against), plots / f"loss-over-{against}")


def curve_of(point: SweepPoint, found: Sequence[Evaluation]) -> Curve:
    """What was measured of a run, ready to be drawn."""
    known = [e for e in found if math.isfinite(e.loss)]
    return Curve(
        algorithm=point.settings.algorithm,
        label=point.label,
        seconds=tuple(e.seconds for e in known),
        rounds=tuple(e.round for e in known),
        accuracy=tuple(math.nan if e.accuracy is None else e.accuracy for e in known),
        loss=tuple(e.loss for e in known),
    )


def _save_plan(run: Simulation, path: Path) -> tuple[PlanStats, str]:
    """Write the plan of a run, which need not fit into memory; gives its figures and its hash."""
    timeline, stream = run.planned()
    counting, line = PlanStatsCollector(timeline.header, timeline.fleet), Hashed()
    with without_gc():
        for record in saved(path, timeline.header, stream, line):
            counting.add(record)
    return counting.stats(), line.hash()


def entry_of(
    point: SweepPoint, seed: int, progress: RunProgress, stats: PlanStats, plan_hash: str, *, trained: int, wall: float
) -> dict[str, Any]:
    """What the summary says of a run."""
    return {
        "algorithm": point.settings.algorithm,
        "label": point.label,
        "swept": dict(point.swept),
        "seed": seed,
        "status": str(progress.status),
        "target_accuracy": make_stopping_rule(point.settings).target_accuracy,
        "first_hit_seconds": progress.first_hit_seconds,
        "sustained_seconds": progress.sustained_seconds,
        "rounds": progress.rounds,
        "seconds": progress.seconds,
        "best_accuracy": progress.best_accuracy,
        "final_accuracy": progress.final_accuracy,
        "diverged_at": progress.diverged_at,
        "updates_trained": trained,
        "updates_started": stats.jobs_started,
        "staleness_mean": stats.staleness_mean,
        "participation": list(stats.participation),
        "plan_sha256": plan_hash,
        "wall_seconds": wall,
        "torch_threads": torch.get_num_threads(),
    }
