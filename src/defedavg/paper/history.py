"""Where results come from: one line for every time that runs were done."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .. import __version__
from ..fileio import writing
from ..runstore.provenance import commit

if TYPE_CHECKING:
    from ..experiments.compute import ComputeConfig


@contextmanager
def note(folder: Path, means: ComputeConfig) -> Iterator[None]:
    """Add a line to provenance.jsonl when what is done here ends, however it ends."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    began, when = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    try:
        yield
    finally:
        line = {
            "time": when,
            "command": ["defedavg", *sys.argv[1:]],
            "real_seconds": round(time.perf_counter() - began, 1),
            "version": __version__,
            "commit": commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if means.device == "cuda" else platform.machine(),
            "precision": means.precision,
        }
        path = folder / "provenance.jsonl"
        with writing(path), path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")


def last(folder: Path) -> dict[str, str]:
    """The last line of a folder's provenance.jsonl, as text; nothing where there is none that can be read."""
    try:
        found = json.loads((folder / "provenance.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: shlex.join(map(str, v)) if isinstance(v, list) else str(v) for name, v in found.items()}
