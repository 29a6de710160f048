"""Results in a folder: one file per run, and a log with one line per session that computed runs.

A run whose result is in the folder is not computed again, so a table or a figure can be completed in several sessions.
"""

from __future__ import annotations

import gzip
import json
import math
import platform
import shlex
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..experiments.checkpointing import SUFFIX
from ..experiments.compute import ComputeConfig
from ..experiments.deferred_stop import DeferredStop
from ..experiments.run_events import RunFinished, RunSpec, Watch
from ..experiments.sweep import Sweep
from ..fileio import file_name, read_regular, write_whole, writing
from ..jsonio import finite
from ..runstore.provenance import provenance
from ..training import Status
from .run_checkpoints import FOLDER, RunCheckpoints
from .run_grid import Choices, PaperRun

_LOG = "provenance.jsonl"

Result = Mapping[str, Any]
"""The stored result of a run; see ``make_result``."""


def write_in_new_folder(path: Path, data: bytes) -> None:
    """Write a file atomically; create its folder if needed."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """The results of an experiment in a folder, all made with the same choices.

    Where a folder has results of other readings, too, ``suffix`` distinguishes their names.
    """

    folder: Path
    choices: Choices
    suffix: str = ""

    def path(self, run: PaperRun, seed: int) -> Path:
        """Return the path of a run's result."""
        return self.folder / "runs" / f"{file_name(run.label + self.suffix, seed)}.json.gz"

    def missing(self, runs: Sequence[PaperRun], seeds: Sequence[int]) -> list[tuple[PaperRun, int]]:
        """Return the runs that have no result or had a shorter time limit, ordered by seed."""
        return [(run, seed) for seed in seeds for run in runs if not self._is_complete(run, seed)]

    def _is_complete(self, run: PaperRun, seed: int) -> bool:
        results = self.results([run], [seed])
        if not results:
            return False
        return results[0]["status"] != Status.SECONDS or bool(self.choices.limit(run) <= results[0]["limit"])

    def save(self, result: Result, run: PaperRun) -> None:
        """Write the result of a run."""
        text = json.dumps(result, allow_nan=False, separators=(",", ":")) + "\n"
        write_in_new_folder(self.path(run, result["seed"]), gzip.compress(text.encode(), mtime=0))

    def adopt(self, other: ResultFiles, runs: Sequence[PaperRun], seeds: Sequence[int]) -> None:
        """Copy results of the same runs that another folder has and this one lacks."""
        for run, seed in self.missing(runs, seeds):
            if not self.path(run, seed).exists() or other._is_complete(run, seed):
                for result in other.results([run], [seed]):
                    self.save(result, run)

    def adopt_matching(self, other: ResultFiles, run: PaperRun, seed: int) -> None:
        """Copy the result of a run that another folder has with the same choices, if this folder lacks it."""
        path = other.path(run, seed)
        if not self.path(run, seed).exists() and path.exists():
            result, matches = self._load(path, run)
            if matches:
                self.save(result, run)

    def results(self, runs: Iterable[PaperRun], seeds: Sequence[int]) -> list[Result]:
        """Return the stored results of these runs."""
        return [self._read(path, run) for run in runs for seed in seeds if (path := self.path(run, seed)).exists()]

    def matching(self, runs: Iterable[PaperRun], seeds: Sequence[int]) -> list[Result]:
        """Return the stored results of these runs that were made with these choices."""
        paths = ((run, self.path(run, seed)) for run in runs for seed in seeds)
        loaded = (self._load(path, run) for run, path in paths if path.exists())
        return [result for result, matches in loaded if matches]

    def _read(self, path: Path, run: PaperRun) -> Result:
        result, matches = self._load(path, run)
        if not matches:
            raise UserError(f"{path} was made with other rates or settings; use another --out")
        return result

    def _load(self, path: Path, run: PaperRun) -> tuple[Result, bool]:
        """Return a stored result, and whether it is that of the run with these choices."""
        try:
            result = json.loads(gzip.decompress(read_regular(path)))
            matches = self.choices.match(result["choices"], run.cell) and result["piece"] == finite(asdict(run))
            times = result["first_hit_seconds"], result["sustained_seconds"], result["seconds"]
            valid = all(time is None or isinstance(time, int | float) for time in times) and result["curve"]["rounds"]
        except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
            raise UserError(f"{path} cannot be read; delete it to compute the run again") from None
        return dict(result), bool(matches and valid)


def make_result(event: RunFinished, run: PaperRun, choices: Choices) -> Result:
    """Return what is stored of a finished run: its outcome and its evaluations."""
    progress, evaluations = event.run.progress, event.run.progress.evaluations
    outcome = ("first_hit_seconds", "sustained_seconds", "diverged_at", "rounds", "seconds", "best_accuracy")
    result = {
        "piece": asdict(run),
        "seed": event.spec.seed,
        "choices": choices.stored(),
        "limit": choices.limit(run),
        "status": str(progress.status),
        **{name: getattr(progress, name) for name in outcome},
        "updates_trained": event.run.executor.updates_trained,
        "wall_seconds": round(event.wall_seconds, 1),
        "curve": {
            "seconds": [round(e.seconds, 4) for e in evaluations],
            "rounds": [e.round for e in evaluations],
            "accuracy": [None if e.accuracy is None else round(e.accuracy, 6) for e in evaluations],
            "loss": [_rounded(e.loss) for e in evaluations],
            "train_loss": [_rounded(e.train_loss) for e in evaluations],
        },
    }
    return dict(finite(result))


def _rounded(loss: float | None) -> float | None:
    return round(loss, 5) if loss is not None and math.isfinite(loss) else None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run, and where its result is stored."""

    store: ResultFiles
    run: PaperRun

    @property
    def label(self) -> str:
        """The run in one line."""
        return self.run.label + self.store.suffix


def compute_runs(
    runs: Sequence[tuple[StoredRun, int]], compute: ComputeConfig, watch: Watch,
    notify: Callable[[str], None] = lambda _line: None, began: Callable[[], None] = lambda: None,
    checkpoint_interval: float | None = None,
) -> bool:  # fmt: skip
    """Compute runs of given seeds and store each result as the run ends; return False if Ctrl-C stopped it.

    Runs that had not finished by then are saved when their batch ends, and continue next time; ``checkpoint_interval``
    is that of ``RunCheckpoints``. ``began`` is called, once or more, if a run has been computed or continued.
    """
    checkpoints = RunCheckpoints(compute, _checkpoint_path, checkpoint_interval)
    stop = DeferredStop(notify)

    def checkpoint() -> None:
        checkpoints.save_if_due(sweep, now=stop.requested)
        stop.stop_if_requested()

    sweep = Sweep(compute, checkpoint, on_begin=checkpoints.begin)
    specs = [RunSpec(stored, stored.store.choices.settings(stored.run), seed) for stored, seed in runs]
    resumed = {spec: saved for spec in specs if (saved := checkpoints.load(spec)) is not None}
    for line in dict.fromkeys(checkpoints.notes):
        notify(line)
    if resumed:
        notify(f"runs continued from checkpoints: {len(resumed)}")
    try:
        with stop:
            for event in sweep.events(specs, resumed):
                began()
                if isinstance(event, RunFinished):
                    stored = _stored_run(event.spec.name)
                    stored.store.save(make_result(event, stored.run, stored.store.choices), stored.run)
                    checkpoints.remove(event.spec)
                watch(event)
    except KeyboardInterrupt:
        if sweep.interrupt():  # a run that was continued may not have had an event yet
            began()
        return False
    return True


def _stored_run(name: Hashable) -> StoredRun:
    assert isinstance(name, StoredRun)
    return name


def _checkpoint_path(name: Hashable, seed: int) -> Path:
    stored = _stored_run(name)
    result = stored.store.path(stored.run, seed)
    return stored.store.folder / FOLDER / f"{result.name.removesuffix('.json.gz')}{SUFFIX}"


@contextmanager
def logged_session(folder: Path, compute: ComputeConfig) -> Iterator[Callable[[], None]]:
    """Yield a function to call when a run begins; if it was called, append a line to the log when the block ends.

    The line is written after an exception, too. A block that computes nothing leaves no folder and no line.
    """
    start, source = time.perf_counter(), provenance(device=compute.device, precision=compute.precision)
    begun = False

    def begin() -> None:
        nonlocal begun
        if not begun:
            with writing(folder):  # a folder that cannot be written is an error now, not after hours
                folder.mkdir(parents=True, exist_ok=True)
            begun = True

    try:
        yield begin
    finally:
        if begun:
            _log_session(folder, compute, source, time.perf_counter() - start)


def _log_session(folder: Path, compute: ComputeConfig, source: Mapping[str, Any], real_seconds: float) -> None:
    line = {
        "time": source["started"],
        "command": shlex.split(source["command"]),
        "real_seconds": round(real_seconds, 1),
        "version": source["defedavg"],
        "commit": source.get("commit"),
        "python": source["python"],
        "torch": source["torch"],
        "device": source["device"] if compute.device == "cuda" else platform.machine(),
        "precision": compute.precision,
    }
    path = folder / _LOG
    with writing(path), path.open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


def last_session(folder: Path) -> dict[str, str]:
    """Return the last line of a folder's log with all values as text; an empty dict if no line can be read."""
    try:
        line = json.loads(read_regular(folder / _LOG).splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    if not isinstance(line, dict):
        return {}
    return {name: shlex.join(map(str, v)) if isinstance(v, list) else str(v) for name, v in line.items()}
