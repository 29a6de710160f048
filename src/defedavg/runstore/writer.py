"""Writes the files of a run folder; each is complete or absent. The caller holds the lock of the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import UserError
from ..fileio import LOCK_FILES, FolderLock, InUseError, write_whole, writing
from ..jsonio import finite, json_line
from .layout import MARKERS, OWNED, RunFiles
from .reader import PartitionCounts
from .replacement import remove


def check_folder(folder: Path, *, force: bool, resumable: bool = False) -> None:
    """Create a run folder; refuse one that is not empty, or with ``force`` one that holds something else than a run.

    If the folder is ``resumable``, the message says how to continue its run.
    """
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} exists and is not a folder; choose another --out or name")
        folder.mkdir(parents=True, exist_ok=True)
        files = RunFiles(folder)
        if files.is_empty():
            return
        if not force:
            if resumable:
                what = "continue it with --resume, replace it with --force, or use another name"
                raise UserError(f"{folder} holds an unfinished run; {what}")
            raise UserError(f"{folder} already exists; use --force to replace it, or another name")
        if not all((folder / name).exists() for name in MARKERS):
            raise UserError(f"{folder} holds something other than a run and is not replaced; choose another name")


def remove_runs(folders: Sequence[Path]) -> list[list[str]]:
    """Remove what runs wrote, and their folders if nothing else is in them; return the names of what remains.

    If a process writes to one of the runs, raise ``InUseError`` and remove none.
    """
    with ExitStack() as locks:
        for folder in folders:
            try:
                locks.enter_context(FolderLock(folder))
            except InUseError:
                raise InUseError(f"{folder} is in use by another process; stop it before you remove the run") from None
        return [_remove(folder) for folder in folders]


def _remove(folder: Path) -> list[str]:
    with writing(folder):
        for name in OWNED:
            remove(folder / name)
            remove(folder / f"{name}.part")  # of a killed process
        foreign = RunFiles(folder).foreign()
        if not foreign:
            for name in LOCK_FILES:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
    return foreign


def begin_run(files: RunFiles, config: str) -> None:
    """Write the configuration and create the folders for plans and weights."""
    try:
        data = config.encode()
    except UnicodeEncodeError:
        raise UserError("a path in the study is not valid UTF-8; rename the folder or the file") from None
    with writing(files.folder):
        for name in ("plans", "weights"):
            (files.folder / name).mkdir(parents=True, exist_ok=True)
    write_whole(files.config, data)


def write_summary(
    files: RunFiles, name: str, origin: Mapping[str, Any], results: Mapping[str, Any], *, finished: bool
) -> None:
    """Write summary.json: ``results`` are the ``runs`` of a study, or what a search for rates found and its options."""
    head = {"name": name, "version": __version__, "finished": finished, "provenance": dict(origin)}
    text = json.dumps({**head, **finite(results)}, indent=1, allow_nan=False) + "\n"
    write_whole(files.summary, text.encode())


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines."""
    write_whole(path, "".join(json_line(record) + "\n" for record in records).encode())


def append_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append to a file of JSON lines."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json_line(record) + "\n" for record in records)


def write_client_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write what the clients of a run did and get."""
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    write_lines(path, rows)


def write_tuned_study(path: Path, text: str) -> None:
    """Write a study with the rates that a search found."""
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    write_whole(path, text.encode())


def write_partition(files: RunFiles, counts: PartitionCounts) -> None:
    """Write how many samples of every class each client holds."""
    write_lines(files.partition, [{"title": counts.title, "counts": counts.counts}])
