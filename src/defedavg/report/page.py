"""The report page: one file that holds its charts, its data and its scripts, and asks nothing of any network.

The law of this file: text from outside enters the page in two places only, escaped in the title and as JSON that no
tag can end. The scripts set it as text.
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
from ..runstore.reader import Folder, find_runs, of_records, read_folder
from .payload import payload

PLOTLY = "vendor/plotly-cartesian.min.js"


def asset(name: str) -> str:
    """A file of the page."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def in_script(value: Any) -> str:
    """JSON for a script block: no tag, comment or line separator in it can be taken for the page's own."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text


def gather(paths: Sequence[Path]) -> list[Path]:
    """The run folders named, or below those named, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no folder {path}; name a run, such as runs/demo")
        below = list(find_runs(path))
        if not below:
            raise UserError(f"{path} holds no run; name a folder that `defedavg run` made, or one above it")
        found.update(dict.fromkeys(below))
    return list(found)


def build(paths: Sequence[Path], title: str | None = None) -> str:
    """The page of these runs, as text."""
    folders = [read_folder(path) for path in gather(paths)]
    names = list(dict.fromkeys(folder.name for folder in folders))
    return page(folders, title or ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else ""))


def page(folders: Sequence[Folder], title: str) -> str:
    """The page of what was read, or of what was never in a folder."""
    parts = {
        "TITLE": html.escape(f"{title} · defedavg"),
        "STYLE": asset("look.css"),
        "DATA": in_script(payload(folders, title)),
        "PLOTLY": asset(PLOTLY),
        "SCRIPT": asset("charts.js") + asset("page.js"),
    }
    return _fill(asset("page.html"), parts)


def _fill(text: str, parts: dict[str, str]) -> str:
    """Put each part in its place; a part is never searched for another's."""
    made: list[str] = []
    for piece in text.split("{{"):
        name, end, rest = piece.partition("}}")
        made += [parts[name], rest] if end and name in parts else [piece]
    return "".join(made)


def write(paths: Sequence[Path], to: Path, title: str | None = None) -> int:
    """Write the page of these runs; gives its size in bytes."""
    return _write(build(paths, title), to)


def write_records(
    groups: Mapping[str, Iterable[Mapping[str, Any]]], to: Path, title: str, provenance: Mapping[str, str] | None = None
) -> int:
    """A page of results that are no run folders: records like the entries of ``summary.json``, by the title of a group.

    A record has ``label``, ``algorithm``, ``seed``, ``status`` and whatever of the entries' numbers is known, and
    under ``curve`` measurements like the lines of ``metrics.jsonl``.
    """
    return _write(page([of_records(name, records, provenance) for name, records in groups.items()], title), to)


def _write(text: str, to: Path) -> int:
    data = text.encode("utf-8")
    write_whole(to, data)
    return len(data)
