"""The log of sessions beside a folder's results: one line of ``provenance.jsonl`` per session that computed runs."""

from __future__ import annotations

import json
import platform
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..experiments.compute import ComputeConfig
from ..fileio import writing
from ..runstore.provenance import provenance

_FILE = "provenance.jsonl"


@contextmanager
def logged_session(folder: Path, compute: ComputeConfig) -> Iterator[None]:
    """Append a line to the log when the block ends, also after an exception."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    start, source = time.perf_counter(), provenance(device=compute.device, precision=compute.precision)
    try:
        yield
    finally:
        line = {
            "time": source["started"],
            "command": shlex.split(source["command"]),
            "real_seconds": round(time.perf_counter() - start, 1),
            "version": source["defedavg"],
            "commit": source.get("commit"),
            "python": source["python"],
            "torch": source["torch"],
            "device": source["device"] if compute.device == "cuda" else platform.machine(),
            "precision": compute.precision,
        }
        path = folder / _FILE
        with writing(path), path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")


def last_session(folder: Path) -> dict[str, str]:
    """Return the last line of a folder's log with all values as text; an empty dict if no line can be read."""
    try:
        line = json.loads((folder / _FILE).read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    if not isinstance(line, dict):
        return {}
    return {name: shlex.join(map(str, v)) if isinstance(v, list) else str(v) for name, v in line.items()}
