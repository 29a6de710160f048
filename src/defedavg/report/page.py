"""The report page: one file with its charts, data and scripts, which loads nothing from a network.

Untrusted text enters the page in two places only: escaped in the title, and as JSON that cannot contain a tag. The
scripts insert it as text, never as HTML.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
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
SCRIPTS = ("charts.js", "activity.js", "clients.js", "page.js")  # in the order in which they depend on each other


def asset(name: str) -> str:
    """Return the text of an asset."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def in_script(value: Any) -> str:
    """Return JSON for a script block, without tags, comments or line separators that could end the block."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be encoded


def gather(runs: Iterable[Path | RunFolder]) -> list[RunFolder]:
    """Return the given runs; a path stands for every run folder at or below it."""
    found: dict[Path, RunFolder] = {}
    for run in runs:
        if isinstance(run, RunFolder):
            found[run.path] = run
            continue
        if not run.exists():
            raise UserError(f"there is no folder {run}; name a run folder, such as runs/demo")
        below = list(find_run_folders(run))
        if not below:
            raise UserError(f"{run} holds no run; name a folder that `defedavg run` wrote, or a parent of one")
        found.update({path: read_run(path) for path in below if path not in found})
    return list(found.values())


def build(runs: Iterable[Path | RunFolder], title: str | None = None) -> str:
    """Return the page of these runs, as HTML."""
    folders = gather(runs)
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
    # One pass: the inserted parts are not searched for further names.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def write(runs: Iterable[Path | RunFolder], to: Path, title: str | None = None) -> int:
    """Write the page of these runs, in folders or in memory, and return its size in bytes."""
    data = build(runs, title).encode("utf-8", "backslashreplace")  # a name may hold bytes that are not UTF-8
    write_whole(to, data)
    return len(data)


def write_records(
    groups: Mapping[str, Iterable[Mapping[str, Any]]], to: Path, title: str, provenance: Mapping[str, str] | None = None
) -> int:
    """Write a page of results without run folders, given as records by the title of their group; return its size.

    A record is like an entry of ``summary.json``; its ``curve`` is a list like the lines of ``metrics.jsonl``.
    """
    return write([folder_of_records(name, records, provenance) for name, records in groups.items()], to, title)
