"""What a user waits for besides training: whole commands in fresh processes, against importing PyTorch alone.

The tiny study of ``defedavg bench`` (five algorithms, five rounds, 20 clients) and commands that do not train run in
turn with ``import torch``. With ``--old``, the source folder of another version runs in the same turns. Medians of real
time and of processor time (user and system) are printed; the first turn of each is not counted, because it compiles
Python files and caches the data set.

    python benchmarks/startup.py [--turns 7] [--old PATH/src] [--threads 2]

With ``--data``, it measures instead how long data sets of the data folder take to be read from their files and from
their cached arrays, and to be normalised, in processor time:

    python benchmarks/startup.py --data mnist5k,fashionmnist
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


READ = """
import sys, time
import torch
from defedavg.tasks.datasets import array_cache, builtin_datasets, catalog, dataset_files
dataset, root = builtin_datasets.DATASETS.find(sys.argv[1]), dataset_files.data_dir()
paths = dataset_files.locate(dataset, root)
start = time.process_time()
if sys.argv[2] == "files":
    dataset.read(paths)
else:
    array_cache.read_through_cache(dataset, paths, root)
read = time.process_time() - start
catalog.load_pixels(sys.argv[1])
start = time.process_time()
catalog.load(sys.argv[1])
print(read, time.process_time() - start)
"""


def read_times(names: list[str], turns: int) -> None:
    """Print how long data sets take to be read and normalised."""
    print("| processor time | files | cached arrays | normalised |\n|---|---|---|---|")
    for name in names:
        found: dict[str, list[list[float]]] = {"files": [], "cache": []}
        for turn in range(turns + 1):  # the first one writes the cache
            for source, rows in found.items():
                words = [sys.executable, "-c", READ, name, source]
                done = subprocess.run(words, check=True, capture_output=True, text=True)
                if turn:
                    rows.append([float(word) for word in done.stdout.split()])
        files, cache = ([statistics.median(column) for column in zip(*rows, strict=True)] for rows in found.values())
        print(f"| `{name}` | {files[0]:.2f} s | {cache[0]:.2f} s | {cache[1]:.2f} s |", flush=True)


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
    parser.add_argument("--data", help="data sets to read, comma-separated")
    given = parser.parse_args()
    if given.data:
        read_times(given.data.split(","), given.turns)
        return
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
