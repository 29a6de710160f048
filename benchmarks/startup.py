"""What a user waits for besides training: whole commands in fresh processes, against importing PyTorch alone.

The tiny study of ``defedavg bench`` (five algorithms, five rounds, 20 clients) and commands that do not train run in
turn with ``import torch``. With ``--old``, the source folder of another version runs in the same turns. Medians of real
time and of processor time (user and system) are printed; the first turn of each is not counted, because it compiles
Python files and caches the data set.

    python benchmarks/startup.py [--turns 7] [--old PATH/src] [--threads 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import defedavg
from defedavg.cli.command_overhead import LOAD, STUDY

NEW = Path(defedavg.__file__).resolve().parents[1]
TORCH = "import torch"
COMMANDS = {
    "run, tiny study": ("run", "tiny.toml", "--force"),
    "plan, tiny study": ("plan", "tiny.toml"),
    "--help": ("--help",),
    "runs list": ("runs", "list"),
}


def timed(words: tuple[str, ...], folder: Path, source: Path, threads: int) -> tuple[float, float]:
    """Return the real time and the processor time of a fresh interpreter."""
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": str(threads)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=folder, env=env, check=True, capture_output=True)
    spent, after = time.perf_counter() - start, os.times()
    return spent, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--old", type=Path, help="the folder src of another version")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    sources = {"": NEW} if given.old is None else {"old: ": given.old.resolve(), "new: ": NEW}
    cases = {TORCH: (LOAD, NEW)} | {
        f"{version}{name}": (("-m", "defedavg", *words), source)
        for name, words in COMMANDS.items()
        for version, source in sources.items()
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "tiny.toml").write_text(STUDY, encoding="utf-8")
        (folder / "runs").mkdir()
        for turn in range(given.turns + 1):
            for name, (words, source) in cases.items():
                found = timed(words, folder, source, given.threads)
                if turn:
                    times[name].append(found)
            print(f"turn {turn} of {given.turns}", file=sys.stderr, flush=True)
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    alone = medians[TORCH]
    head = f"{given.turns} turns, {given.threads} thread{'s' if given.threads > 1 else ''}"
    print(f"| {head} | real time | beyond PyTorch | processor time | beyond PyTorch |")
    print("|---|---|---|---|---|")
    for name, (wall, cpu) in medians.items():
        loads = "run," in name
        beyond = [f"{value - base:.2f} s" if loads else "" for value, base in zip((wall, cpu), alone, strict=True)]
        print(f"| {name} | {wall:.2f} s | {beyond[0]} | {cpu:.2f} s | {beyond[1]} |")


if __name__ == "__main__":
    main()
