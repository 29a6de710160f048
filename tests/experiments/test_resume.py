"""A run that is interrupted at any moment and resumed gives bit-identical results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from defedavg.algorithms import ALGORITHMS, register
from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments import checkpointing
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import ResumedRun, RunFinished, RunSpec
from defedavg.experiments.simulation import Simulation
from defedavg.experiments.study_run import StudyRun
from defedavg.experiments.sweep import Sweep
from defedavg.training import RunState
from defedavg.training.state_memory import StateMemory, VectorMemory
from helpers.command_line import call, refuse
from helpers.interrupted_studies import InterruptionError, assert_same, ignore, interrupt_after, study, uninterrupted
from helpers.stateful_algorithms import Corrected

# Real processes, SIGKILL.


SCHEDULED = """
optimizer = "adam"
weight_decay = 0.1
clip_norm = 0.5
augment = "flip"
local_schedule = "inverse-sqrt(0.2)"
global_schedule = "cosine(9)"
schedule_by = "seconds"
"""


SERVER_MOMENTUM = """
server_optimizer = "momentum"
server_momentum = 0.5
"""


@pytest.mark.parametrize(
    ("executor", "seeds", "algorithms", "options"),
    [
        ("batched", "[0, 1]", '"fedavg", "fedbuff", "favano", "asysg", "defedavg-niid"', ""),
        ("reference", "[0]", '"fedavg", "fedbuff", "favano", "asysg", "defedavg-niid"', ""),
        ("batched", "[0, 1]", '"fedavg", "fedbuff", "defedavg-niid"', SCHEDULED),
        ("batched", "[0, 1]", '"mifa", "fedbuff", "fedavg", "asysg", "defedavg-niid"', SERVER_MOMENTUM),
        ("reference", "[0, 1, 2]", '"mifa", "fedbuff", "ca2fl", "fedavg"', SERVER_MOMENTUM),
        ("batched", "[0]", '"ca2fl", "ace", "area", "quafl", "asofed", "fadas", "fedfa", "fedasync"', ""),
    ],
    ids=["batched", "reference", "with options", "state, batched", "state, reference", "every algorithm with state"],
)
def test_twenty_kills_at_random_moments_change_nothing(
    tmp_path: Path, executor: str, seeds: str, algorithms: str, options: str
) -> None:
    (tmp_path / "k.toml").write_text(
        f"algorithms = [{algorithms}]\nseeds = {seeds}\n"
        '[task]\nmodel = "softmax"\nsplit = "classes"\n[clients]\nnum_clients = 20\n'
        f"[training]\nupdates_per_round = 3\nlocal_steps = 4\n{options}[stop]\nmax_rounds = 18\n"
        "eval_every_rounds = 3\n"
    )
    script = Path(__file__).parents[1] / "helpers" / "repeated_kills.py"
    words = [sys.executable, str(script), "k.toml", ".", executor, "20", "0"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 20
    assert found["checkpoints"] > 0  # some processes were killed after a checkpoint
    for number in range(found["studies"]):
        assert_same(tmp_path / "whole", tmp_path / str(number))
        assert not (tmp_path / str(number) / "checkpoints").exists()


def test_a_full_disk_ends_in_one_line_and_loses_nothing(tmp_path: Path) -> None:
    """No file may grow beyond 300 kB: enough for the first checkpoints, not for those of more runs."""
    (tmp_path / "study.toml").write_text(study(stop={"max_rounds": 30}).to_toml())
    words = [sys.executable, "-m", "defedavg", "run", "study.toml", "--checkpoint-every", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    limited = ["bash", "-c", 'ulimit -f 300; exec "$@"', "limited", *words]
    done = subprocess.run(limited, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    refuse(done, "checkpoints", "cannot be written", "too large")
    folder = tmp_path / "runs" / "study"
    assert not list(folder.rglob("*.part"))
    assert call("run", "study.toml", "--resume", cwd=tmp_path).returncode == 0
    assert call("run", "study.toml", "--out", "whole", cwd=tmp_path).returncode == 0
    assert_same(tmp_path / "whole" / "study", folder)


def test_resuming_a_finished_study_keeps_where_its_figures_come_from(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(study(stop={"max_rounds": 2}).to_toml())
    assert call("run", "study.toml", cwd=tmp_path).returncode == 0
    summary = tmp_path / "runs" / "study" / "summary.json"
    before = summary.read_text().replace("defedavg run study.toml", "defedavg run study.toml --memory 3G")
    summary.write_text(before)
    assert call("run", "study.toml", "--resume", cwd=tmp_path).returncode == 0
    assert summary.read_text() == before
    assert "defedavg run study.toml --memory 3G" in (summary.parent / "report.html").read_text()


# Every moment, in one process.


def test_a_checkpoint_of_a_resumed_study_keeps_the_run_in_progress(tmp_path: Path) -> None:
    """AsySG shares no batches with the others, so it runs after them, in every session."""
    chosen, compute = study(algorithms=["fedavg", "asysg", "fedbuff"], seeds=[0]), ComputeConfig("reference")
    whole = uninterrupted(tmp_path / "whole", chosen, compute)
    for after in (9, 2):  # within FedBuff, then at the next event but one
        run = StudyRun(chosen, tmp_path / "part", compute=compute, resume=True, checkpoint_interval=0.0)
        with pytest.raises(InterruptionError):
            run.run(interrupt_after(after))
    assert StudyRun(chosen, tmp_path / "part", compute=compute, resume=True).run(ignore)
    assert_same(whole, tmp_path / "part")


def run_until_hook(
    items: Sequence[RunSpec],
    compute: ComputeConfig,
    at: int,
    resumed: dict[RunSpec, ResumedRun] | None = None,
    limits: Any = None,
) -> tuple[dict[RunSpec, RunFinished], dict[RunSpec, RunState], Any, dict[RunSpec, list[Any]]]:
    """Run until a call of the checkpoint hook: finished runs, states of the others, batch limits, all evaluations."""
    count = 0
    over: dict[RunSpec, RunFinished] = {}
    measured: dict[RunSpec, list[Any]] = {item: list(seen) for item, (_, seen) in (resumed or {}).items()}

    def rest() -> None:
        nonlocal count
        count += 1
        if count == at:
            raise InterruptionError

    sweep = Sweep(compute, rest)
    try:
        for event in sweep.events(items, resumed, limits):
            if isinstance(event, RunFinished):
                over[event.spec] = event
            else:
                measured.setdefault(event.spec, []).append(event.evaluation)
    except InterruptionError:
        pass
    return over, sweep.run_states(), sweep.batch_limits, measured


@given(
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
    executor=st.sampled_from(["batched", "reference"]),
    width=st.sampled_from([1, 5, 64]),
    moments=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    stop=st.sampled_from([{"max_rounds": 9}, {"max_seconds": 0.9}, {"target_accuracy": 0.5, "consecutive_hits": 2}]),
    train_samples=st.sampled_from([0, 30]),
)
@examples(max_examples=25)
def test_a_run_can_be_resumed_from_any_checkpoint(
    algorithm: str,
    executor: str,
    width: int,
    moments: list[int],
    stop: dict[str, Any],
    train_samples: int,
) -> None:
    stop = {"max_rounds": 15, "eval_every_rounds": 2, "train_samples": train_samples, **stop}
    assert_resumable(study(algorithms=[algorithm], stop=stop), executor, width, moments)


@pytest.mark.parametrize("executor", ["batched", "reference"])
@pytest.mark.parametrize("algorithm", ["fedbuff", "defedavg-niid", "favano", "asysg"])
def test_schedules_by_seconds_are_resumed(algorithm: str, executor: str) -> None:
    """A resumed run knows when the versions were made from which jobs start and to which updates are added."""
    local = {"local_schedule": "inverse-sqrt(0.2)", "momentum": 0.9} if algorithm != "asysg" else {}
    merged = {"global_schedule": "cosine(3)"} if algorithm != "favano" else {}
    training = {"updates_per_round": 3, "local_steps": 2, "schedule_by": "seconds", **local, **merged}
    chosen = study(algorithms=[algorithm], training=training, stop={"max_rounds": 12, "eval_every_rounds": 3})
    assert_resumable(chosen, executor, 5, [2, 3])


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("rows", [False, True], ids=["on the device", "in host memory"])
@pytest.mark.parametrize("executor", ["batched", "reference"])
@pytest.mark.parametrize("algorithm", ["mifa", "corrected", "fedbuff"])
def test_state_vectors_are_resumed(algorithm: str, executor: str, rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that wait for their round are trained again from the same starts, with the same corrections."""
    register(Corrected)
    training = {"updates_per_round": 3, "local_steps": 2, "server_optimizer": "amsgrad"}
    chosen = study(algorithms=[algorithm], training=training, stop={"max_rounds": 12, "eval_every_rounds": 3})
    if rows:
        monkeypatch.setattr(StateMemory, "within", lambda *_: StateMemory(8, 1000, 1000, on_device=2))
    assert_resumable(chosen, executor, 5, [2, 3])


@pytest.mark.parametrize("executor", ["batched", "reference"])
@pytest.mark.parametrize("algorithm", ["ace", "fedasync", "quafl"])
def test_versions_in_host_memory_are_resumed(algorithm: str, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    def few(memory: StateMemory, _: int | None) -> VectorMemory:
        found = VectorMemory(1, memory.rows)
        take = found.take_row

        def take_row(like: Tensor) -> Tensor:
            nonlocal taken
            taken += 1
            return take(like)

        found.take_row = take_row  # type: ignore[method-assign]
        return found

    monkeypatch.setattr(StateMemory, "for_versions", few)
    chosen = study(
        algorithms=[algorithm],
        training={"local_steps": 2, **({"updates_per_round": 3} if algorithm == "quafl" else {})},
        stop={"max_rounds": 12, "eval_every_rounds": 3},
    )
    assert_resumable(chosen, executor, 5, [2, 3])
    assert taken > 3


def test_a_checkpoint_with_the_state_of_another_model_is_refused() -> None:
    (point,) = study(algorithms=["mifa"]).points()
    item = RunSpec(point, point.settings, 0)
    _, states, _, _ = run_until_hook([item], ComputeConfig("reference"), 4)
    state = states[item]
    assert {vector.name for vector in state.state} == {"sum", "last"}
    wrong = replace(state, state={vector: value[:-1] for vector, value in state.state.items()})
    run = Simulation(item.settings, 0)
    with pytest.raises(UserError, match="the checkpoint belongs to a different model"):
        run.resume(wrong, [])


def assert_resumable(chosen: config.Study, executor: str, width: int, moments: list[int]) -> None:
    """Assert that a run that is stopped at these calls of the hook ends as one that is not."""
    (point,) = chosen.points()
    items = [RunSpec(point, point.settings, seed) for seed in (0, 1)]
    compute = ComputeConfig(executor, max_batch_jobs=width)
    truth, _, _, seen = run_until_hook(items, compute, -1)
    resumed: dict[RunSpec, ResumedRun] = {}
    over: dict[RunSpec, RunFinished] = {}
    limits = None
    for at in [*moments, -1]:
        left = [item for item in items if item not in over]
        more, states, limits, measured = run_until_hook(left, compute, at, resumed, limits)
        over |= more
        resumed = {item: (through_file(state), measured.get(item, [])) for item, state in states.items()}
    assert over.keys() == truth.keys()
    for item, ended in truth.items():
        found = over[item].run
        assert torch.equal(found.weights, ended.run.weights)
        assert found.executor.updates_trained == ended.run.executor.updates_trained
        assert found.plan.hash() == ended.run.plan.hash()
        assert [replace(e, wall_seconds=0.0) for e in found.progress.evaluations] == [
            replace(e, wall_seconds=0.0) for e in seen[item]
        ]
        for name in ("status", "rounds", "seconds", "first_hit_seconds", "sustained_seconds", "diverged_at"):
            assert getattr(found.progress, name) == getattr(ended.run.progress, name)


def through_file(state: RunState) -> RunState:
    """The state, written to a file and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        checkpointing.write_checkpoint(path, state.to_json(), dict(state.tensors()))
        return RunState.from_json(*checkpointing.read_checkpoint(path))


def test_updates_that_cannot_be_recomputed_bit_identically_are_saved(tmp_path: Path) -> None:
    """On some devices results depend on the batch: such updates come from the file, not from training."""
    (point,) = study(algorithms=["defedavg-niid"]).points()
    item = RunSpec(point, point.settings, 0)
    sweep = Sweep(ComputeConfig(max_batch_jobs=64), lambda: None)
    for _ in sweep.events([item]):
        if sweep._batched and sweep._batched[item].deltas:
            break
    trainer, batched = sweep._trainer, sweep._batched[item]
    assert trainer is not None
    assert trainer.batch_invariant
    trainer.batch_invariant = False
    marked = next(iter(batched.deltas))
    batched.deltas[marked] = torch.full_like(batched.deltas[marked], 7.0)
    back = through_file(RunState.of_batched_run(batched, trainer))
    trainer.train = None  # type: ignore[method-assign,assignment]
    kept, batched.deltas = dict(batched.deltas), {}
    with pytest.raises(TypeError):
        replace(back, deltas={}).restore_batched_run(batched, trainer)
    trainer.train = lambda jobs: [] if not jobs else pytest.fail("trained")  # type: ignore[method-assign]
    back.restore_batched_run(batched, trainer)
    assert list(batched.deltas) == list(kept)
    assert all(torch.equal(batched.deltas[update], delta) for update, delta in kept.items())
