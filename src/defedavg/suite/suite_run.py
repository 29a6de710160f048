"""Computes cells in two studies per batch: one tries the rates, the other runs the reported seeds.

Both are ordinary studies with checkpoints, in a work folder, so an interrupted session continues where it stopped. A
cell's file is written when its last seed ends. The work folder of a batch is removed when all its cells are stored.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..algorithms import BUILT_IN
from ..config.study import Study
from ..errors import UserError, counted, first_line
from ..experiments.compute import ComputeConfig
from ..experiments.run_events import Event, Watch
from ..experiments.study_run import StudyRun
from ..experiments.tune import PairOutcome, score
from ..fileio import InUseError, read_regular, write_whole, writing
from ..runstore.provenance import processor_name, provenance
from ..runstore.replacement import remove
from ..tasks.datasets.builtin_datasets import find
from ..training import Status
from .benchmark import (
    FLEETS,
    SEEDS,
    TASKS,
    TUNING_SEED,
    TUNING_SHARE,
    SuiteCell,
    batches,
    reported_study,
    tuning_runs,
    tuning_study,
)
from .cell_files import RATES, CellFiles

MANIFEST: Final = "cells.json"
PRIVATE: Final = ("folder", "host", "pid", "executor")
"""Entries of a run's provenance that a published result does not need."""

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchStudy:
    """A study of a batch: its folder, title, number of runs, and their limits as a share of those of a reported run.

    Batches of other algorithms may have the same title; no two studies have the same folder.
    """

    folder: Path
    title: str
    runs: int
    length: float


Watching = Callable[[BatchStudy, int], AbstractContextManager[Watch]]
"""Takes a study and the number of runs that are left; returns a context that yields the callback for their events."""


@dataclass(frozen=True)
class SuiteRequest:
    """The cells of one command, where their results go, and what computes them.

    ``notify`` receives lines for the user; ``plugins`` are the paths of plugin files, as the user gave them.
    """

    cells: tuple[SuiteCell, ...]
    files: CellFiles
    work: Path
    compute: ComputeConfig
    notify: Callable[[str], None]
    watching: Watching
    plugins: tuple[Path, ...] = ()
    checkpoint_interval: float | None = None
    paths: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(str(path.resolve()) for path in self.plugins))

    def missing(self) -> list[SuiteCell]:
        """Return the cells without a result whose data set is on this machine; tell the user about the others."""
        missing = [cell for cell in self.cells if not self.files.has(cell)]
        absent = missing_data(missing)
        for name, problem in absent.items():
            number = sum(cell.task.data == name for cell in missing)
            self.notify(f"left out {counted(number, 'cell')}: {problem}")
        return [cell for cell in missing if cell.task.data not in absent]

    def batches(self) -> list[SuiteBatch]:
        """Return the missing cells in batches: first those that an earlier session began, as it composed them."""
        missing = dict.fromkeys(self.missing())
        begun = []
        for cells in _begun(self.work):
            batch = SuiteBatch(self, cells)
            if batch.folder.exists() and set(cells) <= set(self.cells) and any(cell in missing for cell in cells):
                begun.append(batch)
                missing = dict.fromkeys(cell for cell in missing if cell not in cells)
        return [*begun, *(SuiteBatch(self, cells) for cells in batches(list(missing)))]

    def run(self, batches: Sequence[SuiteBatch]) -> bool:
        """Compute the cells of batches; return False if Ctrl-C stopped it.

        Several processes can share the folders: a batch that another one computes, or has computed, is left to it.
        """
        for batch in batches:
            if all(map(self.files.has, batch.cells)):
                continue
            try:
                if not batch.run():
                    return False
            except InUseError:
                self.notify(f"{batch.label}: another process computes this; left to it")
        return True


def missing_data(cells: Iterable[SuiteCell]) -> dict[str, str]:
    """Return the data sets of cells that this machine does not have, each with the line that says how to get it."""
    absent = {}
    for name in dict.fromkeys(cell.task.data for cell in cells):
        try:
            find(name)
        except UserError as error:
            absent[name] = first_line(error)
    return absent


def _begun(work: Path) -> list[tuple[SuiteCell, ...]]:
    """Return the cells of the batches in a work folder; what cannot be read is ignored."""
    found = []
    for path in sorted(work.glob(f"*/{MANIFEST}")):
        try:
            cells = tuple(
                SuiteCell(TASKS[str(task)], FLEETS[str(fleet)], str(name))
                for task, fleet, name in json.loads(read_regular(path))
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if cells:
            found.append(cells)
    return found


class SuiteBatch:
    """Cells that share task, fleet and limits, and the folder of their two studies."""

    def __init__(self, request: SuiteRequest, cells: tuple[SuiteCell, ...]) -> None:
        self.cells = cells
        self._request = request
        compute = request.compute
        parts = [request.files.identity(cell) for cell in cells]
        text = json.dumps([parts, compute.executor, compute.device, compute.precision], sort_keys=True)
        first = cells[0]
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.folder = request.work / f"{first.task.name}-{first.fleet.name}-{digest}"

    @property
    def label(self) -> str:
        """The batch in one line."""
        first = self.cells[0]
        names = self.cells[0].algorithm if len(self.cells) == 1 else f"{len(self.cells)} algorithms"
        return f"{first.task.name}, {first.fleet.name}: {names}"

    def studies(self) -> tuple[BatchStudy, BatchStudy]:
        """Return the study that tries the rates, and that of the reported seeds."""
        tried = sum(tuning_runs(cell.task, cell.algorithm) for cell in self.cells)
        return (
            BatchStudy(self.folder / "tuning", f"{self.label}, rates", tried, TUNING_SHARE),
            BatchStudy(self.folder / "reported", f"{self.label}, seeds", len(SEEDS) * len(self.cells), 1.0),
        )

    def run(self) -> bool:
        """Tune the rates, compute the reported seeds and store the cells; return False if Ctrl-C stopped it."""
        names = [[cell.task.name, cell.fleet.name, cell.algorithm] for cell in self.cells]
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / MANIFEST, (json.dumps(names) + "\n").encode())
        rates_study, seeds_study = self.studies()
        tuning = self._study(tuning_study(self.cells, self._request.paths), rates_study)
        if not self._computed(tuning, rates_study, lambda: None):
            return False
        points = {cell.algorithm: _points(tuning.entries, cell.algorithm) for cell in self.cells}
        rates = {name: best_rates(found) for name, found in points.items()}
        reported = self._study(reported_study(self.cells, rates, self._request.paths), seeds_study)
        origin = self._provenance()
        stored: set[str] = set()

        def store() -> None:
            for cell in self.cells:
                name = cell.algorithm
                entries = [entry for entry in reported.entries if entry["algorithm"] == name]
                if name not in stored and len(entries) == len(SEEDS):
                    result = self._result(cell, rates[name], points[name], entries, origin)
                    self._request.files.save(cell, result)
                    stored.add(name)

        if not self._computed(reported, seeds_study, store):
            return False
        with writing(self.folder):
            remove(self.folder)
        return True

    def _study(self, study: Study, part: BatchStudy) -> StudyRun:
        request = self._request
        return StudyRun(
            study,
            part.folder,
            compute=request.compute,
            resume=True,
            checkpoint_interval=request.checkpoint_interval,
            notify=request.notify,
        )

    def _computed(self, run: StudyRun, study: BatchStudy, store: Callable[[], None]) -> bool:
        """Compute a study, and return False after Ctrl-C; ``store`` is called after every run, and at the end."""
        for line in run.notes:
            if "no checkpoint" not in line:
                self._request.notify(line)
        run.notes.clear()
        known = len(run.entries)
        with self._request.watching(study, study.runs - known) as watch:

            def follow(event: Event) -> None:
                nonlocal known
                watch(event)
                if len(run.entries) > known:
                    known = len(run.entries)
                    store()

            finished = run.run(follow)
        if finished:
            store()
        return finished and not run.stop_requested

    def _provenance(self) -> dict[str, Any]:
        compute = self._request.compute
        origin = provenance(device=compute.device, precision=compute.precision)
        return {name: value for name, value in origin.items() if name not in PRIVATE} | {"processor": processor_name()}

    def _result(
        self,
        cell: SuiteCell,
        rates: Mapping[str, float],
        points: Sequence[Entry],
        entries: Sequence[Entry],
        origin: Mapping[str, Any],
    ) -> dict[str, Any]:
        tuning = {
            "seed": TUNING_SEED,
            "max_seconds": cell.seconds * TUNING_SHARE,
            "points": [{**_rates(entry), **_run(entry)} for entry in points],
        }
        plugins = [] if cell.algorithm in BUILT_IN else [_published(path) for path in self._request.plugins]
        return {
            "target": cell.target,
            "max_seconds": cell.seconds,
            "max_updates": cell.task.updates,
            "command": command_of(cell, plugins),
            "rates": dict(rates),
            "runs": [_run(entry) for entry in entries],
            "tuning": tuning,
            "provenance": dict(origin),
        }


def _published(path: Path) -> str:
    """Return a path from the current folder; of a file elsewhere its name, so that no private path is published."""
    whole, here = path.resolve(), Path.cwd().resolve()
    return whole.relative_to(here).as_posix() if whole.is_relative_to(here) else path.name


def command_of(cell: SuiteCell, plugins: Sequence[str] = ()) -> str:
    """Return the command that computes a cell again and compares it with the stored one."""
    words = ["--task", cell.task.name, "--fleet", cell.fleet.name, "--algorithm", cell.algorithm]
    return shlex.join(["defedavg", "suite", "check", *words, *(w for name in plugins for w in ("--plugin", name))])


def _points(entries: Sequence[Entry], name: str) -> list[Entry]:
    return [entry for entry in entries if entry["algorithm"] == name]


def _rates(entry: Entry) -> dict[str, float]:
    """Return the rates of a run of the tuning study."""
    swept = {key.partition(".")[2]: value for key, value in entry["swept"].items()}
    return {name: swept[name] for name in RATES if name in swept}


def best_rates(points: Sequence[Entry]) -> dict[str, float]:
    """Return the rates that held the target soonest, or else had the highest accuracy; the first of equals."""
    return _rates(min(points, key=lambda entry: score([outcome(entry)])))


def outcome(entry: Entry) -> PairOutcome:
    """Return what the choice of rates depends on."""
    return PairOutcome(
        status=entry["status"],
        hit_seconds=held_seconds(entry),
        best_accuracy=entry["best_accuracy"],
        diverged_at=entry["diverged_at"],
    )


def held_seconds(entry: Entry) -> float | None:
    """Return when a run reached the target that it then held to its end; None if it did not."""
    seconds: float | None = entry["sustained_seconds"]
    return seconds if entry["status"] == Status.TARGET else None


def _run(entry: Entry) -> dict[str, Any]:
    """Return what is stored of a run."""
    return {
        "seed": entry["seed"],
        "status": entry["status"],
        "seconds_to_target": held_seconds(entry),
        "rounds": entry["rounds"],
        "seconds": entry["seconds"],
        "best_accuracy": entry["best_accuracy"],
        "final_accuracy": entry["final_accuracy"],
        "worst_decile_accuracy": entry.get("client_accuracy_worst_decile"),
        "mean_client_accuracy": entry.get("client_accuracy_mean"),
        "staleness_mean": entry["staleness_mean"],
        "uplink_bytes": entry["uplink_bytes"],
        "downlink_bytes": entry["downlink_bytes"],
        "updates_trained": entry["updates_trained"],
        "diverged_at": entry["diverged_at"],
        "plan_sha256": entry["plan_sha256"],
    }
