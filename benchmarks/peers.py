"""The same work with other simulators: updates per second of Flower, pfl-research and FLGo beside ours.

    python benchmarks/peers.py --environments DIR --install        creates DIR/flower, DIR/pfl and DIR/flgo with pip
    python benchmarks/peers.py --environments DIR [--rounds 6] [--repeats 3] [--data images.npz] [--json FILE]

The work is FedAvg with N = 100 clients, n = 10 per round, K = 50 local steps of 10 samples, and the paper's CNN on
28×28 images. Every client has 500 samples, one epoch; without --data (an npz file with ``images`` and ``labels``)
they are random. No one evaluates. Each simulator runs in a process and an environment of its own; they take turns,
and medians are reported. A rate counts the rounds after the first, so neither imports nor warm-up count. All use
every core: Flower with one Ray actor per core, the others with one process and as many threads of PyTorch as cores,
or with one thread if that is faster. A peer that cannot run is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any, NoReturn

from peer_work import OURS, PEERS, SOURCE, WORK, prepare

TORCH = "torch==2.13.0"
PACKAGES = {"flower": ["flwr[simulation]"], "pfl": ["pfl"], "flgo": ["flgo"]}


def turn(name: str, python: Path, rounds: int, threads: int, folder: Path) -> dict[str, Any]:
    """Run one simulator in a process of its own; return its result, or the reason why there is none."""
    code = f"import peer_work; peer_work.worker({name!r}, {rounds}, {threads})"
    path = f"{Path(__file__).resolve().parent}{os.pathsep}{SOURCE if name in OURS else ''}".strip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, WORK: str(folder), "RAY_DEDUP_LOGS": "0", "MPLBACKEND": "Agg"}
    load = os.getloadavg()[0]
    try:
        done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, timeout=1800)
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            return {**json.loads(lines[-1]), "load": load}
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        reason = str(error)
    return {"name": name, "threads": threads, "failed": reason.strip()[:200], "load": load}


def refuse(text: str) -> NoReturn:
    """End with one line for the user."""
    print(f"peers.py: {text}", file=sys.stderr)
    sys.exit(2)


def install(folder: Path) -> None:
    """Create one environment per peer."""
    for name, packages in PACKAGES.items():
        try:
            venv.create(folder / name, with_pip=True)
        except subprocess.CalledProcessError:
            refuse(f"pip cannot be installed into {folder / name}; this needs the module ensurepip of Python")
        except (OSError, ValueError) as error:  # ValueError: a file has this name, or it cannot be part of PATH
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            refuse(f"{folder / name} cannot be created: {reason}; give another --environments")
        for wanted in ([TORCH, "numpy"], packages):
            print(f"{name}: pip install {' '.join(wanted)}", file=sys.stderr, flush=True)
            if subprocess.run([folder / name / "bin" / "pip", "install", "-q", *wanted]).returncode:
                print(f"{name}: {' '.join(wanted)} cannot be installed", file=sys.stderr)


def python_of(environments: Path, name: str) -> Path:
    """Return the interpreter of a peer."""
    return environments.resolve() / name / "bin" / "python"


def wrong(given: argparse.Namespace) -> str:
    """Return what is wrong with the options, and what to do; nothing if they can be measured."""
    counts = [("--rounds", given.rounds), ("--repeats", given.repeats)]
    for option, count in (*counts, *(("--threads", threads) for threads in given.threads or ())):
        if count < 1:
            return f"{option} is {count}; it must be at least 1"
    missing = [name for name in PEERS if not python_of(given.environments, name).exists()]
    if missing:
        return f"{given.environments} has no environment for {', '.join(missing)}; create it with --install first"
    if given.json and given.json.is_dir():
        return f"--json {given.json} is a folder; name a file"
    if given.json and not given.json.absolute().parent.is_dir():
        return f"there is no folder {given.json.parent} for --json; create it, or name another file"
    return ""


def measure(given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Let all simulators take turns."""
    cores = len(os.sched_getaffinity(0))
    choices = {name: given.threads or sorted({1, cores}) for name in ("pfl", "flgo")}
    plan = [(name, threads) for name in (*OURS, *PEERS) for threads in choices.get(name, [cores])] * given.repeats
    found: list[dict[str, Any]] = []
    try:
        for number, (name, threads) in enumerate(plan, start=1):
            python = Path(sys.executable) if name in OURS else python_of(given.environments, name)
            found.append(turn(name, python, given.rounds, threads, folder))
            result = found[-1].get("failed") or f"{found[-1]['updates_per_s']:.2f} updates/s"
            print(f"{number} of {len(plan)}: {name}, {threads} threads: {result}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return found


def table(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median of every simulator, with its faster number of threads, and the ratio to ours."""
    rows: list[dict[str, Any]] = []
    for name in (*OURS, *PEERS):
        best: dict[str, Any] = {"name": name, "failed": "not run"}
        for threads in sorted({each["threads"] for each in turns if each["name"] == name}):
            same = [each for each in turns if (each["name"], each["threads"]) == (name, threads)]
            good = [each for each in same if "failed" not in each]
            if not good:
                best = best if "updates_per_s" in best else same[-1]
                continue
            rates = [each["updates_per_s"] for each in good]
            if statistics.median(rates) > best.get("updates_per_s", 0.0):
                best = {**good[-1], "updates_per_s": statistics.median(rates), "turns": len(good)}
                best["cpu_s_per_update"] = statistics.median(each["cpu_s_per_update"] for each in good)
                best |= {"least": min(rates), "most": max(rates)}
        rows.append(best)
    own = rows[0].get("updates_per_s")
    return [
        {**row, "ours_to_it": own / row["updates_per_s"] if own and "updates_per_s" in row else None} for row in rows
    ]


def main() -> None:
    """Install, or measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, required=True, help="folder with one environment per peer")
    parser.add_argument("--install", action="store_true", help="create the environments")
    parser.add_argument("--rounds", type=int, default=6, help="rounds that count, after the first")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each; medians are reported")
    parser.add_argument("--threads", type=int, nargs="+", help="of PyTorch for pfl and FLGo; 1 on a busy machine")
    parser.add_argument("--data", type=Path, help="npz file with images and labels instead of random ones")
    parser.add_argument("--json", type=Path, help="file for all results")
    given = parser.parse_args()
    if given.install:
        install(given.environments)
        return
    if text := wrong(given):
        refuse(text)
    with tempfile.TemporaryDirectory() as folder:
        try:
            prepare(Path(folder), given.data)
        except ValueError as error:
            refuse(str(error))
        turns = measure(given, Path(folder))
    rows = table(turns)
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "turns": turns}, indent=1) + "\n")
    loads = [each["load"] for each in turns] or [0.0]
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {min(loads):.1f} to {max(loads):.1f}\n")
    print("| | updates/s | range | ours / it | processor s per update | version | PyTorch | threads |")
    print("|---" * 8 + "|")
    for row in rows:
        if row["ours_to_it"] is None:
            print(f"| {row['name']} | – | {row.get('failed', '')} | – | – | – | – | – |")
            continue
        figures = f"{row['updates_per_s']:.2f} | {row['least']:.2f} to {row['most']:.2f} | {row['ours_to_it']:.2f}"
        figures += f" | {row['cpu_s_per_update']:.3f}"
        print(f"| {row['name']} | {figures} | {row.get('version', '')} | {row['torch']} | {row['threads']} |")


if __name__ == "__main__":
    main()
