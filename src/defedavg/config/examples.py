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
