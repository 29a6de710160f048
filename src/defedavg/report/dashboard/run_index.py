"""The runs of the live view: every run below a folder, read again when its files change."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import psutil

from ...errors import UserError, printable
from ...runstore.deployment_status import DeploymentMonitor
from ...runstore.layout import RunFiles, find_run_folders
from ...runstore.metrics import common_metric
from ...runstore.reader import RunFolder, read_run
from ..page import build
from ..payload import live
from ..seed_figures import Record, accuracy_text, mean
from ..tables import grouped

MAX_CACHED_REPORTS = 8

Revision = tuple[tuple[int, int], ...]  # size and modification time of every watched file


@dataclass(frozen=True, slots=True)
class IndexedRun:
    """A run as it was when its files had this revision."""

    revision: Revision
    folder: RunFolder


class RunIndex:
    """The runs below a folder, by their path below it. Only runs that were found are ever opened."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f"there is no folder {root}; name the folder that holds runs, as in `defedavg view runs`")
        self.root = root
        self._runs: dict[str, IndexedRun] = {}
        self._reports: dict[str, tuple[Revision, str]] = {}
        self._monitors: dict[str, DeploymentMonitor] = {}  # of deployments
        self._lock = Lock()

    def list(self) -> list[dict[str, Any]]:
        """Return a summary of every run, the newest first."""
        with self._lock:
            self._refresh()
            summaries = [_summary(name, run) for name, run in self._runs.items()]
        return sorted(summaries, key=lambda summary: -summary["changed"])

    def file_notes(self) -> dict[str, tuple[str, ...]]:
        """Return what a user should know about the files of runs, by run."""
        with self._lock:
            self._refresh()
            return {name: run.folder.file_notes for name, run in self._runs.items()}

    def curves(self, name: str) -> dict[str, Any] | None:
        """Return the evaluations of a run, or None if there is no such run."""
        run = self._find(name)
        if run is None:
            return None
        found: dict[str, Any] = {"revision": _text(run.revision), "series": live(run.folder), "deployment": None}
        if RunFiles(run.folder.path).event_log.exists():
            with self._lock:
                monitor = self._monitors.setdefault(name, DeploymentMonitor(run.folder.path))
                found["deployment"] = monitor.refresh().as_dict()
        return found

    def page(self, name: str) -> str | None:
        """Return the report of a run, or None if there is no such run."""
        run = self._find(name)
        if run is None:
            return None
        cached = self._reports.get(name)
        if cached is None or cached[0] != run.revision:
            cached = run.revision, build([run.folder.path])
            with self._lock:
                while len(self._reports) >= MAX_CACHED_REPORTS:
                    self._reports.pop(next(iter(self._reports)))
                self._reports[name] = cached
        return cached[1]

    def _find(self, name: str) -> IndexedRun | None:
        with self._lock:
            self._refresh()
            return self._runs.get(name)

    def _refresh(self) -> None:
        paths = {printable(path.relative_to(self.root).as_posix()): path for path in find_run_folders(self.root)}
        for name in set(self._runs) - set(paths):
            del self._runs[name]
            self._reports.pop(name, None)
            self._monitors.pop(name, None)
        for name, path in paths.items():
            revision = _revision(path)
            if name not in self._runs or self._runs[name].revision != revision:
                self._runs[name] = IndexedRun(revision, read_run(path))


def _revision(path: Path) -> Revision:
    """Return a value that changes whenever a file of the run does."""
    states = []
    files = RunFiles(path)
    for watched in (files.summary, files.metrics, files.rate_points, files.config, files.event_log):
        try:
            state = watched.stat()
            states.append((state.st_size, state.st_mtime_ns))
        except OSError:
            states.append((0, 0))
    return tuple(states)


def _text(revision: Revision) -> str:
    return "-".join(f"{size:x}.{modified:x}" for size, modified in revision)


def _summary(name: str, run: IndexedRun) -> dict[str, Any]:
    folder = run.folder
    study = folder.study
    expected = len(study.points()) * len(study.seeds) if study is not None and not folder.tuned else 0
    algorithms = list(dict.fromkeys(entry.algorithm for entry in folder.runs))
    metric = common_metric(entry.metric for entry in folder.runs)
    return {
        "id": name,
        "name": folder.title,
        "status": status(folder),
        "searched": folder.tuned,
        "algorithms": algorithms or ([] if study is None else list(study.algorithms)),
        "done": sum(entry.status != "running" for entry in folder.runs),
        "expected": max(expected, len(folder.runs)),
        "metric": metric,
        "best_accuracy": accuracy_text(_best_setting(folder), metric=metric),
        "changed": max(modified for _, modified in run.revision) / 1e9,
        "started": folder.provenance.get("started", ""),
        "command": folder.provenance.get("command", ""),
        "config": folder.text,
        "notes": list(folder.notes),
        "revision": _text(run.revision),
    }


def _best_setting(folder: RunFolder) -> list[Record]:
    """Return the seeds of the setting with the highest mean of the best metric."""
    settings = grouped(folder.runs, lambda run: run.label).values()
    seeds = [[run.numbers for run in runs] for runs in settings]

    def best(numbers: list[Record]) -> float:
        value = mean(numbers, "best_accuracy")
        return -math.inf if value is None else value

    return max(seeds, key=best, default=[])


def status(folder: RunFolder) -> str:
    """Return finished, running, interrupted (by Ctrl-C) or aborted (the process no longer exists)."""
    if folder.finished:
        return "finished"
    if any(run.status == "interrupted" for run in folder.runs):
        return "interrupted"
    return "running" if _process_exists(folder.provenance) else "aborted"


def _process_exists(provenance: Mapping[str, str]) -> bool:
    """Return whether the process that writes a run exists; assume so if it runs on another machine."""
    pid = provenance.get("pid", "")
    if provenance.get("host") != socket.gethostname() or not pid.isdigit():
        return True
    try:
        return bool(psutil.pid_exists(int(pid)))
    except OverflowError:
        return True
