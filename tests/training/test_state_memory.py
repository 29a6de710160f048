"""How memory is divided between training and state vectors, and what happens where they do not fit."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from defedavg import simulate
from defedavg.config.build import make_fleet, make_plan, state_need
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import RunFinished, RunSpec
from defedavg.experiments.simulation import Simulation
from defedavg.experiments.sweep import Sweep
from defedavg.experiments.tune import Tuning, pairs_of
from defedavg.planning.plan_stats import summarise
from defedavg.training import Evaluation, Trainer, memory, run_batched, state_memory
from defedavg.training.state_memory import StateMemory, StateNeed
from helpers.command_line import call, refuse
from helpers.interrupted_studies import InterruptionError, study
from helpers.settings_tables import settings
from helpers.small_runs import batched_run, final_versions, how, task_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STUDY = (
    'algorithms = ["fedavg", "mifa"]\n[task]\nmodel = "softmax"\n[clients]\nnum_clients = 200\n'
    "[training]\nlocal_steps = 2\nupdates_per_round = 3\n[stop]\nmax_rounds = {}\n"
)


@pytest.mark.parametrize("executor", ["batched", "reference"])
def test_state_that_cannot_fit_is_refused_before_anything_is_written(executor: str, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY.format(400))
    done = call("run", "study.toml", "--memory", "3M", "--executor", executor, cwd=tmp_path)
    refuse(
        done,
        "mifa keeps 201 state vectors of 30.7 KiB: 6.02 MiB; only ",
        " may be used for them; give more with --memory, or use fewer clients or a smaller model",
    )
    assert not (tmp_path / "runs").exists()


def test_a_run_that_is_too_short_to_use_all_vectors_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY.format(5))  # 15 clients at most
    assert call("run", "study.toml", "--memory", "8M", cwd=tmp_path).returncode == 0


def test_tuning_counts_all_runs_that_are_compared(tmp_path: Path) -> None:
    text = STUDY.format(400).replace('"fedavg", ', "").replace("[stop]", "[stop]\ntarget_accuracy = 0.9")
    (tmp_path / "study.toml").write_text(text)
    words = ("tune", "study.toml", "--memory", "30M", "--global-rates", "0.5,1", "--local-rates", "0.01,0.1,0.2")
    refuse(call(*words, cwd=tmp_path), "mifa, in 6 runs that are compared, keeps 1,206 state vectors")


def test_tuning_with_state_gives_the_same_however_many_runs_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = {"target_accuracy": 0.8, "max_rounds": 24, "eval_every_rounds": 2}
    chosen = study(algorithms=["mifa"], stop=stop)
    pairs = pairs_of(chosen.points(), (0.5, 1.0), (0.0001, 0.01, 0.1))

    def records() -> list[dict[str, Any]]:
        tuning = Tuning(pairs, chosen.seeds, ComputeConfig(max_batch_jobs=64))
        assert tuning.run(lambda event: None)
        return tuning.records()

    make = Simulation.batched_run  # results of a paused run count when it continues, in whatever batch it was computed
    monkeypatch.setattr(Simulation, "batched_run", lambda run: replace(make(run), defer_results=True))
    expected = records()
    assert sum(record["status"] == "dropped" for record in expected) >= 6
    monkeypatch.setattr(StateMemory, "within", lambda *_: StateMemory(8, 1000, reserved=21, on_device=5))
    assert records() == expected


def test_simulate_refuses_state_that_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free", lambda device: 4 << 20)
    chosen = {"task.model": "softmax", "clients.num_clients": 200, "training.updates_per_round": 3}
    for executor in ("batched", "reference"):
        with pytest.raises(UserError, match="mifa keeps 201 state vectors"):
            simulate("mifa", settings=chosen, executor=executor)


@given(
    vector=st.integers(1, 10**7),
    allowed=st.integers(1, 10**11),
    training=st.integers(1, 10**9),
    together=st.integers(0, 10**5),
    more=st.integers(0, 10**6),
    host=st.integers(0, 10**11),
    cuda=st.booleans(),
)
def test_state_and_training_fit_together(
    vector: int, allowed: int, training: int, together: int, more: int, host: int, cuda: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_memory, "free", lambda device: host)
        need = StateNeed(together, together + more)
        found = StateMemory.within(CUDA if cuda else CPU, vector, allowed, training, need)
    assert found.device_bytes + training <= max(allowed, training)
    assert found.reserved <= min(found.capacity, need.all_runs)
    assert found.reserved >= min(found.capacity, need.together)
    if cuda:
        assert found.on_device is not None
        assert found.device_bytes <= allowed / 2
        assert (found.reserved - found.on_device) * vector <= host / 2
    else:
        assert found.on_device is None
        assert found.capacity * vector <= allowed


def test_ten_thousand_caches_fit_into_20_gigabytes_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_memory, "free", lambda device: 100 << 30)
    vector, need = 2_328_104, StateNeed(10_001, 10_001)
    found = StateMemory.within(CUDA, vector, 20 << 30, 50 << 20, need)
    found.check("mifa", 10_001)
    assert found.on_device is not None
    assert 4_000 < found.on_device < 5_000
    assert StateMemory.within(CUDA, vector, 20 << 30, 50 << 20, StateNeed(101, 303)).on_device == 303


def test_state_leaves_less_for_batches() -> None:
    task = task_of("cnn")
    module = batched_run(how("mifa"), task, 1).reference.module
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    plain = Trainer(task, module, memory=1 << 20)
    other = Trainer(task, module, memory=1 << 20, state=StateNeed(7, (1 << 19) // size))
    assert other.max_pending_updates < plain.max_pending_updates
    assert other.state_memory.reserved * size <= 1 << 19


def test_runs_wait_for_each_other_and_give_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    task, chosen = task_of("mlp"), how("mifa")
    expected = final_versions([batched_run(chosen, task, 10, seed) for seed in range(4)], task, 64)
    need = batched_run(chosen, task, 10).state_need
    assert need == 7
    runs = [batched_run(chosen, task, 10, seed) for seed in range(4)]
    trainer = Trainer(task, runs[0].reference.module, max_batch_jobs=64)
    trainer.state_memory = StateMemory(8, 1000, reserved=2 * need)
    most, begun = 0, 0

    def hook() -> None:
        nonlocal most, begun
        active = [run for run in runs if run.schedule.started and run.state_need]
        begun = max(begun, sum(run.schedule.started for run in runs))
        most = max(most, len(active))

    for _ in run_batched(iter(runs), trainer, (), hook):
        pass
    assert (most, begun) == (2, 4)
    for run, truth in zip(runs, expected, strict=True):
        assert torch.equal(run.reference.versions[run.newest], truth)
        assert run.reference.state.assigned() == {}  # a run that ended keeps nothing


def test_a_run_without_state_does_not_wait() -> None:
    task = task_of("mlp")
    runs = [batched_run(how(name), task, 10) for name in ("mifa", "fedavg", "mifa")]
    trainer = Trainer(task, runs[0].reference.module, max_batch_jobs=64)
    trainer.state_memory = StateMemory(8, 1000, reserved=7)
    order = [runs.index(run) for run, evaluation in run_batched(iter(runs), trainer) if evaluation is not None]
    assert set(order) == {0, 1, 2}
    assert order.index(1) < order.index(2)


def test_paused_runs_do_not_stop_those_that_wait_for_memory() -> None:
    task = task_of("mlp")
    runs = [batched_run(how("mifa"), task, 6, seed) for seed in range(3)]
    trainer = Trainer(task, runs[0].reference.module, max_batch_jobs=64)
    trainer.state_memory = StateMemory(8, 1000, reserved=7)
    started = []
    for run, _ in run_batched(iter(runs), trainer):
        if run not in started:
            started.append(run)
            run.held = len(started) < 3
            if len(started) == 3:
                for other in runs:
                    other.held = False
    assert len(started) == 3
    assert all(not run.running for run in runs)


def test_runs_that_must_be_in_progress_together_and_do_not_fit_are_one_line() -> None:
    task = task_of("mlp")
    runs = [batched_run(how("mifa"), task, 6, seed) for seed in range(3)]
    trainer = Trainer(task, runs[0].reference.module, max_batch_jobs=64)
    trainer.state_memory = StateMemory(8, 15, reserved=7)

    def all_paused() -> None:
        for run, _ in run_batched(iter(runs), trainer):
            run.held = True

    with pytest.raises(UserError, match="mifa, with the 2 runs that wait for it, keeps 21 state vectors"):
        all_paused()


def test_a_run_that_waits_for_memory_can_be_checkpointed_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = study(algorithms=["mifa"], seeds=[0, 1, 2])
    (point,) = chosen.points()
    items = [RunSpec(point, point.settings, seed) for seed in (0, 1, 2)]
    compute = ComputeConfig(max_batch_jobs=64)
    truth = {event.spec: event.run.weights for event in Sweep(compute).events(items) if isinstance(event, RunFinished)}
    need = state_need(point.settings, 0)
    monkeypatch.setattr(StateMemory, "within", lambda *_: StateMemory(8, 1000, reserved=need))
    calls = 0

    def hook() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise InterruptionError

    sweep, evaluations = Sweep(compute, hook), {item: list[Evaluation]() for item in items}
    with suppress(InterruptionError):
        for event in sweep.events(items):
            assert not isinstance(event, RunFinished)
            evaluations[event.spec].append(event.evaluation)
    states = sweep.run_states()
    assert len(states) == 2  # one in progress, one that waits
    again = Sweep(compute)
    resumed = {spec: (state, evaluations[spec]) for spec, state in states.items()}
    for event in again.events(items, resumed, sweep.batch_limits):
        if isinstance(event, RunFinished):
            assert torch.equal(event.run.weights, truth.pop(event.spec))
    assert not truth


def test_a_plan_says_how_much_state_it_needs(tmp_path: Path) -> None:
    chosen = settings("mifa", clients={"num_clients": 30}, training={"updates_per_round": 3})
    plan = make_plan(chosen, 0, 4)
    assert plan.header.state_vectors == 31
    clients = {update.client for record in plan.rounds for update, _ in record.merge.updates}
    stats = summarise(plan, make_fleet(chosen, 0))
    assert (stats.state_vectors, stats.state_peak) == (31, 1 + len(clients))
    words = ("plan", "--rounds", "4", "--set", "clients.num_clients=30", "--set", "training.updates_per_round=3")
    options = ("--set", "training.server_optimizer='adam'", "--set", "clients.model_megabytes=2")
    done = call(*words, *options, "--set", "algorithms=['mifa', 'fedbuff']", "--json", cwd=tmp_path)
    mifa, fedbuff = json.loads(done.stdout)
    found = [(each["state_vectors"], each["state_peak"], each["state_bytes"]) for each in (mifa, fedbuff)]
    assert found == [(33, 3 + len(clients), 2e6 * (3 + len(clients))), (2, 2, 4e6)]
    table = call(*words, "--set", "algorithms=['mifa', 'fedbuff']", cwd=tmp_path).stdout
    assert f"{1 + len(clients)} × 2.2 MB" in table
    assert "state" not in call(*words, "--set", "algorithms=['fedbuff']", cwd=tmp_path).stdout
