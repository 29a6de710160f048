"""Convergence on least squares, where the optimum, the noise and the neighbourhood are known in closed form."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from defedavg.algorithms import ALGORITHMS
from defedavg.config.build import make_executor, make_simulator
from defedavg.config.study import Settings
from defedavg.experiments.simulation import Simulation
from defedavg.tasks import LeastSquares, Scale, least_squares
from defedavg.training import Trainer, run_batched
from defedavg.training.state_memory import StateNeed
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
    problem = least_squares(clients, dimension=48, samples_per_client=50, seed=1)
    how = settings(
        "fedavg", fedavg={"replacement": False}, **small(clients, clients, steps=1, batch_size=2, local_lr=rate)
    )
    curvature = problem.curvature
    noise = curvature**2 * problem.client_variances.mean(axis=0) / 2 / clients
    expected = np.sum(0.5 * curvature * rate**2 * noise / (1 - (1 - rate * curvature) ** 2))
    found = excess(problem, tail(problem, how, rounds=1000, skip=200))
    assert found == pytest.approx(expected, rel=0.1)


def excess_at_two_rates(name: str, problem: LeastSquares, rounds: int) -> list[float]:
    """Return the stationary excess of an algorithm at a rate and at a quarter of it, trained in shared batches."""
    kind, runs = ALGORITHMS[name], []
    for scale in (1.0, 0.25):
        # Without a global rate a job counts as one step (FAVANO), without a local one it is one (AsySG).
        local = (0.02 if kind.uses_global_lr else 0.2) * scale if kind.uses_local_lr else 1.0
        overall = 0.5 if kind.uses_local_lr else 0.04 * scale
        task = problem.task
        if kind.server_optimizer != "sgd":  # an adaptive step does not depend on the scale of the updates
            local, overall = 0.02, 0.2 * scale
        elif scale < 1.0:  # the first run shows the convergence from far away; a slow one would take long
            task = replace(task, model=partial(Scale, len(problem.optimum), problem.optimum))
        # Background uploads of jobs that are shorter than transfers make updates too stale for these rates.
        clients = {"step_seconds": 0.05} if kind.policy.background_upload else {}
        shape = small(8, 2, steps=4, batch_size=1, local_lr=local, global_lr=overall, clients=clients)
        runs.append(Simulation(settings(name, **shape, stop={"max_rounds": rounds, "eval_every_rounds": 1}), 0, task))
    first, need = runs[0].executor, sum(run.executor.state_need(rounds) for run in runs)
    trainer = Trainer(
        problem.task, first.module, batch_size=1, local_training=first.local_training, state=StateNeed(need, need)
    )
    for _ in run_batched(iter([run.batched_run() for run in runs]), trainer):
        pass
    kept = [[found.loss for found in run.progress.evaluations if found.round > rounds // 3] for run in runs]
    return [float(np.mean(losses)) - problem.minimum for losses in kept]  # the loss on all samples is F


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_reaches_a_neighbourhood_in_proportion_to_its_rate(name: str) -> None:
    """The stationary excess of SGD is proportional to its rate: a quarter of the rate gives a quarter of the excess.

    The noise of coordinates is independent, so that a mean over many needs few rounds. The adaptive steps of one
    coordinate depend on its first gradients for long.
    """
    adaptive = ALGORITHMS[name].server_optimizer != "sgd"
    dimension, rounds = (4, 2400) if adaptive else (32, 600)
    problem = least_squares(8, dimension=dimension, samples_per_client=30, seed=2, start=3.0)
    first = problem.value(np.full(dimension, 3.0)) - problem.minimum
    found = excess_at_two_rates(name, problem, rounds)
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
    return problem, small(10, 2, steps=2, local_lr=0.05, clients={"trace": str(path), "model_megabytes": 0.0})


def test_fedbuff_is_biased_towards_fast_clients_and_defedavg_niid_is_not(
    unequal: tuple[LeastSquares, dict[str, Any]],
) -> None:
    problem, shape = unequal

    def bias(name: str, **own: Any) -> np.ndarray[Any, Any]:
        versions = tail(problem, settings(name, **shape, **({name: own} if own else {})), rounds=1500, skip=300)
        return np.asarray(versions.mean(axis=0) - problem.optimum)

    # Fast clients send five updates for each update of the slow ones: 5/6 · (+1) + 1/6 · (−1) = 2/3.
    assert bias("fedbuff") == pytest.approx(np.full(3, 2 / 3), abs=0.08)
    assert np.abs(bias("fedavg")).max() < 0.08
    for mode in ("eager", "thrifty"):
        assert np.abs(bias("defedavg-niid", mode=mode)).max() < 0.08
