"""What the live view knows: every run below a folder, read again when it changed, forgotten when it is gone."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from ...errors import UserError
from ...runstore.reader import Folder, find_runs, read_folder
from ..page import build
from ..payload import live

MOST_KEPT = 8  # reports, which are large

Sign = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A run as it was when its files had this sign."""

    sign: Sign
    folder: Folder


class Views:
    """The runs below a folder. A run is named by its path below it, and only names that were found are ever opened."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f"there is no folder {root}; name the folder that holds runs, as `defedavg view runs`")
        self.root = root
        self._known: dict[str, Known] = {}
        self._pages: dict[str, tuple[Sign, str]] = {}
        self._lock = Lock()

    def list(self) -> list[dict[str, Any]]:
        """All runs, the newest first."""
        with self._lock:
            self._refresh()
            found = [_line(name, known) for name, known in self._known.items()]
        return sorted(found, key=lambda line: -line["changed"])

    def curves(self, name: str) -> dict[str, Any] | None:
        """The measurements of a run; None if there is no such run."""
        known = self._find(name)
        return None if known is None else {"sign": _text(known.sign), "series": live(known.folder)}

    def page(self, name: str) -> str | None:
        """The report of a run; None if there is no such run."""
        known = self._find(name)
        if known is None:
            return None
        kept = self._pages.get(name)
        if kept is None or kept[0] != known.sign:
            kept = known.sign, build([known.folder.path])
            with self._lock:
                while len(self._pages) >= MOST_KEPT:
                    self._pages.pop(next(iter(self._pages)))
                self._pages[name] = kept
        return kept[1]

    def _find(self, name: str) -> Known | None:
        with self._lock:
            self._refresh()
            return self._known.get(name)

    def _refresh(self) -> None:
        paths = {path.relative_to(self.root).as_posix(): path for path in find_runs(self.root)}
        for name in set(self._known) - set(paths):
            del self._known[name]
            self._pages.pop(name, None)
        for name, path in paths.items():
            sign = _sign(path)
            known = self._known.get(name)
            if known is not None and known.sign == sign:
                continue
            try:
                self._known[name] = Known(sign, read_folder(path))
            except UserError:  # it was deleted this moment
                self._known.pop(name, None)


def _sign(path: Path) -> Sign:
    """Changes whenever a file of the run does."""
    found = []
    for name in ("summary.json", "metrics.jsonl", "points.jsonl", "config.toml"):
        try:
            state = (path / name).stat()
        except OSError:
            found.append((0, 0))
        else:
            found.append((state.st_size, state.st_mtime_ns))
    return tuple(found)


def _text(sign: Sign) -> str:
    return "-".join(f"{size:x}.{moment:x}" for size, moment in sign)


def _line(name: str, known: Known) -> dict[str, Any]:
    folder = known.folder
    best = [value for run in folder.runs if (value := run.numbers["best_accuracy"]) is not None]
    study = folder.study
    expected = len(study.points()) * len(study.seeds) if study is not None and not folder.searched else None
    over = sum(run.status != "running" for run in folder.runs)
    return {
        "id": name,
        "name": folder.name,
        "status": status(folder),
        "searched": folder.searched,
        "algorithms": list(dict.fromkeys(run.algorithm for run in folder.runs))
        or (list(study.algorithms) if study is not None else []),
        "done": over,
        "expected": max(expected or 0, len(folder.runs)),
        "best": max(best, default=None),
        "changed": max(moment for _, moment in known.sign) / 1e9,
        "started": folder.provenance.get("started", ""),
        "command": folder.provenance.get("command", ""),
        "words": folder.text,
        "notes": list(folder.notes),
        "sign": _text(known.sign),
    }


def status(folder: Folder) -> str:
    """finished, running, interrupted (Ctrl-C), or broken off (its process is gone without a word)."""
    if folder.finished:
        return "finished"
    if any(run.status == "interrupted" for run in folder.runs):
        return "interrupted"
    return "running" if _alive(folder.provenance) else "broken off"


def _alive(made: Any) -> bool:
    """Whether the process that writes a run is there; one on another machine is taken at its word."""
    pid = made.get("pid", "")
    if made.get("host") != socket.gethostname() or not pid.isdigit() or os.name != "posix":
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
