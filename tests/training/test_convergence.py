"""Convergence on least squares, where the optimum, the noise and the neighbourhood are known in closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from defedavg.algorithms import ALGORITHMS
from defedavg.config.build import make_executor, make_simulator
from defedavg.config.study import Settings
from defedavg.tasks import LeastSquares, least_squares
from helpers.plans import rounds_of
from helpers.settings_tables import settings, small


def tail(problem: LeastSquares, how: Settings, rounds: int, skip: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return the versions from ``skip`` to ``rounds``, one per row."""
    executor = make_executor(how, seed, problem.task)
    kept = []
    for record in rounds_of(make_simulator(how, seed)):
        weights = executor.apply(record)
        if record.merge.version > skip:
            kept.append(weights.numpy().copy())
        if record.merge.version >= rounds:
            return np.stack(kept)
    raise AssertionError("the plan ended early")


def excess(problem: LeastSquares, versions: np.ndarray[Any, Any]) -> float:
    """Return the mean of F − F* over versions."""
    return float(np.mean([problem.value(w) for w in versions]) - problem.minimum)


@pytest.mark.parametrize(("clients", "rate"), [(1, 0.1), (1, 0.4), (4, 0.3)])
def test_sgd_reaches_the_neighbourhood_that_theory_predicts(clients: int, rate: float) -> None:
    """For w ← w − ηD(w − z̄) + noise of variance v per coordinate: E[F − F*] = Σ ½ D · η²v / (1 − (1 − ηD)²)."""
    problem = least_squares(clients, dimension=6, samples_per_client=50, seed=1)
    how = settings(
        "fedavg", fedavg={"replacement": False}, **small(clients, clients, steps=1, batch_size=2, local_lr=rate)
    )
    curvature = problem.curvature
    noise = curvature**2 * problem.client_variances.mean(axis=0) / 2 / clients
    expected = np.sum(0.5 * curvature * rate**2 * noise / (1 - (1 - rate * curvature) ** 2))
    found = excess(problem, tail(problem, how, rounds=5000, skip=200))
    assert found == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_reaches_a_neighbourhood_in_proportion_to_its_rate(name: str) -> None:
    """The stationary excess of SGD is proportional to its rate: a quarter of the rate gives a quarter of the excess."""
    kind = ALGORITHMS[name]
    problem = least_squares(8, dimension=4, samples_per_client=30, seed=2, start=3.0)
    first = problem.value(np.full(4, 3.0)) - problem.minimum
    found = []
    for scale in (1.0, 0.25):
        # Without a global rate a job counts as one step (FAVANO), without a local one it is one (AsySG).
        local = (0.02 if kind.uses_global_lr else 0.2) * scale if kind.uses_local_lr else 1.0
        overall = 0.5 if kind.uses_local_lr else 0.04 * scale
        if kind.server_optimizer != "sgd":  # an adaptive step does not depend on the scale of the updates
            local, overall = 0.02, 0.2 * scale
        # Background uploads of jobs that are shorter than transfers make updates too stale for these rates.
        clients = {"step_seconds": 0.05} if kind.policy.background_upload else {}
        how = settings(name, **small(8, 2, steps=4, batch_size=1, local_lr=local, global_lr=overall, clients=clients))
        rounds = 2400
        found.append(excess(problem, tail(problem, how, rounds, skip=rounds // 3)))
    assert found[0] < 0.05 * first
    assert 2.5 < found[0] / found[1] < 6.5


@pytest.fixture
def unequal(tmp_path: Path) -> tuple[LeastSquares, dict[str, Any]]:
    """Return five fast clients with optimum +1 and five clients with optimum −1 that are five times slower."""
    lines = ["client,step_seconds,up_mbps,down_mbps"]
    lines += [f"{i},{0.001 if i < 5 else 0.005},inf,inf" for i in range(10)]
    path = tmp_path / "fleet.csv"
    path.write_text("\n".join(lines))
    centres = np.where(np.arange(10)[:, None] < 5, 1.0, -1.0) * np.ones((1, 3))
    problem = least_squares(10, dimension=3, noise=0.2, centres=centres, start=0.0, seed=4)
    return problem, small(10, 2, steps=5, local_lr=0.02, clients={"trace": str(path), "model_megabytes": 0.0})


def test_fedbuff_is_biased_towards_fast_clients_and_defedavg_niid_is_not(
    unequal: tuple[LeastSquares, dict[str, Any]],
) -> None:
    problem, shape = unequal
    means = {}
    for name in ("fedbuff", "defedavg-niid", "fedavg"):
        versions = tail(problem, settings(name, **shape), rounds=1500, skip=300)
        means[name] = versions.mean(axis=0) - problem.optimum
    # Fast clients send five updates for each update of the slow ones: 5/6 · (+1) + 1/6 · (−1) = 2/3.
    assert means["fedbuff"] == pytest.approx(np.full(3, 2 / 3), abs=0.08)
    assert np.abs(means["defedavg-niid"]).max() < 0.08
    assert np.abs(means["fedavg"]).max() < 0.08


def test_thrifty_and_eager_reach_the_same_optimum(unequal: tuple[LeastSquares, dict[str, Any]]) -> None:
    problem, shape = unequal
    for mode in ("eager", "thrifty"):
        versions = tail(
            problem, settings("defedavg-niid", **shape, **{"defedavg-niid": {"mode": mode}}), 1500, skip=300
        )
        assert np.abs(versions.mean(axis=0) - problem.optimum).max() < 0.08
