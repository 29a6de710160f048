"""The processes that a command starts for a run on this machine: all inherit a variable that names the run folder.

If the command is killed, they continue without it. The next command on this folder finds them by the variable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

RUN_VARIABLE = "DEFEDAVG_RUN"
END_SECONDS = 5.0
"""How long a process may take to end by itself before it is killed."""


def run_environment(folder: Path) -> dict[str, str]:
    """Return what the processes of a run need in their environment so that a later command finds them."""
    return {RUN_VARIABLE: os.path.realpath(folder)}


def orphans(folder: Path) -> list[psutil.Process]:
    """Return the processes that a killed command has left; the caller holds the launch lock of the run folder."""
    marked = os.path.realpath(folder)
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid()
        and query(process.environ, {}).get(RUN_VARIABLE) == marked
        and query(process.status, psutil.STATUS_ZOMBIE) != psutil.STATUS_ZOMBIE
    ]


def end_orphans(folder: Path) -> int:
    """End the processes that a killed command has left, and those that they start meanwhile; return how many."""
    ended: set[int] = set()
    for method in (psutil.Process.terminate, psutil.Process.kill, psutil.Process.kill):
        left = orphans(folder)
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.Error):
                method(process)
        ended |= {process.pid for process in left}
        psutil.wait_procs(left, timeout=END_SECONDS)
    return len(ended)


def query(method: Callable[[], Any], default: Any) -> Any:
    """Call a method of a process; return the default if it has just ended, or is another user's."""
    try:
        return method()
    except (psutil.Error, OSError):
        return default
