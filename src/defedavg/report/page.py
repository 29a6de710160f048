"""The report page: one file with its charts, data and scripts, which loads nothing from a network.

Untrusted text enters the page in two places only: escaped in the title, and as JSON that cannot contain a tag. The
scripts insert it as text, never as HTML.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..fileio import write_whole
from ..jsonio import finite
from ..runstore.in_memory import folder_of_records
from ..runstore.layout import find_run_folders
from ..runstore.reader import RunFolder, read_run
from .payload import payload

PLOTLY = "vendor/plotly-cartesian.min.js"
SCRIPTS = ("charts.js", "activity.js", "page.js")  # in the order in which they depend on each other


def asset(name: str) -> str:
    """Return the text of an asset."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def in_script(value: Any) -> str:
    """Return JSON for a script block, without tags, comments or line separators that could end the block."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be encoded


def gather(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders at or below the given paths, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no folder {path}; name a run folder, such as runs/demo")
        below = list(find_run_folders(path))
        if not below:
            raise UserError(f"{path} holds no run; name a folder that `defedavg run` wrote, or a parent of one")
        found.update(dict.fromkeys(below))
    return list(found)


def build(paths: Sequence[Path], title: str | None = None) -> str:
    """Return the page of these runs, as HTML."""
    return page([read_run(path) for path in gather(paths)], title)


def page(folders: Sequence[RunFolder], title: str | None = None) -> str:
    """Return the page of folders that were read, of runs in memory, or of results given as records."""
    if title is None:
        names = list(dict.fromkeys(folder.title for folder in folders))
        title = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    parts = {
        "TITLE": html.escape(f"{title} · defedavg"),
        "STYLE": asset("style.css"),
        "DATA": in_script(payload(folders, title)),
        "PLOTLY": asset(PLOTLY),
        "SCRIPT": "".join(map(asset, SCRIPTS)),
    }
    return _fill(asset("page.html"), parts)


def _fill(text: str, parts: dict[str, str]) -> str:
    """Replace each ``{{NAME}}`` of the template; the inserted parts are not searched for further names."""
    filled: list[str] = []
    for piece in text.split("{{"):
        name, end, after = piece.partition("}}")
        filled += [parts[name], after] if end and name in parts else [piece]
    return "".join(filled)


def write(paths: Sequence[Path], to: Path, title: str | None = None) -> int:
    """Write the page of these runs and return its size in bytes."""
    return _write(build(paths, title), to)


def write_folders(folders: Sequence[RunFolder], to: Path, title: str | None = None) -> int:
    """Write the page of runs that are in memory and return its size in bytes."""
    return _write(page(folders, title), to)


def write_records(
    groups: Mapping[str, Iterable[Mapping[str, Any]]], to: Path, title: str, provenance: Mapping[str, str] | None = None
) -> int:
    """Write a page of results without run folders, given as records by the title of their group; return its size.

    A record is like an entry of ``summary.json``: it has ``label``, ``algorithm``, ``seed``, ``status`` and any of an
    entry's numbers. Its ``curve`` is a list of evaluations like the lines of ``metrics.jsonl``.
    """
    return _write(page([folder_of_records(name, records, provenance) for name, records in groups.items()], title), to)


def _write(text: str, to: Path) -> int:
    data = text.encode("utf-8")
    write_whole(to, data)
    return len(data)
