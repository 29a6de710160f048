"""Two classes of inputs that are neither centred nor scaled, so that a model depends on its normalisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from defedavg.tasks import Task, make_task

CLIENTS = 6
RANDOM = np.random.Generator(np.random.Philox(key=8))
Y = RANDOM.integers(0, 2, 360)
X = RANDOM.normal(size=(360, 4)) * [2.0, 0.5, 3.0, 1.0] + [5.0, -2.0, 0.0, 1.0] + 2.0 * Y[:, None]

TASK_FILE = """
import numpy as np
from torch import nn
from defedavg import make_task

def make(settings, client=None):
    x, y = np.random.default_rng(0).normal(3.0, 2.0, size=(200, 8)).astype("float32"), np.arange(200) % 2
    net = lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return make_task(model=net, train=(x, y), test=(x, y), clients=np.array_split(np.arange(200), 20))
"""


def batch_norm_net() -> nn.Module:
    """Return a normalisation of the inputs, a hidden layer and a normalisation of its outputs."""
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def shifted_task(
    model: Callable[[], nn.Module] = batch_norm_net, clients: int = CLIENTS, dtype: torch.dtype = torch.float64
) -> Task:
    """Return a task with 300 training samples."""
    x = torch.from_numpy(X).to(dtype)
    return make_task(
        model=lambda: model().to(dtype),
        train=(x[:300], Y[:300]),
        test=(x[300:], Y[300:]),
        clients=[np.arange(i, 300, clients) for i in range(clients)],
        keep_dtype=True,
    )


def deployed_task(config: Mapping[str, Any], client: int | None) -> Task:
    """Return the task in float32, for a deployment."""
    return shifted_task(clients=int(config.get("clients.num_clients", CLIENTS)), dtype=torch.float32)
