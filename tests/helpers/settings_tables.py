"""Settings of one run from the tables of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from defedavg.config import study as config
from defedavg.config.settings import Settings


def settings(algorithm: str, **tables: Mapping[str, Any]) -> Settings:
    """Return the settings of one run from the tables of a file."""
    (point,) = config.study({"algorithms": [algorithm], **tables}).points()
    return point.settings


def small(num_clients: int, n: int, steps: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "clients": {"num_clients": num_clients, **more.pop("clients", {})},
        "training": {"updates_per_round": n, "local_steps": steps, "global_lr": 1.0, "local_lr": 0.1, **more},
    }
