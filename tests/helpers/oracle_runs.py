"""A deterministic problem for oracles: a gradient of client i is D·(w − m_i), so a job is a few lines of NumPy.

An oracle receives which updates are merged when, from the plan, and computes every version from the definition of the
algorithm. It uses no code of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from defedavg.config.build import make_executor, make_plan
from defedavg.planning.plan import Plan
from defedavg.tasks import least_squares
from helpers.settings_tables import settings, small

Vector = NDArray[np.float64]
CLIENTS, STEPS, LOCAL_LR, GLOBAL_LR = 7, 3, 0.1, 0.7
PROBLEM = least_squares(CLIENTS, noise=0.0, heterogeneity=1.0, samples_per_client=4)
D, M = PROBLEM.curvature, PROBLEM.client_means
START: Vector = np.ones(len(D))


def delta(start: Vector, client: int, steps: int = STEPS, local_lr: float = LOCAL_LR) -> Vector:
    """Return Δ = start − (weights after the local steps of plain gradient descent)."""
    w = start.copy()
    for _ in range(steps):
        w = w - local_lr * D * (w - M[client])
    return start - w


def product_run(
    name: str, rounds: int = 60, n: int = 3, own: Mapping[str, Any] | None = None, **training: Any
) -> tuple[Plan, list[Vector]]:
    """Return the plan of an algorithm and all its versions, as the reference executor computes them.

    ``own`` are settings of the algorithm, ``training`` those of [training].
    """
    training = {"steps": STEPS, "local_lr": LOCAL_LR, "global_lr": GLOBAL_LR, **training}
    how = settings(name, **small(CLIENTS, n, **training), **({name: own} if own else {}))
    plan = make_plan(how, 0, rounds)
    plan.check()
    executor = make_executor(how, 0, PROBLEM.task)
    initial = executor.versions[0].numpy().copy()
    return plan, [initial, *(executor.apply(record).numpy().copy() for record in plan.rounds)]


def assert_versions(found: list[Vector], expected: list[Vector]) -> None:
    """Compare all versions to 1e-10; at least fifty merges, and a run that moves."""
    assert len(found) == len(expected) >= 51
    for version, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10, err_msg=f"version {version}")
    assert np.abs(found[-1] - START).max() > 0.05
