"""How wide a batch may be, what is kept while a run goes on, and what happens where memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
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
from defedavg.training import BatchedRun, RunProgress, StoppingRule, Trainer, drive_batched
from defedavg.training.memory import VECTORS, Need, free, parse_memory, readable
from defedavg.training.trainer import TrainingJob
from helpers.settings_tables import settings
from helpers.small_runs import batched, how, lane_of, task_of


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("800M", 800 << 20), ("12G", 12 << 30), ("1.5 GiB", 3 << 29), (".5k", 512), ("2tb", 2 << 40)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "12X", "0", "1e3", "12 G G", "9999999999T", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
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
    width=st.integers(1, 2000),
    at_once=st.integers(1, 2000),
    allowed=st.integers(1, 10**13),
)
def test_a_batch_fits_what_is_allowed(vector: int, step: int, width: int, at_once: int, allowed: int) -> None:
    need = Need(vector, step, 10)
    if allowed < 2 * (step + VECTORS * vector):
        with pytest.raises(UserError, match="--memory"):
            need.fit(width, at_once, allowed)
        return
    fit = need.fit(width, at_once, allowed)
    assert 1 <= fit.at_once <= max(1, min(at_once, width))
    assert 1 <= fit.width <= width
    jobs = fit.at_once * (step + VECTORS * vector) + (fit.width - fit.at_once) * VECTORS * vector
    assert jobs + fit.room * vector <= allowed or fit.room == 1
    more = need.fit(width, at_once, 2 * allowed)
    assert more.at_once >= fit.at_once
    assert more.room >= fit.room


def vectors(lane: BatchedRun) -> int:
    """How many vectors of parameters a run holds."""
    return len(lane.reference.versions) + len(lane.deltas)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedbuff", "favano", "defedavg-iid", "defedavg-niid"])
def test_what_is_kept_does_not_grow_with_the_rounds(algorithm: str) -> None:
    data = (np.zeros((20, 2), np.float32), np.arange(20) % 2)
    task = make_task(model=lambda: nn.Linear(2, 2), train=data, test=data, clients=[np.array([i]) for i in range(20)])
    most = {}
    for rounds in (400, 1600):
        chosen = settings(algorithm, clients={"num_clients": 20}, training={"updates_per_round": 4, "local_steps": 3})
        goal = StoppingRule(max_rounds=rounds, every_rounds=5)
        lane = BatchedRun(make_executor(chosen, 0, task), iter(make_simulator(chosen, 0)), goal, RunProgress())
        trainer = Trainer(task, lane.reference.module, width=16)
        most[rounds] = max(vectors(lane) + len(lane.rounds) for _ in drive_batched([lane], trainer))
    assert most[1600] <= 1.1 * most[400] + 5


def test_little_memory_makes_small_batches_and_the_same_result() -> None:
    task, chosen = task_of("cnn"), how("defedavg-iid")
    (truth,) = batched([lane_of(chosen, task, 8)], task, 64)
    lane = lane_of(chosen, task, 8)
    wide = Trainer(task, lane.reference.module)
    for memory in (1 << 30, 1 << 17):
        trainer = Trainer(task, lane.reference.module, memory=memory)
        assert trainer.width < wide.width or memory == 1 << 30
        own = lane_of(chosen, task, 8)
        for _ in drive_batched([own], trainer):
            pass
        assert torch.equal(own.reference.versions[8], truth)


def test_too_little_memory_for_one_client_is_one_line() -> None:
    task = task_of("cnn")
    with pytest.raises(UserError, match=r"one client takes about .* but only 1 KiB may be used; give more"):
        Trainer(task, lane_of(how("fedavg"), task, 1).reference.module, memory=1024)


class Short(Trainer):
    """A trainer on a machine with memory for so many jobs."""

    limit = 4

    def _train(self, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        if len(jobs) > self.limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return super()._train(jobs)


def test_where_memory_runs_out_batches_shrink() -> None:
    task, chosen = task_of("cnn"), how("defedavg-iid", updates_per_round=6)
    (truth,) = batched([lane_of(chosen, task, 8)], task, 64)
    lane = lane_of(chosen, task, 8)
    trainer = Short(task, lane.reference.module)
    for _ in drive_batched([lane], trainer):
        pass
    assert 1 <= trainer.width <= 4
    assert torch.equal(lane.reference.versions[8], truth)


def test_after_memory_ran_out_in_a_thread_results_are_right() -> None:
    """One group fails while others are under way: nothing that was broken off is taken for a result."""
    task, chosen = task_of("cnn"), how("defedavg-iid", updates_per_round=6)
    (truth,) = batched([lane_of(chosen, task, 8)], task, 64)
    lane = lane_of(chosen, task, 8)
    trainer = Trainer(task, lane.reference.module)
    trainer._group, trainer._at_once = 1, 2
    whole, calls = trainer._group_deltas, iter(range(10**9))

    def failing(jobs: Sequence[TrainingJob]) -> list[Tensor]:
        if next(calls) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return whole(jobs)

    trainer._group_deltas = failing  # type: ignore[method-assign]
    for _ in drive_batched([lane], trainer):
        pass
    assert next(calls) > 4
    assert torch.equal(lane.reference.versions[8], truth)


def test_where_not_even_one_client_fits_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Short, "limit", 0)
    task = task_of("mlp")
    lane = lane_of(how("fedavg"), task, 3)
    with pytest.raises(UserError, match="not enough memory to train even one client"):
        list(drive_batched([lane], Short(task, lane.reference.module)))


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of("mlp")
    lane = lane_of(how("fedavg"), task, 3)
    trainer = Trainer(task, lane.reference.module)

    def broken(*_: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(trainer, "step", broken)
    with pytest.raises(RuntimeError, match="something else"):
        list(drive_batched([lane], trainer))


def test_a_model_that_is_another_each_time_is_refused() -> None:
    sizes = iter(range(3, 100))
    data = (np.zeros((20, 2), np.float32), np.arange(20) % 2)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, next(sizes)), nn.ReLU(), nn.LazyLinear(2))

    def built() -> nn.Module:
        net = model()
        net(torch.zeros(1, 2))
        return net

    task = make_task(model=built, train=data, test=data, clients=[np.arange(i, 20, 6) for i in range(6)])
    lanes = [lane_of(how("fedavg"), task, 2, seed) for seed in range(2)]
    trainer = Trainer(task, lanes[0].reference.module)
    with pytest.raises(UserError, match="another each time it is built"):
        list(drive_batched(lanes, trainer))
