"""defedavg: asynchronous federated learning, planned on a virtual clock and computed exactly.

    from defedavg import make_task, simulate
    result = simulate("defedavg-niid", settings={"task.split": "classes", "stop.max_rounds": 50})

Names are imported when they are first used, so that planning does not load PyTorch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import compat

if TYPE_CHECKING:
    from .adviser.advice import advise
    from .adviser.recommendation import Advice
    from .errors import UserError
    from .experiments.simulation import Result, Simulation, simulate
    from .planning.plan import Plan
    from .tasks import Task, cross_entropy, make_task, squared_error

__version__ = "0.2.0"
__all__ = [
    "Advice",
    "Plan",
    "Result",
    "Simulation",
    "Task",
    "UserError",
    "advise",
    "cross_entropy",
    "make_task",
    "simulate",
    "squared_error",
]

_HOMES = {
    "Advice": "adviser.recommendation",
    "advise": "adviser.advice",
    "Plan": "planning.plan",
    "Result": "experiments.simulation",
    "Simulation": "experiments.simulation",
    "simulate": "experiments.simulation",
    "UserError": "errors",
    "Task": "tasks",
    "cross_entropy": "tasks",
    "make_task": "tasks",
    "squared_error": "tasks",
}

compat.install()

# MKL's products of odd sizes depend on the alignment of the matrices in memory, and so on the size of a batch, unless
# MKL is told before its first product to compute them in one way. The speed is the same (measured).
os.environ.setdefault("MKL_CBWR", "AUTO")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'defedavg' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
