"""The origin of results: when, by which command, with which versions, on which machine."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__


def command() -> str:
    """Return the command line, quoted so that it can be run again."""
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    first = ["defedavg"] if name in ("defedavg", "defedavg.exe", "__main__.py") else ["python", sys.argv[0]]
    return shlex.join([*first, *sys.argv[1:]])


def provenance(*, executor: str = "", device: str = "cpu", precision: str = "") -> dict[str, Any]:
    """Return what a reader needs to trust and repeat a result; ``pid`` and ``host`` tell whether it is in progress."""
    entries: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "folder": str(Path.cwd()),
        "defedavg": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy")},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "device": _device(device),
        "executor": executor,
        "precision": precision,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    return {name: value for name, value in entries.items() if value not in (None, "")}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device(kind: str) -> str:
    if kind != "cuda":
        return kind
    import torch

    return torch.cuda.get_device_name()


def processor_name() -> str:
    """Return the model of the processor; only Linux tells it in a file, elsewhere it is the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """Return the commit of the source tree, with ``-dirty`` if files differ; else the variable DEFEDAVG_COMMIT."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return os.environ.get("DEFEDAVG_COMMIT")
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
