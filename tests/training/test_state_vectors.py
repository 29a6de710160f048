"""State vectors in the executors: starts, corrections, any batch, the end of a run."""

from __future__ import annotations

import pytest
import torch

from defedavg.algorithms import register
from defedavg.config.build import make_executor, make_plan
from helpers.oracle_runs import (
    CLIENTS,
    GLOBAL_LR,
    LOCAL_LR,
    START,
    STEPS,
    D,
    M,
    Vector,
    assert_versions,
    product_run,
)
from helpers.small_runs import batched_run, final_versions, how, reference, task_of
from helpers.stateful_algorithms import CORRECTION, GAIN, KEPT, Corrected
from helpers.stateful_algorithms import START as MIXED

pytestmark = pytest.mark.usefixtures("registry")


def test_a_mixed_start_and_a_correction_are_those_of_the_definition() -> None:
    register(Corrected)
    plan, found = product_run("corrected")
    model, drift = {c: START for c in range(CLIENTS)}, {c: 0.0 * START for c in range(CLIENTS)}
    w: list[Vector] = [START]
    for record in plan.rounds:
        deltas = {}
        for update, _ in record.merge.updates:
            client = update.client
            begun = x = MIXED * w[update.version] + (1 - MIXED) * model[client]
            for _ in range(STEPS):
                x = x - LOCAL_LR * (D * (x - M[client]) + CORRECTION * drift[client])
            deltas[client] = begun - x
        w.append(w[-1] - GLOBAL_LR * sum(deltas.values()) / len(deltas))
        for client, delta in deltas.items():
            drift[client] = GAIN * delta + KEPT * drift[client]
            model[client] = MIXED * w[-1] + (1 - MIXED) * model[client]
    assert_versions(found, w)


@pytest.mark.parametrize("name", ["corrected", "mifa"])
@pytest.mark.parametrize("model", ["mlp", "cnn", "residual"])
def test_both_executors_agree_and_the_width_of_a_batch_changes_nothing(name: str, model: str) -> None:
    register(Corrected)
    task, chosen = task_of(model), how(name, server_optimizer="momentum", server_momentum=0.5)
    expected = reference(chosen, task, 50)
    (found,) = final_versions([batched_run(chosen, task, 50)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-10
    for width in (1, 2, 5):
        (same,) = final_versions([batched_run(chosen, task, 50)], task, width)
        assert torch.equal(same, found)


def test_the_vectors_of_both_executors_agree() -> None:
    register(Corrected)
    chosen, task = how("corrected"), task_of("mlp")
    run = batched_run(chosen, task, 20)
    final_versions([run], task, 64)
    executor = make_executor(chosen, 0, task)
    for record in make_plan(chosen, 0, 20).rounds:
        executor.apply(record)
    one, other = executor.state.assigned(), run.reference.state.assigned()
    assert one.keys() == other.keys()
    assert {vector.name for vector in one} == {"model", "drift"}
    for vector, value in one.items():
        assert torch.allclose(value, other[vector], rtol=1e-10, atol=1e-12)
