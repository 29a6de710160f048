"""Settings of one run, from tables as a configuration file has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from defedavg.config import study as config
from defedavg.config.study import Settings


def settings(algorithm: str, **tables: Mapping[str, Any]) -> Settings:
    """Settings of one run, from tables as a file has them."""
    (point,) = config.study({"algorithms": [algorithm], **tables}).points()
    return point.settings


def small(num_clients: int, n: int, steps: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "clients": {"num_clients": num_clients, **more.pop("clients", {})},
        "training": {"updates_per_round": n, "local_steps": steps, "global_lr": 1.0, "local_lr": 0.1, **more},
    }
