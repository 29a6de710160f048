"""The limits of batches, the memory that a run needs, and what happens where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from defedavg.config.build import make_executor, make_simulator
from defedavg.errors import UserError
from defedavg.tasks import make_task
from defedavg.training import BatchedRun, RunProgress, StoppingRule, Trainer, TrainingJob, run_batched
from defedavg.training.memory import VECTORS, StepBytes, batch_limits, free, parse_memory, readable
from defedavg.training.stacked_optimizer import LocalMethod
from defedavg.training.stacking.direct import DirectStep
from defedavg.training.stacking.layer_registry import StackedModel
from helpers.settings_tables import settings
from helpers.small_runs import batched_run, final_versions, how, task_of


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("800M", 800 << 20), ("12G", 12 << 30), ("1.5 GiB", 3 << 29), (".5k", 512), ("2tb", 2 << 40)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "12X", "0", "1e3", "12 G G", "9999999999T", "nan"])
def test_a_text_that_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--memory"):
        parse_memory(text)


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1, "1 B"), (1536, "1.5 KiB"), (3 << 30, "3 GiB")])
def test_sizes_are_written(size: int, text: str) -> None:
    assert readable(size) == text


def test_some_memory_is_free() -> None:
    assert 1 << 20 < free(torch.device("cpu")) < 1 << 50


@given(
    vector=st.integers(1, 10**9),
    step=st.integers(1, 10**9),
    jobs=st.integers(1, 2000),
    concurrent=st.integers(1, 2000),
    allowed=st.integers(1, 10**13),
)
def test_a_batch_fits_the_allowed_memory(vector: int, step: int, jobs: int, concurrent: int, allowed: int) -> None:
    if allowed < 2 * (step + VECTORS * vector):
        with pytest.raises(UserError, match="--memory"):
            batch_limits(vector, step, 10, jobs, concurrent, allowed)
        return
    limits = batch_limits(vector, step, 10, jobs, concurrent, allowed)
    assert 1 <= limits.concurrent_jobs <= max(1, min(concurrent, jobs))
    assert 1 <= limits.max_batch_jobs <= jobs
    waiting = limits.max_batch_jobs - limits.concurrent_jobs
    batch = limits.concurrent_jobs * (step + VECTORS * vector) + waiting * VECTORS * vector
    kept = limits.max_pending_updates + limits.used_versions + limits.new_versions
    assert batch + kept * vector <= allowed or limits.max_pending_updates == 1
    at_once = batch_limits(vector, step, 10, jobs, jobs, allowed, at_once=True)  # as on a device
    assert at_once.max_batch_jobs * (step + VECTORS * vector) <= allowed // 2
    more = batch_limits(vector, step, 10, jobs, concurrent, 2 * allowed)
    assert more.concurrent_jobs >= limits.concurrent_jobs
    assert more.max_pending_updates >= limits.max_pending_updates


def vectors(run: BatchedRun) -> int:
    """Count the vectors of parameters that a run holds."""
    return len(run.reference.versions) + len(run.deltas)


@pytest.mark.no_cover
@pytest.mark.parametrize("algorithm", ["fedavg", "fedbuff", "favano", "defedavg-iid", "defedavg-niid"])
def test_memory_does_not_grow_with_the_rounds(algorithm: str) -> None:
    data = (np.zeros((20, 2), np.float32), np.arange(20) % 2)
    task = make_task(model=lambda: nn.Linear(2, 2), train=data, test=data, clients=[np.array([i]) for i in range(20)])
    most = {}
    for rounds in (200, 800):
        chosen = settings(algorithm, clients={"num_clients": 20}, training={"updates_per_round": 4, "local_steps": 3})
        rule = StoppingRule(max_rounds=rounds, every_rounds=5)
        run = BatchedRun(make_executor(chosen, 0, task), iter(make_simulator(chosen, 0)), rule, RunProgress())
        trainer = Trainer(task, run.reference.module, max_batch_jobs=16)
        most[rounds] = max(vectors(run) + len(run.rounds) for _ in run_batched([run], trainer))
    assert most[800] <= 1.1 * most[200] + 5


def test_little_memory_makes_small_batches_and_the_same_result() -> None:
    task, chosen = task_of("cnn"), how("defedavg-iid")
    (expected,) = final_versions([batched_run(chosen, task, 8)], task, 64)
    run = batched_run(chosen, task, 8)
    unlimited = Trainer(task, run.reference.module)
    for memory in (1 << 30, 1 << 17):
        trainer = Trainer(task, run.reference.module, memory=memory)
        assert trainer.max_batch_jobs < unlimited.max_batch_jobs or memory == 1 << 30
        limited = batched_run(chosen, task, 8)
        for _ in run_batched([limited], trainer):
            pass
        assert torch.equal(limited.reference.versions[8], expected)


def test_too_little_memory_for_one_client_is_one_line() -> None:
    task = task_of("cnn")
    with pytest.raises(UserError, match=r"one client takes about .* but only 1 KiB may be used; give more"):
        Trainer(task, batched_run(how("fedavg"), task, 1).reference.module, memory=1024)


class Short(Trainer):
    """A trainer on a machine with memory for ``limit`` jobs."""

    limit = 4

    def _train(self, jobs: Sequence[TrainingJob], method: LocalMethod) -> list[Tensor]:
        if len(jobs) > self.limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return super()._train(jobs, method)


def test_where_memory_runs_out_batches_shrink() -> None:
    task, chosen = task_of("cnn"), how("defedavg-iid", updates_per_round=6)
    (expected,) = final_versions([batched_run(chosen, task, 8)], task, 64)
    run = batched_run(chosen, task, 8)
    trainer = Short(task, run.reference.module)
    for _ in run_batched([run], trainer):
        pass
    assert 1 <= trainer.max_batch_jobs <= 4
    assert torch.equal(run.reference.versions[8], expected)


def test_after_memory_ran_out_in_a_thread_results_are_right() -> None:
    """One group fails while others are trained: no partial result is used."""
    task, chosen = task_of("cnn"), how("defedavg-iid", updates_per_round=6)
    (expected,) = final_versions([batched_run(chosen, task, 8)], task, 64)
    run = batched_run(chosen, task, 8)
    trainer = Trainer(task, run.reference.module)
    trainer._group_jobs, trainer._cores = 1, 2
    trainer._limits.clear()
    whole, calls = trainer._train_group, iter(range(10**9))

    def failing(jobs: Sequence[TrainingJob], method: LocalMethod) -> list[Tensor]:
        if next(calls) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return whole(jobs, method)

    trainer._train_group = failing  # type: ignore[method-assign]
    for _ in run_batched([run], trainer):
        pass
    assert next(calls) > 4
    assert torch.equal(run.reference.versions[8], expected)


def test_too_little_memory_at_run_time_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Short, "limit", 0)
    task = task_of("mlp")
    run = batched_run(how("fedavg"), task, 3)
    with pytest.raises(UserError, match="not enough memory to train even one client"):
        list(run_batched([run], Short(task, run.reference.module)))


def test_other_errors_are_not_treated_as_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of("mlp")
    run = batched_run(how("fedavg"), task, 3)
    trainer = Trainer(task, run.reference.module)

    def broken(*_: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(trainer, "_train_group", broken)
    with pytest.raises(RuntimeError, match="something else"):
        list(run_batched([run], trainer))


def test_a_model_that_differs_each_time_is_refused() -> None:
    sizes = iter(range(3, 100))
    data = (np.zeros((20, 2), np.float32), np.arange(20) % 2)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, next(sizes)), nn.ReLU(), nn.LazyLinear(2))

    def built() -> nn.Module:
        net = model()
        net(torch.zeros(1, 2))
        return net

    task = make_task(model=built, train=data, test=data, clients=[np.arange(i, 20, 6) for i in range(6)])
    runs = [batched_run(how("fedavg"), task, 2, seed) for seed in range(2)]
    trainer = Trainer(task, runs[0].reference.module)
    with pytest.raises(UserError, match="differs each time it is built"):
        list(run_batched(runs, trainer))


def test_a_method_with_autograd_counts_the_memory_of_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, plain SGD takes steps without autograd, whose fused passes keep fewer tensors."""
    task, steps = task_of("cnn"), list[str]()
    trainer = Trainer(task, batched_run(how("fedavg"), task, 3).reference.module, memory=1 << 30)
    monkeypatch.setattr(DirectStep, "__call__", lambda *_: steps.append("direct"))
    monkeypatch.setattr(StackedModel, "sgd_step", lambda *_: steps.append("autograd"))
    trainer.asynchronous = True

    def measured(step: Callable[[int], None], _: torch.device) -> int:
        step(1)
        return {"direct": 1 << 10, "autograd": 1 << 26}[steps[-1]]

    monkeypatch.setattr("defedavg.training.memory.step_bytes", measured)
    trainer._measured = StepBytes(trainer._discarded_step, torch.device("cpu"), 0)
    trainer._limits.clear()
    methods = LocalMethod(), LocalMethod(momentum=True), LocalMethod(momentum=True, clip=True)
    plain, *others = (trainer._limits_of(method).concurrent_jobs for method in methods)
    assert plain == 64
    assert others == [7, 7]
    assert steps == ["direct", "autograd"]
