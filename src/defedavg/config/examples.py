"""Example studies by name."""

from __future__ import annotations

from typing import Any

# Like the paper's Figure 1: three clients, two updates per round, communication takes no time.
FIGURE1: dict[str, Any] = {
    "name": "figure1",
    "algorithms": ["fedavg", "defedavg-niid", "defedavg-iid"],
    "seeds": [1],
    "clients": {
        "num_clients": 3,
        "step_seconds": 0.1,
        "slowness": "uniform(1, 3)",
        "uplink_mbps": float("inf"),
        "downlink_mbps": float("inf"),
    },
    "training": {"updates_per_round": 2, "local_steps": 10},
    "fedavg": {"replacement": False},
}

# What `defedavg settings` prints: about a minute on two cores. Most algorithms reach the target, at different times.
# Rates: for each algorithm, the pair that was first at the target on seed 0, of η in {0.1, 0.3, 1} and η̄ in {0.05, 0.1,
# 0.3, 1}; for AsySG with n clients at work, whose only rate scales single gradients, of η in {0.02, 0.05, 0.1, 0.2}
# (0.05 and 0.1 were equally fast). No rate of FAVANO reached the target in that search; it has the rates that the
# others share.
FIRST: dict[str, Any] = {
    "name": "first",
    "algorithms": ["fedavg", "fedbuff", "favano", "asysg", "defedavg-iid", "defedavg-niid"],
    "seeds": [0, 1, 2],
    "task": {"model": "mlp", "split": "classes"},
    "training": {"global_lr": 0.3, "local_lr": 0.1},
    "stop": {"target_accuracy": 0.8, "max_seconds": 8.0, "eval_every_seconds": 0.1},
    "fedavg": {"global_lr": 1.0},
    "asysg": {"concurrency": 10, "global_lr": 0.1},
}
