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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from . import __version__
from .config import Point, Study
from .errors import UserError
from .execute import Evaluation, Progress
from .files import write_whole, writing
from .plan import Plan
from .profiles import Fleet
from .report.jsons import finite
from .report.plots import Curve, accuracy_curves, loss_curves, save, split_map
from .simulation import Simulation, make_goal, make_timeline
from .stats import summarise
from .sweep import Event, Finished, Item, Means, Sweep, Watch
from .tasks import class_counts

OURS = ("config.toml", "metrics.jsonl", "summary.json", "plans", "plots", "points.jsonl")


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


def file_name(label: str, seed: int) -> str:
    """A file name for a run."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", f"{label} seed={seed}")


class Run:
    """A study being carried out in its folder."""

    def __init__(self, study: Study, folder: Path, *, force: bool = False, means: Means | None = None) -> None:
        self.study = study
        self.folder = folder
        self.sweep = Sweep(means or Means())
        self.points = study.points()
        self.entries: list[dict[str, Any]] = []
        self.curves: list[Curve] = []
        self._check()
        open_folder(folder, force)
        with writing(folder):
            for name in ("plans", "plots"):
                (folder / name).mkdir(exist_ok=True)
        write_whole(folder / "config.toml", study.to_toml().encode())
        self._save_summary(finished=False)

    def _check(self) -> None:
        """Find what cannot work before anything is written."""
        for point in self.points:
            for seed in self.study.seeds:
                make_timeline(point.settings, seed)
                self.sweep.task(point.settings, seed)

    def carry_out(self, watch: Watch) -> bool:
        """Run everything; False if Ctrl-C ended it, with all that was measured kept."""
        metrics = self.folder / "metrics.jsonl"
        items = [Item(point, point.settings, seed) for point in self.points for seed in self.study.seeds]
        with writing(metrics), metrics.open("a", encoding="utf-8") as out:
            try:
                for event in self.sweep.events(items):
                    self._take(event, out)
                    watch(event)
            except KeyboardInterrupt:
                for event in self.sweep.interrupt():
                    self._take(event, out)
                return False
        self._save_summary(finished=True)
        return True

    def _take(self, event: Event, out: TextIO) -> None:
        point, seed = event.item.name, event.item.seed
        assert isinstance(point, Point)
        if isinstance(event, Finished):
            self._finish(point, seed, event.run, event.wall_seconds)
        else:
            self._write(out, point, seed, event.evaluation)

    def _write(self, out: TextIO, point: Point, seed: int, evaluation: Evaluation) -> None:
        line = {"algorithm": point.settings.algorithm, **dict(point.swept), "seed": seed, **asdict(evaluation)}
        out.write(json.dumps(finite(line), allow_nan=False) + "\n")
        out.flush()

    def _finish(self, point: Point, seed: int, run: Simulation, wall: float) -> None:
        plan = run.plan
        plan.save(self.folder / "plans" / (file_name(point.label, seed) + ".jsonl.gz"))
        self.curves.append(curve_of(point, run.progress.evaluations))
        found = entry_of(
            point, seed, run.progress, plan, run.timeline.fleet, trained=run.executor.updates_trained, wall=wall
        )
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
        task = self.sweep.task(self.points[0].settings, self.study.seeds[0])
        if task.classes is not None:
            counts = class_counts(task.clients, task.train.targets.cpu().numpy(), task.classes)
            save(split_map(counts, f"{task.name}, seed {self.study.seeds[0]}"), plots / "split")

    def _save_summary(self, *, finished: bool) -> None:
        whole = {"name": self.study.name, "version": __version__, "finished": finished, "runs": self.entries}
        text = json.dumps(whole, indent=1, allow_nan=False) + "\n"
        write_whole(self.folder / "summary.json", text.encode())


def draw_curves(plots: Path, title: str, curves: Sequence[Curve], target: float | None) -> None:
    """Accuracy and loss, over seconds and over rounds."""
    for against in ("seconds", "rounds"):
        save(accuracy_curves({title: curves}, target=target, against=against), plots / f"accuracy-over-{against}")
        save(loss_curves({title: curves}, against=against), plots / f"loss-over-{against}")


def curve_of(point: Point, found: Sequence[Evaluation]) -> Curve:
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


def entry_of(
    point: Point, seed: int, progress: Progress, plan: Plan, fleet: Fleet, *, trained: int, wall: float
) -> dict[str, Any]:
    """What the summary says of a run."""
    stats = summarise(plan, fleet)
    return {
        "algorithm": point.settings.algorithm,
        "label": point.label,
        "swept": dict(point.swept),
        "seed": seed,
        "status": str(progress.status),
        "target_accuracy": make_goal(point.settings).target_accuracy,
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
        "plan_sha256": plan.hash(),
        "wall_seconds": wall,
        "torch_threads": torch.get_num_threads(),
    }
