"""How long ``defedavg deploy local`` takes from the command to the first merge, and to the moments before it.

Every turn is a new process with the default settings, and is ended after the first merge. Printed are the seconds from
the start of the command until the server listens, until the first and the last client has joined, and until the first
merge; a turn before the others, which compiles Python files and caches the data set, is not counted. With ``--old``,
the source folder of another version runs in the same turns. Run
``python benchmarks/deploy_start.py [--turns 5] [--clients 6] [--old PATH/src]``.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import defedavg
from defedavg.runstore.deployment_status import LogTail
from defedavg.runstore.layout import RunFiles

NEW = Path(defedavg.__file__).resolve().parents[1]
MOMENTS = ("listening", "first client", "last client", "first merge")
LIMIT_SECONDS = 60.0


def measure(source: Path, clients: int) -> dict[str, float]:
    """Start a deployment, and return the seconds until each moment."""
    with tempfile.TemporaryDirectory() as folder:
        files, found = RunFiles(Path(folder) / "runs" / "deployment"), dict[str, float]()
        words = [sys.executable, "-m", "defedavg", "deploy", "local", "--clients", str(clients)]
        began = time.monotonic()
        process = subprocess.Popen(
            words,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(source)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        tail = LogTail(files.folder)
        try:
            while "first merge" not in found:
                seconds = time.monotonic() - began
                if seconds > LIMIT_SECONDS or process.poll() is not None:
                    raise SystemExit("the deployment did not merge")
                if files.server_log.exists():
                    found.setdefault("listening", seconds)
                names = [line.get("event") or line.get("note") for line in tail.lines()]
                for name in names:
                    if name == "joined":
                        found.setdefault("first client", seconds)
                        found["last client"] = seconds
                    elif name == "merge":
                        found.setdefault("first merge", seconds)
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
    return found


def main() -> None:
    """Measure in turns, and print every turn and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--old", type=Path)
    options = parser.parse_args()
    sources = {"new": NEW} | ({} if options.old is None else {"old": options.old.absolute()})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for turn in range(options.turns + 1):
        for name, source in sources.items():
            result = measure(source, options.clients)
            if turn:
                found[name].append(result)
                print(f"{name}: " + ", ".join(f"{moment} {result[moment]:.2f} s" for moment in MOMENTS), flush=True)
    for name, results in found.items():
        medians = {moment: statistics.median(result[moment] for result in results) for moment in MOMENTS}
        print(f"{name}, medians: " + ", ".join(f"{moment} {value:.2f} s" for moment, value in medians.items()))


if __name__ == "__main__":
    main()
