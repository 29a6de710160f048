"""State vectors in the executors: starts, corrections, any batch, the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from defedavg import simulate
from defedavg.algorithms import register
from defedavg.algorithms.protocol import StateSpec, StateVector
from defedavg.config.build import make_executor, make_plan
from defedavg.experiments.checkpointing import read_checkpoint, write_checkpoint
from defedavg.experiments.simulation import Simulation
from defedavg.training import (
    EvalCounters,
    EvalResult,
    Evaluation,
    PendingEval,
    RunState,
    Trainer,
    run_batched,
    state_memory,
)
from defedavg.training.state_memory import StateMemory
from defedavg.training.state_vectors import StateLayout, StateVectors
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
from helpers.settings_tables import settings
from helpers.small_runs import batched_run, final_versions, how, reference, task_of
from helpers.stateful_algorithms import CORRECTION, GAIN, KEPT, Corrected
from helpers.stateful_algorithms import START as MIXED

pytestmark = pytest.mark.usefixtures("registry")


def test_a_mixed_start_and_a_correction_are_those_of_the_definition() -> None:
    register(Corrected)
    plan, found = product_run("corrected")
    model, drift = dict.fromkeys(range(CLIENTS), START), dict.fromkeys(range(CLIENTS), 0.0 * START)
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


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ["corrected", "mifa"])
@pytest.mark.parametrize("model", ["mlp", "cnn", "residual"])
def test_both_executors_agree_and_the_width_of_a_batch_changes_nothing(name: str, model: str) -> None:
    register(Corrected)
    task, chosen = task_of(model), how(name, server_optimizer="momentum", server_momentum=0.5)
    expected = reference(chosen, task, 50)
    (found,) = final_versions([batched_run(chosen, task, 50)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-10
    (found,) = final_versions([batched_run(chosen, task, 12)], task, 64)
    for width in (1, 2, 5):
        (same,) = final_versions([batched_run(chosen, task, 12)], task, width)
        assert torch.equal(same, found)


def test_the_vectors_of_both_executors_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateVectors, "clear", lambda state: None)  # otherwise the end of a run frees them
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


@pytest.mark.parametrize("algorithm", ["fedbuff", "mifa"])
def test_a_run_that_reaches_its_target_discards_what_was_merged_past_it(algorithm: str) -> None:
    base: dict[str, Any] = {"task": {"model": "softmax"}, "clients": {"num_clients": 20}}
    rates = {"local_lr": 0.003, "server_optimizer": "momentum", "server_momentum": 0.5}
    training = {"updates_per_round": 4, "local_steps": 5, **rates}
    chosen = settings(algorithm, **base, training=training, stop={"target_accuracy": 0.4, "max_rounds": 60})
    plain, fast = Simulation(chosen, 0), Simulation(chosen, 0)
    expected = list(plain)
    assert 3 < len(expected) < 60
    trainer = Trainer(fast.task, fast.executor.module, max_batch_jobs=64)
    batched, ahead = fast.batched_run(), 0
    record = batched.record

    def recorded(pending: PendingEval, result: EvalResult) -> Evaluation | None:
        nonlocal ahead
        ahead = batched.newest - pending.round
        return record(pending, result)

    batched.record = recorded  # type: ignore[method-assign]
    for _ in run_batched([batched], trainer):
        pass
    assert ahead > 0 or algorithm == "mifa"  # a synchronous run cannot merge ahead
    assert [(e.round, e.accuracy) for e in fast.progress.evaluations] == [(e.round, e.accuracy) for e in expected]
    assert batched.newest == expected[-1].round
    assert torch.allclose(fast.weights, plain.weights, rtol=1e-4, atol=1e-6)
    assert batched.reference.state.assigned() == {}


@pytest.mark.parametrize("executor", ["batched", "reference"])
def test_simulate_returns_the_result_of_an_algorithm_with_state(executor: str) -> None:
    register(Corrected)
    task = task_of("mlp")
    chosen = {"training.updates_per_round": 3, "training.local_steps": 4, "stop.max_rounds": 12}
    result = simulate("corrected", task=task, settings=chosen, executor=executor)
    assert (result.status, result.rounds) == ("max_rounds", 12)
    assert result.plan.header.correction == Corrected.correction
    assert result.plan.hash() == make_plan(settings("corrected", **tables(chosen)), 0, 12).hash()
    assert all(bool(value.isfinite().all()) for value in result.state_dict().values())


def tables(chosen: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"clients": {"num_clients": 6}}
    for name, value in chosen.items():
        table, _, key = name.partition(".")
        found.setdefault(table, {})[key] = value
    return found


# Host memory. On the CPU it is that of the model, so every step but the pinning is the same.


@pytest.mark.parametrize("name", ["corrected", "mifa"])
def test_vectors_in_host_memory_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(Corrected)
    task, chosen = task_of("mlp"), how(name, server_optimizer="adam")
    (expected,) = final_versions([batched_run(chosen, task, 30)], task, 5)
    rows = record_rows(monkeypatch)
    monkeypatch.setattr(StateMemory, "within", lambda *_: StateMemory(8, 1000, 1000, on_device=2))
    monkeypatch.setattr(state_memory, "CHUNK_BYTES", 3 * expected.nbytes)
    run = batched_run(chosen, task, 30)
    (found,) = final_versions([run], task, 5)
    assert torch.equal(found, expected)
    assert len(rows) > 3  # some chunks
    assert len({row.untyped_storage().data_ptr() for row in rows}) > 1


def record_rows(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return a list of the rows that are taken from now on."""
    rows: list[torch.Tensor] = []
    take = StateMemory.take_row

    def taken(memory: StateMemory, like: torch.Tensor) -> torch.Tensor:
        rows.append(take(memory, like))
        return rows[-1]

    monkeypatch.setattr(StateMemory, "take_row", taken)
    return rows


def vectors(memory: StateMemory) -> StateVectors:
    layout = StateLayout((StateSpec("sum"), StateSpec("last", 9, per_client=True)))
    state = StateVectors(layout, torch.zeros(4))
    state.place(memory)
    return state


def test_rows_are_used_again_and_shared_vectors_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = record_rows(monkeypatch)
    memory = StateMemory(16, 100, 10, on_device=2)
    state = vectors(memory)
    for turn in range(3):
        for client in range(5):
            state[StateVector("last", client)] = torch.full((4,), 10.0 * turn + client)
        state[StateVector("sum")] = torch.full((4,), -1.0)
        state.release()
    assert len(rows) == 3  # clients 2, 3 and 4; an assignment uses the row that the vector has
    for client in range(5):
        value = state[StateVector("last", client)]
        assert value is not None
        assert value.tolist() == [20.0 + client] * 4
    assert not any(state[StateVector("sum")] is row for row in rows)
    kept = {row.data_ptr() for row in rows}
    state.clear()
    assert state.assigned() == {}
    again = vectors(memory)
    for client in range(5):
        again[StateVector("last", client)] = torch.ones(4)
    assert {row.data_ptr() for row in rows[3:]} == kept


def test_a_value_that_was_read_does_not_change_when_its_row_is_used_again() -> None:
    state = vectors(StateMemory(16, 100, 10, on_device=0))
    state[StateVector("last", 3)] = torch.ones(4)
    state.release()
    before = state[StateVector("last", 3)]
    state.release()
    state[StateVector("last", 3)] = torch.full((4,), 2.0)
    assert before is not None
    assert before.tolist() == [1.0] * 4


def test_a_snapshot_on_the_host_is_not_changed_by_later_merges() -> None:
    state = vectors(StateMemory(16, 100, 10, on_device=0))
    state[StateVector("last", 3)] = torch.ones(4)
    kept = RunState(EvalCounters(), 0, None, None, {}, state=state.assigned()).on_host()
    state[StateVector("last", 3)] = torch.full((4,), 2.0)
    assert kept.state[StateVector("last", 3)].tolist() == [1.0] * 4


def test_zero_takes_no_memory_and_the_initial_model_is_zero_only_when_it_is_assigned() -> None:
    layout = StateLayout((StateSpec("model", 3, "model", per_client=True), StateSpec("last", 3, per_client=True)))
    memory = StateMemory(16, 100, 10, on_device=1)
    state = StateVectors(layout, torch.ones(4))
    state.place(memory)
    state[StateVector("last", 0)] = torch.ones(4)
    state[StateVector("last", 1)] = torch.ones(4)
    state[StateVector("last", 0)] = None
    assert state[StateVector("last", 0)] is None
    state[StateVector("model", 1)] = None  # takes the free place on the device
    assert [vector.name for vector in state.assigned()] == ["model", "last"]
    zero, model = state[StateVector("model", 1)], state[StateVector("model", 2)]
    assert zero is not None
    assert model is not None
    assert (zero.tolist(), model.tolist()) == ([0.0] * 4, [1.0] * 4)


def test_a_checkpoint_of_rows_is_written_and_read(tmp_path: Path) -> None:
    state = vectors(StateMemory(16, 100, 10, on_device=1))
    for client in range(5):
        state[StateVector("last", client)] = torch.full((4,), float(client))
    saved = RunState(EvalCounters(), 0, None, None, {0: torch.zeros(4)}, state=state.assigned())
    write_checkpoint(tmp_path / "x.safetensors", saved.to_json(), dict(saved.tensors()))
    found = RunState.from_json(*read_checkpoint(tmp_path / "x.safetensors"))
    other = vectors(StateMemory(16, 100, 10, on_device=3))
    other.restore(found.state)
    assert {vector.index: value.tolist() for vector, value in other.assigned().items()} == {
        client: [float(client)] * 4 for client in range(5)
    }
