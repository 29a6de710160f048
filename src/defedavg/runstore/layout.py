"""The files of a run folder. No other module knows their names.

    runs/NAME/
      config.toml        the study, every key written out
      metrics.jsonl      one line per evaluation, appended when it is made
      metrics.parquet    the same as a table, written at the end if pyarrow is installed
      summary.json       one entry per algorithm × swept point × seed, rewritten after every run
      points.jsonl       of a search for learning rates: every pair of rates and seed
      tuned.toml         of a search for learning rates: the study with the rates found
      tuned/*.toml       the same for every task, fleet and target, if the search sweeps them
      clients/*.jsonl    per run, one line per client: what it did and what the last version is worth on its data
      clients.parquet    the same of all runs as a table, written at the end if pyarrow is installed
      plans/*.jsonl.gz   one plan per run
      weights/*          the last version of every run
      checkpoints/*      while runs are in progress: the state to resume from
      split.json         samples of every client by class, of the first setting and seed
      plots/*            figures as PNG and PDF, on request
      report.html        the report page
      tensorboard/       logs for TensorBoard, on request
      .previous/         after ``--force``, until the new run has results: the run that it replaces

A deployment adds its event log, the state of its server, and what its processes printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from ..fileio import LOCK_FILES, file_name

MARKERS = ("config.toml", "summary.json")
"""A folder with one of them is a run folder, perhaps a damaged one."""

PREVIOUS, PREVIOUS_MOVING, PREVIOUS_REMOVING = ".previous", ".previous.part", ".previous.old"
"""The folders of a run that is being replaced; see ``replacement``."""

OWNED = (
    *MARKERS,
    "metrics.jsonl",
    "metrics.parquet",
    "points.jsonl",
    "tuned.toml",
    "tuned",
    "clients",
    "clients.parquet",
    "plans",
    "weights",
    "checkpoints",
    "split.json",
    "plots",
    "report.html",
    "tensorboard",
    *(PREVIOUS, PREVIOUS_MOVING, PREVIOUS_REMOVING),
    *(
        "events.jsonl",
        "state",
        "server.log",
        "failed-server.log",
        "error.txt",
        "app",
        "app.txt",
        "flower",
        "clients.log",
    ),  # of a deployment
)
"""All that a run writes: removing a run removes these and nothing else."""

EVENT_LOG = "events.jsonl"
"""The event log of a deployment."""

SEARCH_DEPTH = 4
"""Folders of runs may be nested this deep."""


class RunFiles:
    """The paths in one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.toml"
        self.summary = folder / "summary.json"
        self.metrics = folder / "metrics.jsonl"
        self.parquet = folder / "metrics.parquet"
        self.clients_parquet = folder / "clients.parquet"
        self.rate_points = folder / "points.jsonl"
        self.partition = folder / "split.json"
        self.plots = folder / "plots"
        self.page = folder / "report.html"
        self.checkpoints = folder / "checkpoints"
        self.tensorboard = folder / "tensorboard"
        self.event_log = folder / EVENT_LOG
        self.server_state = folder / "state"
        self.server_log = folder / "server.log"
        self.failed_log = folder / "failed-server.log"  # of a server that did not start: the old run was restored
        self.error = folder / "error.txt"
        self.app = folder / "app"  # generated
        self.app_path = folder / "app.txt"  # where the user's own app is
        self.flower = folder / "flower"
        self.client_log = folder / "clients.log"  # of clients over gRPC on this machine

    def plan(self, label: str, seed: int) -> Path:
        """Return the path of a run's plan."""
        return self.folder / "plans" / f"{file_name(label, seed)}.jsonl.gz"

    def clients(self, label: str, seed: int) -> Path:
        """Return the path of the rows of a run's clients."""
        return self.folder / "clients" / f"{file_name(label, seed)}.jsonl"

    def weights(self, label: str, seed: int) -> Path:
        """Return the path of a run's last version."""
        return self.folder / "weights" / f"{file_name(label, seed)}.safetensors"

    def tuned_study(self, label: str) -> Path:
        """Return the path of the study with the rates found, or of one of several by the label of its task."""
        return self.folder / "tuned" / f"{label}.toml" if label else self.folder / "tuned.toml"

    def foreign(self) -> list[str]:
        """Return the names of what no run writes, sorted."""
        names = sorted(path.name for path in self.folder.iterdir())
        return [name for name in names if name.removesuffix(".part") not in OWNED and name not in LOCK_FILES]

    def refuse_links(self) -> None:
        """Raise ``UserError`` if a file of the run is a link, a pipe or a device: writing would change other files."""
        for path in (self.folder / name for name in OWNED):
            for each in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
                if each.is_symlink() or (each.exists() and not each.is_file() and not each.is_dir()):
                    raise UserError(f"{each} is a link or a special file; replace it by the file, or use --force")

    def has_results(self) -> bool:
        """Return whether there is a file that a run writes after its configuration."""
        paths = [self.folder / name for name in OWNED if name != self.config.name]
        return any(each.is_file() for path in paths for each in (path, *path.rglob("*")))

    def is_empty(self) -> bool:
        """Return whether the folder holds nothing except locks."""
        return all(path.name in LOCK_FILES for path in self.folder.iterdir())


def is_being_replaced(folder: Path) -> bool:
    """Return whether an old run is kept aside in a folder, by a process that runs or that was killed."""
    return any((folder / name).is_dir() and not (folder / name).is_symlink() for name in (PREVIOUS, PREVIOUS_MOVING))


def is_run(folder: Path) -> bool:
    """Return whether this is a run folder, perhaps a damaged one."""
    try:
        return not folder.is_symlink() and (
            any((folder / name).is_file() for name in MARKERS) or is_being_replaced(folder)
        )
    except OSError:
        return False


def find_run_folders(root: Path, depth: int = SEARCH_DEPTH) -> Iterator[Path]:
    """Yield the run folders at and below a folder, sorted by name; links are not followed."""
    if is_run(root):
        yield root
        return
    try:
        inside = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink()) if depth else []
    except OSError:
        return  # a folder without read permission
    for path in inside:
        yield from find_run_folders(path, depth - 1)
