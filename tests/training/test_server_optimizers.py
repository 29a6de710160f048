"""Server optimisers against plain NumPy, written from their definitions, for several kinds of merges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from defedavg.algorithms import ALGORITHMS
from defedavg.algorithms.protocol import Merge
from defedavg.config.build import local_training, make_executor
from defedavg.config.study import study
from defedavg.config.unused_settings import unused_settings
from defedavg.errors import UserError
from defedavg.planning.plan import Plan
from defedavg.runstore.reader import flat_settings
from defedavg.training.server_optimizers import FIRST, LARGEST, SECOND
from helpers.command_line import call, refuse
from helpers.oracle_runs import GLOBAL_LR, PROBLEM, START, Vector, assert_versions, delta, product_run
from helpers.settings_tables import settings, small
from helpers.small_runs import batched_run, final_versions, how, reference, task_of

MU, BETA2, EPSILON = 0.8, 0.95, 0.01
Step = Callable[[Vector], Vector]


def momentum() -> Step:
    m = np.zeros_like(START)

    def step(g: Vector) -> Vector:
        nonlocal m
        m = MU * m + g
        return m

    return step


def nesterov() -> Step:
    m = np.zeros_like(START)

    def step(g: Vector) -> Vector:
        nonlocal m
        m = MU * m + g
        return g + MU * m

    return step


def adaptive(second: Callable[[Vector, Vector], Vector], keep_largest: bool = False) -> Step:
    """Return m / (√v + ε) with the rule for v; ``keep_largest`` divides by the largest v so far instead."""
    m, v, largest = np.zeros_like(START), np.zeros_like(START), np.zeros_like(START)

    def step(g: Vector) -> Vector:
        nonlocal m, v, largest
        m, v = MU * m + (1 - MU) * g, second(v, g**2)
        largest = np.maximum(largest, v)
        return m / (np.sqrt(largest if keep_largest else v) + EPSILON)

    return step


def adam_v(v: Vector, square: Vector) -> Vector:
    return BETA2 * v + (1 - BETA2) * square


OPTIMIZERS: dict[str, Callable[[], Step]] = {
    "momentum": momentum,
    "nesterov": nesterov,
    "adagrad": lambda: adaptive(lambda v, square: v + square),
    "adam": lambda: adaptive(adam_v),
    "amsgrad": lambda: adaptive(adam_v, keep_largest=True),
    # Where v is smaller than g², it grows; where it is larger, it shrinks; both by (1 − β₂)·g².
    "yogi": lambda: adaptive(lambda v, square: np.where(v < square, v + 0.05 * square, v - 0.05 * square)),
}
RATES = {"momentum": 0.2, "nesterov": 0.2, "adagrad": 0.1, "adam": 0.02, "amsgrad": 0.02, "yogi": 0.02}


def mean_update(merge: Merge, w: list[Vector]) -> Vector:
    """Return the pseudo-gradient of FedAvg and FedBuff, the weighted mean of the updates."""
    counts = np.array([-b for _, b in merge.updates])
    return np.asarray(np.average([delta(w[u.version], u.client) for u, _ in merge.updates], axis=0, weights=counts))


def difference(merge: Merge, w: list[Vector]) -> Vector:
    """Return the pseudo-gradient of FAVANO: w[t] − (w[t] + Σ (w[τ] − Δ/α)) / (n + 1)."""
    size = len(merge.updates) + 1
    total = w[-1].copy()
    for u, b in merge.updates:  # |b| is 1 / ((n + 1)·α)
        total += w[u.version] + b * size * delta(w[u.version], u.client, u.steps)
    return w[-1] - total / size


GRADIENTS: dict[str, Callable[[Merge, list[Vector]], Vector]] = {
    "fedavg": mean_update,
    "fedbuff": mean_update,
    "favano": difference,
}


def oracle(plan: Plan, name: str, optimizer: str, rate: float) -> list[Vector]:
    w, step = [START], OPTIMIZERS[optimizer]()
    for record in plan.rounds:
        w.append(w[-1] - rate * step(GRADIENTS[name](record.merge, w)))
    return w


def options(optimizer: str, **more: Any) -> dict[str, Any]:
    constants = {"server_momentum": MU, "server_beta2": BETA2, "server_epsilon": EPSILON}
    return {"server_optimizer": optimizer, **constants, **more}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_every_optimiser_equals_its_definition(name: str, optimizer: str) -> None:
    rate = RATES[optimizer]  # also of FAVANO, which has no global rate of its own
    plan, found = product_run(name, **options(optimizer, global_lr=rate))
    assert_versions(found, oracle(plan, name, optimizer, rate))


@pytest.mark.parametrize("optimizer", ["momentum", "nesterov"])
@pytest.mark.parametrize("name", [*GRADIENTS, "area", "quafl", "mifa"])
def test_momentum_zero_is_no_optimiser(name: str, optimizer: str) -> None:
    rate = GLOBAL_LR if ALGORITHMS[name].uses_global_lr else 1.0
    _, plain = product_run(name, global_lr=rate)
    _, found = product_run(name, server_optimizer=optimizer, server_momentum=0.0, global_lr=rate)
    assert_versions(found, plain)


def test_a_step_goes_down() -> None:
    """The sign: every optimiser approaches the minimum, the mean of the clients' means."""
    target = PROBLEM.client_means.mean(axis=0)
    for optimizer, rate in RATES.items():
        _, found = product_run("fedavg", n=7, own={"replacement": False}, **options(optimizer, global_lr=rate))
        assert np.linalg.norm(found[-1] - target) < 0.5 * np.linalg.norm(START - target)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_batched_executor_takes_the_same_steps(optimizer: str) -> None:
    task, chosen = task_of("mlp"), how("fedbuff", **options(optimizer, global_lr=RATES[optimizer]))
    expected = reference(chosen, task, 30)
    (found,) = final_versions([batched_run(chosen, task, 30)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-10


def test_an_algorithm_brings_its_optimiser_and_the_setting_replaces_it() -> None:
    tables = small(7, 3)
    assert make_executor(settings("fadas", **tables), 0, PROBLEM.task).local_training.server.name == "amsgrad"
    plain = small(7, 3, server_optimizer="sgd")
    assert make_executor(settings("fadas", **plain), 0, PROBLEM.task).local_training.server.name == "sgd"
    _, fadas = product_run("fadas", server_optimizer="sgd")
    _, fedbuff = product_run("fedbuff")
    assert_versions(fadas, fedbuff)


def test_amsgrad_keeps_three_vectors_and_its_largest_never_decreases() -> None:
    how_ = settings("fedbuff", **small(7, 3, **options("amsgrad", server_beta2=0.5, global_lr=0.02)))
    executor = make_executor(how_, 0, PROBLEM.task)
    plan, _ = product_run("fedbuff")
    before = torch.zeros_like(executor.versions[0])
    smaller = False
    for record in plan.rounds:
        executor.apply(record)
        largest, second = executor.state[LARGEST], executor.state[SECOND]
        assert largest is not None
        assert second is not None
        assert bool((largest >= before).all())
        smaller |= bool((second < largest).any())
        before = largest
    assert smaller
    assert set(executor.state.assigned()) == {FIRST, SECOND, LARGEST}


def test_a_server_optimiser_uses_the_global_rate_of_an_algorithm_that_has_none() -> None:
    plain, chosen = settings("favano"), settings("favano", training={"server_optimizer": "adam", "global_lr": 0.01})
    assert not plain.uses_global_lr
    assert chosen.uses_global_lr
    assert local_training(chosen, 0).global_lr == 0.01
    assert flat_settings(chosen)["training.global_lr"] == 0.01
    assert "training.global_lr" not in flat_settings(plain)
    scheduled = {"server_optimizer": "adam", "global_schedule": "cosine(50)"}
    assert settings("favano", training=scheduled).training.global_schedule == "cosine(50)"
    with pytest.raises(UserError, match=r"favano cannot use training.global_schedule"):
        settings("favano", training={"global_schedule": "cosine(50)"})


def test_only_constants_without_effect_are_named() -> None:
    def lines(**tables: Any) -> list[str]:
        return unused_settings(study({"algorithms": ["favano"], **tables}))

    rate = {"global_lr": 0.5}
    assert lines(training=rate) == ["training.global_lr has no effect: favano does not use it"]
    assert lines(training={**rate, "server_optimizer": "momentum"}) == []
    assert lines(training=rate, favano={"server_optimizer": "adam"}) == []
    beta = {"server_beta2": 0.5}
    assert lines(training=beta, favano={"server_optimizer": "adam"}) == []
    (line,) = lines(training={**beta, "server_optimizer": "momentum"})
    assert line == "training.server_beta2 has no effect: the server optimiser momentum does not use it"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("server_optimizer=adamw", ("server_optimizer", "adamw", "adam")),
        ("server_momentum=1.0", ("training.server_momentum is 1.0", "below 1")),
        ("server_momentum=-0.1", ("training.server_momentum is -0.1", "below 1")),
        ("server_beta2=1.5", ("training.server_beta2 is 1.5", "below 1")),
        ("server_epsilon=0.0", ("training.server_epsilon is 0.0", "above zero")),
    ],
)
def test_values_that_make_no_sense_are_refused(tmp_path: Path, setting: str, words: tuple[str, ...]) -> None:
    (tmp_path / "study.toml").write_text('algorithms = ["fedavg"]\n', encoding="utf-8")
    refuse(call("run", "study.toml", "--set", f"training.{setting}", cwd=tmp_path), *words)
