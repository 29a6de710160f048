"""Options of algorithms with state against independent oracles: quantised messages, concurrency, server optimisers.

An oracle takes from the plan only which updates are merged when, and from which version each of them started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from defedavg.algorithms import ALGORITHMS
from defedavg.config.build import make_executor
from defedavg.planning.plan import Plan
from defedavg.rng import extend_all, key, uniform_all
from helpers.oracle_runs import (
    CLIENTS,
    GLOBAL_LR,
    LOCAL_LR,
    PROBLEM,
    START,
    STEPS,
    Vector,
    assert_versions,
    delta,
    product_run,
)
from helpers.settings_tables import settings, small

# QuAFL with coarse messages. The draws are a part of its definition: their keys are those of the run.


def rounded(value: Vector, bits: int, name: str, slot: int, version: int) -> Vector:
    """Return a message: multiples of the largest value over 2^(bits − 1) − 1, rounded up or down at random."""
    unit = np.abs(value).max() / (2 ** (bits - 1) - 1)
    drawn = uniform_all(extend_all(key(0, f"quantise {name}", slot, version), np.arange(len(value))))
    return value if unit == 0 else np.floor(value / unit + drawn) * unit


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_quafl_mixes_quantised_messages(bits: int) -> None:
    plan, found = product_run("quafl", own={"bits": bits, "wait_seconds": 0.05})
    x = np.tile(START, (CLIENTS, 1))
    w: list[Vector] = [START]
    for record in plan.rounds:
        drawn, version = [update for update, _ in record.merge.updates], record.merge.version
        new = w[-1].copy()
        for slot, update in enumerate(drawn):  # in order of clients
            x[update.client] -= delta(x[update.client], update.client, update.steps)
            new += rounded(x[update.client] - w[-1], bits, "to_server", slot, version) / (len(drawn) + 1)
        for slot, update in enumerate(drawn):
            message = rounded(w[-1] - x[update.client], bits, "to_client", slot, version)
            x[update.client] += message / (len(drawn) + 1)
        w.append(new)
    assert_versions(found, w)


# CA²FL.


def test_ca2fl_whose_caches_are_emptied_after_every_merge_is_fedbuff() -> None:
    plan, expected = product_run("fedbuff")
    chosen = settings("ca2fl", **small(CLIENTS, 3, steps=STEPS, local_lr=LOCAL_LR, global_lr=GLOBAL_LR))
    executor, (calibrated, _) = make_executor(chosen, 0, PROBLEM.task), product_run("ca2fl")
    found = [executor.versions[0].numpy().copy()]
    for record, other in zip(calibrated.rounds, plan.rounds, strict=True):
        assert [u for u, _ in record.merge.updates] == [u for u, _ in other.merge.updates]
        found.append(executor.apply(record).numpy().copy())
        assert executor.state.assigned()
        executor.state.clear()
    assert_versions(found, expected)


# Fewer clients that train concurrently. Every rule returns the versions of a plan.


def sgd(plan: Plan, factor: Callable[[int], float]) -> list[Vector]:
    w: list[Vector] = [START]
    for record in plan.rounds:
        ((update, _),) = record.merge.updates
        staleness = len(w) - 1 - update.version
        w.append(w[-1] - GLOBAL_LR * factor(staleness) * delta(w[update.version], update.client))
    return w


def fedasync(plan: Plan) -> list[Vector]:
    w: list[Vector] = [START]
    for record in plan.rounds:
        ((update, _),) = record.merge.updates
        a = 0.6 / np.sqrt(len(w) - update.version)
        w.append((1 - a) * w[-1] + a * (w[update.version] - delta(w[update.version], update.client)))
    return w


def ace(plan: Plan) -> list[Vector]:
    w, latest = [START], dict[int, Vector]()
    for record in plan.rounds:
        ((update, _),) = record.merge.updates
        latest[update.client] = delta(w[update.version], update.client)
        w.append(w[-1] - GLOBAL_LR * np.mean(list(latest.values()), axis=0))
    return w


def mean_of_models(plan: Plan) -> list[Vector]:
    w, models = [START], np.tile(START, (CLIENTS, 1))
    for record in plan.rounds:
        for update, _ in record.merge.updates:
            models[update.client] = w[update.version] - delta(w[update.version], update.client)
        w.append(models.mean(axis=0))
    return w


def fedfa(plan: Plan) -> list[Vector]:
    w, window = [START], [START] * 5
    for record in plan.rounds:
        ((update, _),) = record.merge.updates
        window = [*window[1:], w[update.version] - delta(w[update.version], update.client)]
        w.append(np.mean(window, axis=0))
    return w


def fadas(plan: Plan) -> list[Vector]:
    w, (m, v, largest) = [START], np.zeros((3, len(START)))
    for record in plan.rounds:
        g = np.mean([delta(w[update.version], update.client) for update, _ in record.merge.updates], axis=0)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        largest = np.maximum(largest, v)
        w.append(w[-1] - GLOBAL_LR * m / (np.sqrt(largest) + 1e-3))
    return w


CONCURRENCY = 3
RULES: dict[str, Callable[[Plan], list[Vector]]] = {
    "fedasync": fedasync,
    "delay-adaptive-sgd": lambda plan: sgd(plan, lambda tau: min(1.0, 2 * CONCURRENCY / max(tau, 1))),
    "ringmaster": lambda plan: sgd(plan, lambda tau: 1.0),
    "ace": ace,
    "area": mean_of_models,
    "asofed": mean_of_models,
    "fedfa": fedfa,
    "fadas": fadas,
}


def test_every_algorithm_with_a_concurrency_is_here_or_with_its_own_oracle() -> None:
    named = {name for name, kind in ALGORITHMS.items() if "concurrency" in kind.settings_type.__dataclass_fields__}
    assert named - set(RULES) == {"fedbuff", "ca2fl"}


@pytest.mark.parametrize("name", RULES)
def test_fewer_clients_train_concurrently(name: str) -> None:
    plan, found = product_run(name, own={"concurrency": CONCURRENCY}, clients={"slowness": "two-speed(0.5, 20)"})
    merged = {(update.client, update.index) for record in plan.rounds for update, _ in record.merge.updates}
    jobs = [job for job in plan.jobs if (job.client, job.index) in merged]
    assert max(sum(job.start <= one.start < job.end for job in jobs) for one in jobs) == CONCURRENCY
    assert_versions(found, RULES[name](plan))


# A server optimiser on the merge of an algorithm with state.


def test_the_pseudo_gradient_of_mifa_is_the_mean_of_the_last_updates() -> None:
    constants: dict[str, Any] = {"server_momentum": 0.8, "server_beta2": 0.95, "server_epsilon": 0.01}
    plan, found = product_run("mifa", server_optimizer="adam", global_lr=0.02, **constants)
    last = np.zeros((CLIENTS, len(START)))
    w, m, v = [START], np.zeros_like(START), np.zeros_like(START)
    for record in plan.rounds:
        for update, _ in record.merge.updates:
            last[update.client] = delta(w[update.version], update.client)
        g = last.mean(axis=0)
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        w.append(w[-1] - 0.02 * m / (np.sqrt(v) + 0.01))
    assert_versions(found, w)


def test_momentum_of_the_server_applies_to_the_mean_of_models() -> None:
    """AREA proposes the mean of all models; the pseudo-gradient is the way to it."""
    plan, found = product_run("area", server_optimizer="momentum", server_momentum=0.5, global_lr=0.3)
    models = np.tile(START, (CLIENTS, 1))
    w, m = [START], np.zeros_like(START)
    for record in plan.rounds:
        change = np.zeros_like(START)
        for update, _ in record.merge.updates:
            model = w[update.version] - delta(w[update.version], update.client)
            change += (model - models[update.client]) / CLIENTS
            models[update.client] = model
        m = 0.5 * m - change
        w.append(w[-1] - 0.3 * m)
    assert_versions(found, w)
