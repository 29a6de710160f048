"""A run folder that is computed in sessions: its lock, checkpoints and journal, and the run that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config.study import Study
from ..errors import UserError
from ..fileio import FolderLock, read_text
from ..jsonio import json_line
from ..runstore.journal import Journal, JournalPosition, read_until
from ..runstore.layout import RunFiles
from ..runstore.replacement import Replacement
from ..runstore.writer import begin_run, check_folder
from .checkpointing import CheckpointDir, CheckpointWriter, SavedSession, check_study
from .deferred_stop import DeferredStop
from .sweep import Sweep


class SessionFolder:
    """The folder of a study or of a search; ``saved`` is the state that an earlier session left.

    With ``resume`` it continues an earlier session, if there is one. ``checkpoint_interval`` is the real time between
    checkpoints in seconds; None: a minute, or more if checkpoints would take more than a twentieth of the time. Ctrl-C
    saves one, too: ``notify`` receives a line while the runs end their batch.
    """

    _lock: FolderLock

    def __init__(
        self,
        study: Study,
        folder: Path,
        sweep: Sweep,
        *,
        force: bool,
        resume: bool,
        checkpoint_interval: float | None,
        notify: Callable[[str], None],
    ) -> None:
        if force and resume:
            raise UserError("--force starts again and --resume continues; give one of them")
        self.files = RunFiles(folder)
        self.saved = SavedSession()
        self.old = Replacement(folder)
        self.stop = DeferredStop(notify)
        self._study, self._sweep = study, sweep
        self._force, self._resumed = force, resume
        self._directory = CheckpointDir(self.files.checkpoints)
        self._checkpoints = CheckpointWriter(self._directory, study, checkpoint_interval)
        self._journal: Journal | None = None

    def open(self, load: Callable[[], None]) -> None:
        """Lock the folder, and create it or ``load`` the earlier session."""
        folder = self.files.folder
        self._lock = FolderLock(folder)
        try:
            if self.old.recover():
                self._sweep.notes.append(f"restored the run in {folder}, which a killed process was about to replace")
            self._resumed = self._resumed and not self.files.is_empty()
            if self._resumed:
                load()
            else:
                check_folder(folder, force=self._force, resumable=bool(self._directory.paths()))
        except BaseException:
            self._lock.release()
            raise

    # Resuming; nothing is written.

    def check_study(self) -> None:
        """Refuse a folder that holds something other than an earlier session of the study."""
        files = self.files
        files.refuse_links()
        if files.foreign() and not files.config.exists():
            raise UserError(f"{files.folder} holds something other than a run and is not resumed; use another name")
        if files.config.exists():
            check_study(files.folder, read_text(files.config), self._study)
        elif self._directory.paths():
            SavedSession.load(self._directory, self._study, self._sweep.compute)  # refuses another study
        elif files.has_results():
            raise UserError(
                f"{files.folder} holds runs, but no {files.config.name} that says of which study; use another --out or "
                "name, or remove the folder"
            )

    def load_checkpoint(self, what: str) -> None:
        """Load the last checkpoint; if there is none, add a note that ``what`` starts from the beginning."""
        session, notes = SavedSession.load(self._directory, self._study, self._sweep.compute)
        self._sweep.notes.extend(notes)
        if session is None:
            self._sweep.notes.append(f"there is no checkpoint yet, so the {what} starts from the beginning")
            return
        self.saved = session

    def check_positions(self, runs: int) -> None:
        """Refuse a checkpoint with the state of a run that is not one of ``runs``."""
        if not all(0 <= position < runs for position in self.saved.runs):
            raise self.invalid_checkpoint()

    def invalid_checkpoint(self) -> UserError:
        """Return the error of a checkpoint whose state is not one of this study."""
        return UserError(f"the checkpoint in {self.files.folder} is not valid; start again with --force")

    def saved_journal(self) -> str:
        """Return the evaluations that precede the checkpoint, as they were written."""
        return read_until(self.files.metrics, self.saved.metrics).decode()

    # Computing.

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Release the folder after the block; restore the old run if the new one has no results by then."""
        try:
            yield
        except BaseException:
            self.old.restore()
            raise
        finally:
            self._lock.release()

    def begin(self) -> None:
        """Set the old run aside, and write the configuration."""
        if not self._resumed:
            self.old.set_aside()
        begin_run(self.files, self._study.to_toml())

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Open the journal at the position of the checkpoint; in the block, Ctrl-C is deferred until the next one."""
        self._journal = Journal(self.files.metrics, self.saved.metrics)
        try:
            with self.stop:
                yield
        finally:
            self._journal.close()

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line to the journal, if it is open."""
        if self._journal is not None:
            self._journal.append(json_line(line))

    def checkpoint(self, session: Callable[[JournalPosition], SavedSession]) -> None:
        """Save a checkpoint if one is due, and answer Ctrl-C; ``session`` returns the state at a journal position."""
        journal = self._journal
        stopping = self.stop.requested and not self.old.pending  # before the first round there is nothing to save
        if journal is not None and (self._checkpoints.due or stopping):
            self._checkpoints.save(lambda: session(journal.position()), self._sweep.compute)
        self.stop.stop_if_requested()

    def clear_checkpoints(self) -> None:
        """Remove all checkpoints: the runs have ended."""
        self._directory.clear()
