"""What the options of local training cost: updates per second of DeFedAvg-IID with each of them, in alternating turns.

    python benchmarks/local_training.py [--device cpu|cuda] [--updates 300] [--turns 5]

N = 100, n = 10, K = 50, batches of 10, the paper's CNN, random images: no data set is needed. Plain SGD updates weights
in the backward pass; schedules do so, too, and the other options compute gradients first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from defedavg.experiments.compute import ComputeConfig
from defedavg.training.precision import computing_in
from state import Contestant, random_task

OPTIONS: dict[str, dict[str, Any]] = {
    "plain SGD": {},
    "schedule": {"local_schedule": "cosine(1000)"},
    "augmentation": {"augment": "flip+crop(4)"},
    "weight decay": {"weight_decay": 1e-4},
    "proximal term": {"prox": 0.1},
    "clipping": {"clip_norm": 1.0},
    "momentum": {"momentum": 0.9},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
    "Adam": {"optimizer": "adam", "local_lr": 0.001},
    "AdamW": {"optimizer": "adamw", "local_lr": 0.001, "weight_decay": 0.01},
}


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--local-steps", type=int, default=50)
    parser.add_argument("--runs", type=int, default=3, help="seeds that are computed together")
    parser.add_argument("--updates", type=int, default=300, help="of all runs together, in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--evaluations", type=int, default=1, help="of each run in a turn")
    given = parser.parse_args()
    compute = ComputeConfig.choose("batched", given.device, None, None, "auto")
    task = random_task(given.clients, compute.device)
    with computing_in(compute.precision):
        contestants = {
            name: Contestant("defedavg-iid", given, task, compute, training) for name, training in OPTIONS.items()
        }
        for contestant in contestants.values():
            contestant.turn(min(given.updates, 300))  # compiles kernels, captures graphs, warms up
        for number in range(given.turns):
            for contestant in contestants.values():
                contestant.speeds.append(contestant.turn(given.updates))
            print(f"turn {number + 1} of {given.turns}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(contestant.speeds) for name, contestant in contestants.items()}
    for name, median in medians.items():
        print(f"{name:15} {median:9,.5g} updates/s   time relative to plain SGD {medians['plain SGD'] / median:.2f}")


if __name__ == "__main__":
    main()
