"""Vectors on the device and in host memory: where they are, and that it changes no result.

On the CPU host memory is that of the model, so every step but the pinning is the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn

from defedavg.algorithms import ALGORITHMS
from defedavg.errors import UserError
from defedavg.planning.records import Round
from defedavg.tasks import Task, make_task
from defedavg.training import BatchedRun, Reference, Trainer, run_batched
from defedavg.training.placed_vectors import LiveVersions, PlacedVectors
from defedavg.training.state_memory import StateMemory, VectorMemory
from helpers.settings_tables import settings
from helpers.small_runs import batched_run, final_versions, how, task_of

CPU = torch.device("cpu")
SIZE = 3
Actions = list[tuple[str, int, float]]


class CountedMemory(VectorMemory):
    """Counts the rows in use."""

    rows_in_use = most_rows = 0

    def take_row(self, like: Tensor) -> Tensor:
        self.rows_in_use += 1
        self.most_rows = max(self.most_rows, self.rows_in_use)
        return super().take_row(like)

    def free_row(self, row: Tensor) -> None:
        self.rows_in_use -= 1
        super().free_row(row)


@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["put", "get", "remove", "release"]), st.integers(0, 7), st.floats(-9, 9, width=32))
    ),
    limit=st.one_of(st.none(), st.integers(0, 4)),
)
def test_placed_vectors_behave_like_a_dict(actions: Actions, limit: int | None) -> None:
    memory = CountedMemory(limit)
    vectors, expected = PlacedVectors[int](CPU), dict[int, list[float]]()
    vectors.place(memory)
    read: list[tuple[Tensor, list[float]]] = []
    for action, key, number in actions:
        if action == "put":
            vectors.put(key, torch.full((SIZE,), number))
            expected[key] = [number] * SIZE
        elif action == "get":
            found = vectors.get(key)
            assert (None if found is None else found.tolist()) == expected.get(key)
            read += [] if found is None else [(found, expected[key])]
        elif action == "remove":
            vectors.remove(key)
            expected.pop(key, None)
        else:
            vectors.release()
        assert set(vectors) == set(expected)
        assert vectors.on_device == memory.used_on_device <= (len(expected) if limit is None else limit)
        assert memory.rows_in_use == len(expected) - vectors.on_device
    assert all(value.tolist() == before for value, before in read)  # what was read never changes
    assert {key: value.tolist() for key, value in vectors.stored().items()} == expected
    vectors.clear()
    assert (memory.used_on_device, memory.rows_in_use) == (0, 0)


def test_versions_stay_on_the_device_while_they_are_the_newest() -> None:
    memory = CountedMemory(1)
    versions = LiveVersions(torch.zeros(SIZE))
    versions.place(memory)
    for number in range(1, 5):
        versions[number] = torch.full((SIZE,), float(number))
        versions.end_merge(number)
    assert (list(versions), len(versions), versions.on_device, memory.rows_in_use) == ([0, 1, 2, 3, 4], 5, 2, 3)
    assert [value.tolist() for value in versions.values()] == [[float(n)] * SIZE for n in range(5)]
    del versions[0]
    del versions[2]
    assert (list(versions.stored()), versions.on_device, memory.rows_in_use) == ([1, 3, 4], 1, 2)
    assert 2 not in versions
    with pytest.raises(KeyError):
        versions[2]
    with pytest.raises(KeyError):
        del versions[2]
    versions.replace({7: torch.ones(SIZE)})
    assert (list(versions), memory.used_on_device, memory.rows_in_use) == ([7], 0, 0)


def test_states_and_versions_share_rows() -> None:
    memory = StateMemory(4 * SIZE, 100, on_device=0)
    states, versions = PlacedVectors[int](CPU), PlacedVectors[int](CPU)
    states.place(memory)
    versions.place(memory.for_versions(0))
    states.put(0, torch.ones(SIZE))
    row = states.stored()[0]
    states.remove(0)
    versions.put(0, torch.ones(SIZE))
    assert versions.stored()[0].data_ptr() == row.data_ptr()


def test_too_little_host_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(UserError, match="the host has not enough memory for the state vectors and versions"):
        VectorMemory(0).take_row(torch.ones(SIZE))


# Runs with few versions on the device.


def limited(runs: list[BatchedRun], task: Task, width: int, limit: int, new: int = 64) -> tuple[list[Tensor], int]:
    """Return the last versions of runs that share ``limit`` places for versions, and how many were in use at most."""
    trainer = Trainer(task, runs[0].reference.module, max_batch_jobs=width)
    trainer.version_memory, trainer.max_new_versions = CountedMemory(limit), new
    most = 0

    def hook() -> None:
        nonlocal most
        assert trainer.version_memory.used_on_device <= limit
        most = max(most, *(run.reference.versions.on_device for run in runs))

    for _ in run_batched(runs, trainer, (), hook):
        hook()
    assert most <= limit + 1  # and the newest one
    assert sum(len(run.reference.versions) for run in runs) == len(runs)
    assert (trainer.version_memory.used_on_device, trainer.version_memory.rows_in_use) == (0, 0)
    return [run.reference.versions[run.newest] for run in runs], trainer.version_memory.most_rows


@examples(max_examples=30)
@given(
    names=st.lists(st.sampled_from(sorted(ALGORITHMS)), min_size=1, max_size=3),
    width=st.sampled_from([1, 4, 64]),
    limit=st.integers(0, 5),
    new=st.sampled_from([1, 5, 64]),
)
def test_versions_in_host_memory_change_no_bit(names: list[str], width: int, limit: int, new: int) -> None:
    task = task_of("mlp")
    expected = final_versions([batched_run(how(name), task, 15) for name in names], task, 64)
    found, _ = limited([batched_run(how(name), task, 15) for name in names], task, width, limit, new)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def many_clients(count: int) -> Task:
    data = (np.arange(2.0 * count, dtype=np.float32).reshape(count, 2) / count, np.arange(count) % 2)
    return make_task(
        model=lambda: nn.Linear(2, 2), train=data, test=data, clients=[np.array([i]) for i in range(count)]
    )


@pytest.mark.parametrize("name", ["ace", "asofed", "fedasync"])
def test_a_version_for_every_client_fits_into_few_places(name: str) -> None:
    """Where every arrival is a merge, most clients start from versions of their own."""
    clients, rounds, limit = 300, 900, 20
    task = many_clients(clients)
    chosen = settings(name, clients={"num_clients": clients}, training={"local_steps": 2})
    (expected,) = final_versions([batched_run(chosen, task, rounds)], task, 64)
    (found,), rows = limited([batched_run(chosen, task, rounds)], task, 64, limit)
    assert torch.equal(found, expected)
    assert clients / 2 < rows < clients


def test_the_reference_executor_with_few_places_gives_the_same() -> None:
    task, chosen = task_of("mlp"), how("fedasync")
    results = []
    for memory in (None, CountedMemory(1)):
        run = batched_run(chosen, task, 30)
        executor: Reference = run.reference
        if memory is not None:
            executor.versions.place(memory)
        for record in run.records:
            if isinstance(record, Round):
                results.append(executor.apply(record))
                if record.merge.version == 30:
                    break
        assert memory is None or memory.most_rows > 1
    assert all(torch.equal(one, other) for one, other in zip(results[:30], results[30:], strict=True))


def test_one_run_that_merges_every_arrival_fills_batches() -> None:
    task = many_clients(1000)
    chosen = settings("ace", clients={"num_clients": 1000}, training={"local_steps": 50})
    run = batched_run(chosen, task, 3000)
    trainer = Trainer(task, run.reference.module, max_batch_jobs=192)
    sizes: list[int] = []

    def pretend(jobs: list[Any]) -> list[Tensor]:
        sizes.append(len(jobs))
        return [torch.zeros_like(job.start) for job in jobs]

    trainer.train = pretend  # type: ignore[method-assign,assignment]
    for _ in run_batched([run], trainer):
        pass
    assert sum(sizes) == 3000
    assert np.mean([size for size in sizes if size]) > 150
