"""A task of your own for the command line: `task.module = "own_task.py:make"` in a study.

The model learns which of two noisy sensor patterns a window of measurements shows. Every client has a sensor with an
offset of its own.

    defedavg run examples/own_task.toml
    python examples/own_task.py
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from defedavg import Task, make_task, simulate

CLIENTS = 30
SAMPLES = 60  # per client
WINDOW = 16


def windows(client: int, count: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return measurements of one sensor and their classes; they depend on nothing but the arguments."""
    rng = np.random.Generator(np.random.Philox(key=[seed, client]))
    label = rng.integers(0, 2, count)
    phase = np.linspace(0, 2 * np.pi, WINDOW)
    pattern = np.where(label[:, None] == 0, np.sin(phase), np.sin(2 * phase))
    measured = pattern + rng.normal(0, 0.5) + rng.normal(0, 1.0, (count, WINDOW))
    return measured.astype("float32"), label


def make(config: Mapping[str, Any], client: int | None) -> Task:
    """Return the task with all clients, or on a client of a deployment with the data of this client alone."""
    seed = int(config["seed"])
    sensors = range(CLIENTS) if client is None else [client]
    parts = [windows(sensor, SAMPLES, seed) for sensor in sensors]
    rows = np.arange(len(parts) * SAMPLES)
    return make_task(
        name="sensors",
        model=lambda: nn.Sequential(nn.Linear(WINDOW, 32), nn.ReLU(), nn.Linear(32, 2)),
        train=(np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])),
        test=windows(CLIENTS, 500, seed),
        clients=np.split(rows, len(parts)),
    )


if __name__ == "__main__":
    for algorithm in ("fedavg", "defedavg-iid"):
        found = simulate(algorithm, task=make({"seed": 0}, None), settings={"stop.max_rounds": 100})
        print(f"{algorithm:14} {found.rounds} rounds, {found.seconds:5.1f} simulated s, best {found.best_accuracy:.1%}")
