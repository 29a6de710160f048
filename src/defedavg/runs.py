"""The run folder: what a study leaves behind. Written as it goes, so that whatever ends it early costs nothing.

runs/NAME/
  config.toml        the study, every key written out
  metrics.jsonl      one line per measurement, appended as it is made
  summary.json       one entry per algorithm × swept point × seed, rewritten whole after every run
  plans/*.jsonl.gz   one plan per run
  plots/*            PNG and PDF
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from . import __version__
from .config import Point, Study
from .errors import UserError, unknown
from .execute import CannotStack, Evaluation, Lane, Status, Trainer, drive_batched
from .execute.memory import parse_memory
from .execute.precision import DEFAULT, check_precision, computing_in
from .files import write_whole, writing
from .plan import Plan
from .report.jsons import finite
from .report.plots import Curve, accuracy_curves, loss_curves, save, split_map
from .simulation import EXECUTORS, Simulation, make_goal, make_timeline, named_task
from .stats import summarise
from .tasks import Data, Task, class_counts

OURS = ("config.toml", "metrics.jsonl", "summary.json", "plans", "plots")

Watch = Callable[[Point, int, Evaluation], None]


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
        (path / "plans").mkdir(parents=True, exist_ok=True)
        (path / "plots").mkdir(exist_ok=True)


def file_name(label: str, seed: int) -> str:
    """A file name for a run."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", f"{label} seed={seed}")


def choose_device(name: str) -> str:
    """``cpu`` or ``cuda``, from what was asked for."""
    if name not in ("auto", "cpu", "cuda"):
        raise unknown("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA device here; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Means:
    """What a study is computed with."""

    executor: str = "batched"
    device: str = "cpu"
    width: int | None = None  # jobs in a batch at most
    memory: int | None = None  # bytes
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise unknown("executor", self.executor, EXECUTORS)
        if self.width is not None and self.width < 1:
            raise UserError(f"--width is {self.width}; it must be at least 1")
        check_precision(self.precision, self.device)

    @classmethod
    def choose(
        cls, executor: str, device: str, width: int | None = None, memory: str | None = None, precision: str = "auto"
    ) -> Means:
        """From what was asked for on the command line."""
        device = choose_device(device)
        precision = DEFAULT[device] if precision == "auto" else precision
        return cls(executor, device, width, None if memory is None else parse_memory(memory), precision)


class Run:
    """A study being carried out in its folder."""

    def __init__(self, study: Study, folder: Path, *, force: bool = False, means: Means | None = None) -> None:
        self.study = study
        self.folder = folder
        self.means = means or Means()
        self.points = study.points()
        self.entries: list[dict[str, Any]] = []
        self.curves: list[Curve] = []
        self.notes: list[str] = []
        self._tasks: dict[Any, Task] = {}
        self._data: dict[int, tuple[Data, Data]] = {}  # by id, which stays taken while the original is kept
        self._check()
        open_folder(folder, force)
        write_whole(folder / "config.toml", study.to_toml().encode())
        self._save_summary(finished=False)

    def _check(self) -> None:
        """Find what cannot work before anything is written."""
        for point in self.points:
            for seed in self.study.seeds:
                make_timeline(point.settings, seed)
                self.task(point, seed)

    def task(self, point: Point, seed: int) -> Task:
        """The task of a run; runs that share data and split share it."""
        key = (point.settings.task, point.settings.clients.num_clients, seed)
        if key not in self._tasks:
            self._tasks[key] = self._moved(named_task(point.settings, seed))
        return self._tasks[key]

    def _moved(self, task: Task) -> Task:
        """The task on the device; data that tasks share are there once."""
        train, test = (
            self._data.setdefault(id(data), (data, data.to(self.means.device)))[1] for data in (task.train, task.test)
        )
        return replace(task, train=train, test=test)

    def carry_out(self, watch: Watch) -> bool:
        """Run everything; False if Ctrl-C ended it, with all that was measured kept."""
        metrics = self.folder / "metrics.jsonl"
        precise = computing_in(self.means.precision)
        with writing(metrics), precise, metrics.open("a", encoding="utf-8") as out:
            carry = self._together if self.means.executor == "batched" else self._each
            if not all(carry(group, out, watch) for group in self._groups()):
                return False
        self._save_summary(finished=True)
        return True

    def _groups(self) -> list[list[tuple[Point, int]]]:
        """Runs that share model and data, and so can share a batch."""
        found: dict[Any, list[tuple[Point, int]]] = {}
        for point in self.points:
            for seed in self.study.seeds:
                t = point.settings.task
                found.setdefault((t.data, t.model, t.normalise, point.settings.training.batch_size), []).append(
                    (point, seed)
                )
        return list(found.values())

    def _each(self, group: list[tuple[Point, int]], out: TextIO, watch: Watch) -> bool:
        """One run after the other; False if Ctrl-C ended it."""
        return all(self._one(point, seed, out, watch) is not Status.INTERRUPTED for point, seed in group)

    def _together(self, group: list[tuple[Point, int]], out: TextIO, watch: Watch) -> bool:
        """All runs in shared batches; False if Ctrl-C ended it."""
        first = self._simulation(*group[0])
        try:
            trainer = Trainer(
                first.task,
                first.executor.module,
                batch_size=first.executor.recipe.batch_size,
                width=self.means.width,
                memory=self.means.memory,
                precision=self.means.precision,
            )
        except CannotStack as reason:
            self.notes.append(f"the model is trained one client at a time: {reason}")
            return self._each(group, out, watch)
        begun: dict[Lane, tuple[Point, int, Simulation, float]] = {}

        def lanes() -> Iterator[Lane]:
            for number, (point, seed) in enumerate(group):
                run = self._simulation(point, seed) if number else first
                lane = run.lane()
                begun[lane] = point, seed, run, time.perf_counter()
                yield lane

        def finish(lane: Lane) -> None:
            point, seed, run, began = begun.pop(lane)
            self._finish(point, seed, run, time.perf_counter() - began)

        try:
            for lane, evaluation in drive_batched(lanes(), trainer):
                point, seed, *_ = begun[lane]
                self._write(out, point, seed, evaluation)
                watch(point, seed, evaluation)
                for done in [other for other in begun if not other.running]:
                    finish(done)
        except KeyboardInterrupt:
            for lane in begun:
                if lane.running:
                    lane.progress.status = Status.INTERRUPTED
        interrupted = any(lane.progress.status is Status.INTERRUPTED for lane in begun)
        for left in list(begun):
            finish(left)
        return not interrupted

    def _simulation(self, point: Point, seed: int) -> Simulation:
        return Simulation(point.settings, seed, self.task(point, seed))

    def _write(self, out: TextIO, point: Point, seed: int, evaluation: Evaluation) -> None:
        line = {"algorithm": point.settings.algorithm, **dict(point.swept), "seed": seed, **asdict(evaluation)}
        out.write(json.dumps(finite(line), allow_nan=False) + "\n")
        out.flush()

    def _finish(self, point: Point, seed: int, run: Simulation, wall: float) -> None:
        plan = run.plan
        plan.save(self.folder / "plans" / (file_name(point.label, seed) + ".jsonl.gz"))
        self.curves.append(_curve(point, run.progress.evaluations))
        self.entries.append(finite(_entry(point, seed, run, plan, wall)))
        # Runs in shared batches end in any order; they are listed in that of the study.
        place = {point.label: number for number, point in enumerate(self.points)}
        self.entries.sort(key=lambda entry: (place[entry["label"]], self.study.seeds.index(entry["seed"])))
        self.curves.sort(key=lambda curve: place[curve.label])
        self._save_summary(finished=False)

    def _one(self, point: Point, seed: int, out: TextIO, watch: Watch) -> Status:
        began = time.perf_counter()
        run = self._simulation(point, seed)
        try:
            for evaluation in run:
                self._write(out, point, seed, evaluation)
                watch(point, seed, evaluation)
        except KeyboardInterrupt:
            run.progress.status = Status.INTERRUPTED
        self._finish(point, seed, run, time.perf_counter() - began)
        return run.progress.status

    def draw(self) -> None:
        """Draw what was measured: accuracy and loss over simulated seconds and over rounds, and the split."""
        plots = self.folder / "plots"
        if not self.curves:
            return
        panels = {self.study.name: self.curves}
        targets = {entry["target_accuracy"] for entry in self.entries}
        target = targets.pop() if len(targets) == 1 else None
        for against in ("seconds", "rounds"):
            save(accuracy_curves(panels, target=target, against=against), plots / f"accuracy-over-{against}")
            save(loss_curves(panels, against=against), plots / f"loss-over-{against}")
        task = next(iter(self._tasks.values()))
        if task.classes is not None:
            counts = class_counts(task.clients, task.train.targets.cpu().numpy(), task.classes)
            save(split_map(counts, f"{task.name}, seed {self.study.seeds[0]}"), plots / "split")

    def _save_summary(self, *, finished: bool) -> None:
        whole = {"name": self.study.name, "version": __version__, "finished": finished, "runs": self.entries}
        text = json.dumps(whole, indent=1, allow_nan=False) + "\n"
        write_whole(self.folder / "summary.json", text.encode())


def _curve(point: Point, found: Sequence[Evaluation]) -> Curve:
    known = [e for e in found if math.isfinite(e.loss)]
    return Curve(
        algorithm=point.settings.algorithm,
        label=point.label,
        seconds=tuple(e.seconds for e in known),
        rounds=tuple(e.round for e in known),
        accuracy=tuple(math.nan if e.accuracy is None else e.accuracy for e in known),
        loss=tuple(e.loss for e in known),
    )


def _entry(point: Point, seed: int, run: Simulation, plan: Plan, wall: float) -> dict[str, Any]:
    progress = run.progress
    stats = summarise(plan, run.timeline.fleet)
    return {
        "algorithm": point.settings.algorithm,
        "label": point.label,
        "swept": dict(point.swept),
        "seed": seed,
        "status": str(progress.status),
        "target_accuracy": make_goal(point.settings).target_accuracy,
        "first_hit_seconds": progress.first_hit_seconds,
        "rounds": progress.rounds,
        "seconds": progress.seconds,
        "best_accuracy": progress.best_accuracy,
        "final_accuracy": progress.final_accuracy,
        "diverged_at": progress.diverged_at,
        "updates_trained": run.executor.updates_trained,
        "updates_started": stats.jobs_started,
        "staleness_mean": stats.staleness_mean,
        "participation": list(stats.participation),
        "plan_sha256": plan.hash(),
        "wall_seconds": wall,
        "torch_threads": torch.get_num_threads(),
    }
