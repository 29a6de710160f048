"""The run folder of a deployment: that of a simulation, with the event log and the server's state in addition."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...config.study import SweepPoint
from ...errors import UserError
from ...fileio import START_AGAIN, FolderLock, read_regular, write_whole
from ...planning.plan_stats import summarise
from ...runstore.layout import RunFiles, is_being_replaced
from ...runstore.provenance import provenance
from ...runstore.reader import read_run
from ...runstore.replacement import Replacement
from ...runstore.summary import run_entry
from ...runstore.writer import begin_run, check_folder, write_summary
from ...training import Status
from ..deploy_config import DeployConfig
from ..engine import event_log as logs
from ..replay import replay
from ..run_processes import end_orphans
from .session import LogLine, Session


class StalledError(UserError):
    """A run ended because no client was connected any more."""


def _unfinished(folder: Path) -> bool:
    """Return whether a folder has a run that --resume continues."""
    return RunFiles(folder).event_log.exists() and not read_run(folder).finished


def open_run(config: DeployConfig, folder: Path, *, resume: bool) -> None:
    """Prepare a run folder for the server."""
    files = RunFiles(folder)
    if resume:
        if not files.event_log.exists():
            raise UserError(f"there is no run to resume in {folder}")
        _write_summary(files, config.name, [], finished=False)
    else:
        if files.event_log.exists():
            raise UserError(f"{folder} already contains a run; resume it, or choose another folder")
        _begin(config, files)
    files.error.unlink(missing_ok=True)


@contextmanager
def new_run_folder(config: DeployConfig, folder: Path, *, force: bool, log_line: LogLine = print) -> Iterator[None]:
    """Create a folder that counts as a run even if its server never starts; replace one only with ``force``.

    At the end of the block, remove the run that this one replaces, or restore it if no server has started. The caller
    holds the launch lock of the folder.
    """
    if not force and not is_being_replaced(folder):
        check_folder(folder, force=False, resumable=_unfinished(folder))  # before processes of a run end that stays
    with no_other_processes(folder, log_line):
        recover(folder)
        check_folder(folder, force=force)
        Replacement(folder).set_aside()
    try:
        _begin(config, RunFiles(folder))
        yield
    finally:
        recover(folder)


@contextmanager
def no_other_processes(folder: Path, log_line: LogLine = print) -> Iterator[None]:
    """Lock a folder after the processes have ended that a killed command left there; refuse any other process.

    The caller holds the launch lock of the folder.
    """
    ended = end_orphans(folder)
    if ended:
        log_line(f"ended {ended} processes of a killed command that still used {folder}")
    with FolderLock(folder, launched=True):
        yield


def recover(folder: Path) -> None:
    """Complete the replacement of a run: restore the old one, unless the server of the new one has started.

    What a server printed that did not start is kept in a file of its own.
    """
    if is_being_replaced(folder):
        files = RunFiles(folder)
        begun = files.event_log.exists()
        printed = b"" if begun or not files.server_log.is_file() else read_regular(files.server_log)
        Replacement(folder).recover(begun=begun)
        if printed:
            write_whole(files.failed_log, printed)


def _begin(config: DeployConfig, files: RunFiles) -> None:
    begin_run(files, config.toml)
    _write_summary(files, config.name, [], finished=False)


def _write_summary(files: RunFiles, name: str, entries: Sequence[Any], *, finished: bool) -> None:
    origin = provenance(executor="deployment")
    # Keep when and with which command a user started the run, which is not the command that runs the server.
    with suppress(OSError, ValueError, KeyError, TypeError):
        first = json.loads(files.summary.read_text(encoding="utf-8"))["provenance"]
        origin |= {key: first[key] for key in ("started", "command", "folder")}
    write_summary(files, name, origin, {"runs": entries}, finished=finished)


def finish(session: Session, log_line: LogLine = print) -> None:
    """Check the invariants of a run that has ended, and write its plan, its page and last its summary.

    The summary says that the run is finished when all other files are complete. A stalled run is not finished: it can
    be resumed, and ``StalledError`` says so.
    """
    import torch

    config, files = session.config, session.files
    found = replay(logs.read(files.event_log))
    found.plan.check()
    point = SweepPoint((), config.settings)
    found.plan.save(files.plan(point.label, config.seed))
    entry = run_entry(
        point,
        config.seed,
        session.progress,
        summarise(found.plan, found.fleet),
        found.plan.hash(),
        metric=session.executor.task.metric_name,
        wall_seconds=session.wall_seconds,
        threads=torch.get_num_threads(),
    )
    _write_summary(files, config.name, [entry], finished=False)
    if session.progress.status is Status.STALLED:
        raise StalledError(
            f"the run in {files.folder} is stalled after round {session.progress.rounds}: no client has been connected "
            f"for {config.deploy.wait_seconds:g} s; start the clients, then resume the run"
        )
    no_page = _write_page(files)
    _write_summary(files, config.name, [entry], finished=True)
    if no_page:
        log_line(f"there is no page: {no_page}")
        session.note("no page", why=no_page)  # a command that started this server prints it
    session.note("done", status=str(session.progress.status))
    session.log.write()


def _write_page(files: RunFiles) -> str:
    """Write the page of a run that has ended; if this fails, return why, and how to write it later."""
    from ...report.page import write

    try:
        write([replace(read_run(files.folder), finished=True)], files.page)
    except UserError as error:
        again = f"defedavg report {shlex.quote(str(files.folder))} -o {shlex.quote(str(files.page))}"
        return f"{str(error).removesuffix(START_AGAIN)}; the results are saved, and later `{again}` writes it"
    return ""
