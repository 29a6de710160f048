"""Two small fixed studies on digits for docs/findings.md: slow clients, and the n of the theory.

    python benchmarks/findings.py slow-clients      # a few minutes on one core
    python benchmarks/findings.py best-n

Each writes results/findings/NAME.json (``--out``). Runs are kept in runs/findings (``--work``): Ctrl-C loses at most
the work since the last checkpoint, and the same command continues. `defedavg suite findings` prints the figures.

**slow-clients.** Ten clients, softmax regression on 5,000 digits; the slowest needs up to ten times the time of the
fastest. Speeds are drawn independently of the data. Either the clients' digits are alike, or each client is the only
one with its digit. All algorithms have the same simulated time, then every client's accuracy is measured on its own
test samples. Rates: the best mean accuracy over clients on a seed that is not reported.

**best-n.** The theorems say that rounds to a given accuracy are proportional to 1/n, and a plan says how long a round
takes. Together they name the n with the least time: that whose plan merges the same number of updates soonest. The
number of updates is measured at one n. The study compares this n with the one that is fastest in training, each n with
its own rates, for the settings that a theorem covers. K, the grid of rates and the values of n were changed once, after
a trial in which the target was reached within a few evaluations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from defedavg.algorithms import algorithm
from defedavg.cli.stop_signals import stop_on_signals
from defedavg.config import study as config
from defedavg.config.build import make_simulator
from defedavg.config.settings import Settings
from defedavg.experiments.run_events import Event, RunFinished
from defedavg.experiments.study_run import StudyRun
from defedavg.experiments.tune import score
from defedavg.planning.records import Round
from defedavg.runstore.client_results import read_client_rows
from defedavg.runstore.layout import RunFiles
from defedavg.runstore.provenance import processor_name, provenance
from defedavg.suite.benchmark import ADAPTIVE_RATES, ADAPTIVE_SERVERS, FLEETS, HELD, TASKS, TUNING_SEED
from defedavg.suite.suite_run import PRIVATE, held_seconds, outcome

DIGITS = TASKS["digits-pairs"]

SLOW_ALGORITHMS = (
    "fedavg",
    "defedavg-niid",
    "fedbuff",
    "defedavg-iid",
    "fedasync",
    "delay-adaptive-sgd",
    "ca2fl",
    "ace",
)
SLOW_SEEDS = tuple(range(20))
SLOW_N = 3
SLOW_SECONDS = 20.0
SLOW_DATA: Mapping[str, Mapping[str, Any]] = {
    "alike": {"split": "iid"},
    "own digit": {"split": "classes", "classes_per_client": 1},
}

N_VALUES = (1, 4, 10, 40)
N_SEEDS = (0, 1, 2, 3, 4)
N_REFERENCE = 10
N_UPDATES = 2000
N_STEPS = 2
N_TUNING_SEEDS = (TUNING_SEED, TUNING_SEED + 1)
N_EVALUATED = 40  # merged updates between evaluations, for every n
N_FLEETS: Mapping[str, Mapping[str, Any]] = {
    "equal": {"slowness": "equal"},
    "paper": {"slowness": "uniform(1, 5)"},
    "two-speed": {"slowness": "two-speed(0.2, 10)"},
    "phones": {
        "slowness": "phones", "links": "phones", "availability": "phones",
        "step_seconds": FLEETS["phones"].step_seconds,
    },
}  # fmt: skip
N_CASES = (("defedavg-iid", "iid"), ("defedavg-niid", "iid"), ("defedavg-niid", "classes"))
"""Algorithms with the splits for which a theorem holds."""

Entry = Mapping[str, Any]


def computed(tables: Mapping[str, Any], folder: Path) -> list[Entry]:
    """Compute a study, or continue it; return the entries of its runs. Ctrl-C ends the program."""
    run = StudyRun(config.study(tables), folder, resume=True)
    total = len(run.points) * len(run.study.seeds)
    done = len(run.entries)

    def watch(event: Event) -> None:
        nonlocal done
        if isinstance(event, RunFinished):
            done += 1
            if done % max(1, total // 10) == 0:
                print(f"{folder.name}: {done} of {total} runs", file=sys.stderr, flush=True)

    if not run.finished and not run.run(watch):
        sys.exit("stopped; the same command continues")
    return list(run.entries)


def slow_tables(name: str, data: Mapping[str, Any], rates: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """Return a study of slow clients."""
    return {
        "name": name,
        "algorithms": list(SLOW_ALGORITHMS),
        "seeds": list(seeds),
        "task": {"data": DIGITS.data, "model": DIGITS.model, "client_test_share": DIGITS.client_test_share, **data},
        "clients": {"num_clients": 10, "slowness": "uniform(1, 10)", "step_seconds": 0.01, "model_megabytes": 0.031},
        "training": {"updates_per_round": SLOW_N, "local_steps": DIGITS.local_steps},
        "stop": {"max_seconds": SLOW_SECONDS, "max_rounds": 100_000, "eval_every_seconds": SLOW_SECONDS},
        **rates,
    }


def slow_grid(name: str) -> dict[str, list[float]]:
    """Return the rates of the suite's grid, with the step of an update that fits n."""
    kind = algorithm(name)
    merged = kind.updates_per_merge(SLOW_N)
    scaled = [rate * merged / SLOW_N for rate in (0.1, 1.0)]
    global_rates = list(ADAPTIVE_RATES) if kind.server_optimizer in ADAPTIVE_SERVERS else scaled
    local_rates = [0.02, 0.1, 0.2]
    if not kind.uses_global_lr:
        return {"local_lr": [0.01, 0.02, 0.04, 0.1, 0.2, 0.4]}
    return {"global_lr": global_rates, "local_lr": local_rates}


def slow_clients(work: Path) -> dict[str, Any]:
    """Compute the study of slow clients."""
    rows = []
    for data, table in SLOW_DATA.items():
        name = f"slow-{data.replace(' ', '-')}"
        grids = {each: slow_grid(each) for each in SLOW_ALGORITHMS}
        tried = computed(slow_tables(f"{name}-rates", table, grids, [TUNING_SEED]), work / f"{name}-rates")
        rates = {}
        for each in SLOW_ALGORITHMS:
            own = [entry for entry in tried if entry["algorithm"] == each]
            best = max(own, key=lambda entry: entry["client_accuracy_mean"] or 0.0)
            rates[each] = {key.partition(".")[2]: value for key, value in best["swept"].items()}
        folder = work / f"{name}-seeds"
        entries = computed(slow_tables(f"{name}-seeds", table, rates, SLOW_SEEDS), folder)
        for each in SLOW_ALGORITHMS:
            own = [entry for entry in entries if entry["algorithm"] == each]
            runs = [slow_run(entry, folder) for entry in sorted(own, key=lambda entry: int(entry["seed"]))]
            rows.append({"data": data, "algorithm": each, "rates": rates[each], "runs": runs})
    return {"rows": rows}


def slow_run(entry: Entry, folder: Path) -> dict[str, Any]:
    """Return the figures of a run; the slow half are the five clients that need the longest to answer."""
    found, notes = read_client_rows(RunFiles(folder).clients(entry["label"], entry["seed"]))
    assert not notes, notes
    clients = sorted(found, key=lambda row: float(row["answer_seconds"]))
    half = len(clients) // 2
    fast, slow = clients[:half], clients[half:]
    return {
        "seed": entry["seed"],
        "correlation": entry["client_correlation_slowness"],
        "fast_accuracy": fmean(row["accuracy"] for row in fast),
        "slow_accuracy": fmean(row["accuracy"] for row in slow),
        "worst_accuracy": entry["client_accuracy_worst"],
        "slow_updates": sum(row["updates"] for row in slow) / max(1, sum(row["updates"] for row in clients)),
    }


def n_tables(
    case: tuple[str, str], fleet: str, n: int, rates: Mapping[str, Any], seeds: Sequence[int]
) -> dict[str, Any]:
    """Return a study of one algorithm, split, fleet and n."""
    name, split = case
    phones = fleet == "phones"
    clients = {"num_clients": 100, "step_seconds": DIGITS.step_seconds, "model_megabytes": DIGITS.model_megabytes}
    return {
        "name": f"n-{name}-{split}-{fleet}-{n}",
        "algorithms": [name],
        "seeds": list(seeds),
        "task": {"data": DIGITS.data, "model": DIGITS.model, "split": split},
        "clients": {**clients, **N_FLEETS[fleet]},
        "training": {
            "updates_per_round": n,
            "local_steps": N_STEPS,
            "timeout_seconds": FLEETS["phones"].timeout_seconds if phones else 0.0,
            **rates,
        },
        "stop": {
            "target_accuracy": n_target(split, fleet),
            "consecutive_hits": HELD,
            "max_rounds": N_UPDATES // n,
            "max_seconds": DIGITS.phone_seconds if phones else 10 * DIGITS.seconds,
            "eval_every_rounds": N_EVALUATED // n,
        },
    }


def n_grid(n: int) -> dict[str, list[float]]:
    """Return the rates that are tried: the same steps per update for every n, over a factor of 33."""
    return {"global_lr": [rate * n / 10 for rate in (0.03, 0.1, 0.3, 1.0)], "local_lr": [0.05, 0.2]}


def fastest_rates(entries: Sequence[Entry]) -> dict[str, float]:
    """Return the rates that hold the target on all seeds soonest, or else on the most, or with the best accuracy."""
    pairs: dict[str, list[Entry]] = {}
    for entry in entries:
        pairs.setdefault(entry["label"], []).append(entry)
    best = min(pairs.values(), key=lambda own: score([outcome(entry) for entry in own]))
    return {key.partition(".")[2]: value for key, value in best[0]["swept"].items()}


def n_target(split: str, fleet: str) -> float:
    """Return the target: the suite's for two classes per client."""
    return 0.7 if (split, fleet) == ("classes", "phones") else DIGITS.target


def plan_seconds(settings: Settings, seed: int, rounds: int) -> float:
    """Return when a plan merges its round number ``rounds``."""
    for record in make_simulator(settings, seed):
        if isinstance(record, Round) and record.merge.version >= rounds:
            return float(record.time)
    raise SystemExit(f"the plan ends before round {rounds}")


def best_n(work: Path, fleets: Sequence[str]) -> dict[str, Any]:
    """Compute the study of n."""
    cases = []
    for case in N_CASES:
        for fleet in fleets:
            measured, settings = {}, {}
            for n in N_VALUES:
                name = f"n-{case[0]}-{case[1]}-{fleet}-{n}"
                tried = computed(n_tables(case, fleet, n, n_grid(n), N_TUNING_SEEDS), work / f"{name}-rates")
                rates = fastest_rates(tried)
                tables = n_tables(case, fleet, n, rates, N_SEEDS)
                entries = sorted(computed(tables, work / f"{name}-seeds"), key=lambda entry: int(entry["seed"]))
                settings[n] = config.study(tables).points()[0].settings
                measured[n] = {
                    "rates": rates,
                    "seconds": [held_seconds(entry) for entry in entries],
                    "rounds": [hit_round(entry, n) for entry in entries],
                }
            cases.append({
                "algorithm": case[0], "split": case[1], "fleet": fleet, "target": n_target(case[1], fleet),
                "n": [{"n": n, **measured[n], "planned_seconds": planned(measured, settings, n)} for n in N_VALUES],
            })  # fmt: skip
    return {"reference_n": N_REFERENCE, "cases": cases}


def hit_round(entry: Entry, n: int) -> int | None:
    """Return the round of the first of the evaluations that held the target; None if it was not held."""
    return None if held_seconds(entry) is None else int(entry["rounds"]) - (HELD - 1) * (N_EVALUATED // n)


def planned(measured: Mapping[int, Entry], settings: Mapping[int, Settings], n: int) -> list[float] | None:
    """Return when the plans of n merge as many updates as the reference n needed; None if it missed the target."""
    rounds = measured[N_REFERENCE]["rounds"]
    if None in rounds:
        return None
    needed = N_REFERENCE * fmean(rounds)
    return [plan_seconds(settings[n], seed, max(1, round(needed / n))) for seed in N_SEEDS]


def main() -> None:
    """Compute a study and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("slow-clients", "best-n"))
    parser.add_argument("--out", type=Path, default=Path("results/findings"))
    parser.add_argument("--work", type=Path, default=Path("runs/findings"))
    parser.add_argument(
        "--fleet", choices=tuple(N_FLEETS), action="append", help="of best-n; default: all. Repeatable."
    )
    parser.add_argument(
        "--runs-only", action="store_true", help="store no result: for several processes, one per fleet"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    stop_on_signals()
    origin = {name: value for name, value in provenance().items() if name not in PRIVATE}
    made = (
        slow_clients(given.work)
        if given.study == "slow-clients"
        else best_n(given.work, given.fleet or tuple(N_FLEETS))
    )
    if given.runs_only:
        return
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{given.study}.json"
    path.write_text(json.dumps({**made, "provenance": {**origin, "processor": processor_name()}}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
