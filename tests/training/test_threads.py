"""Work divided among threads: results have the same bits for any number of them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from defedavg.training import Trainer, state_vectors
from defedavg.training.state_vectors import all_finite, weighted_sum
from defedavg.training.threads import MALLOC_SETTINGS, in_parallel, keep_freed_memory, threads
from helpers.small_runs import batched_run, how, task_of
from helpers.strategies import bounded


def test_every_call_uses_one_thread_and_results_keep_their_order() -> None:
    with threads(2):
        assert in_parallel([lambda i=i: (i, torch.get_num_threads()) for i in range(7)], 2) == [  # type: ignore[misc]
            (i, 1) for i in range(7)
        ]
        assert torch.get_num_threads() == 2


def test_an_error_cancels_the_rest_and_waits_for_calls_in_progress() -> None:
    failed, stopped, ended = threading.Event(), threading.Event(), []

    def fail() -> None:
        failed.set()
        raise ValueError("no")

    def work() -> None:
        failed.wait()
        stopped.wait()
        ended.append(1)

    with pytest.raises(ValueError, match="no"):
        in_parallel([fail, work, *[work] * 50], 2, stopped.set)
    assert len(ended) < 51
    before = list(ended)
    assert in_parallel([lambda: 1, lambda: 2], 2) == [1, 2]
    assert ended == before


@pytest.mark.parametrize("cores", [2, 3])
def test_the_jobs_of_a_small_model_are_divided_among_all_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two groups of the largest size are more than a batch has."""
    task = task_of("mlp")
    run = batched_run(how("fedavg", updates_per_round=6), task, 2)
    used: list[tuple[int, int]] = []

    def count(work: Sequence[Callable[[], list[Tensor]]], concurrent: int, _stop: object) -> list[list[Tensor]]:
        used.append((len(work), concurrent))
        return [call() for call in work]

    with threads(cores):
        trainer = Trainer(task, run.reference.module, max_batch_jobs=6)
        monkeypatch.setattr("defedavg.training.trainer.in_parallel", count)
        trainer.train([run.job(update) for update in run.ready(6, 6)])
    assert used == [(cores, cores)]


def test_a_forked_process_starts_threads_of_its_own() -> None:
    assert in_parallel([lambda: 1, lambda: 2], 2) == [1, 2]
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # ends a child that waits for threads of its parent
        os._exit(0 if in_parallel([lambda: 1, lambda: 2], 2) == [1, 2] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@bounded(30)
@given(
    size=st.integers(1, 400),
    coefficients=st.lists(st.sampled_from([1.0, -0.3, 0.07, 2.5]), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    cores=st.integers(2, 5),
)
def test_a_weighted_sum_has_the_same_bits_on_any_number_of_cores(
    size: int, coefficients: list[float], dtype: torch.dtype, cores: int
) -> None:
    vectors = torch.randn(len(coefficients), size, generator=torch.Generator().manual_seed(size), dtype=dtype)
    terms = list(zip(vectors, coefficients, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_vectors, "PARALLEL_SIZE", 0)
        with threads(1):
            expected = weighted_sum(terms)
        with threads(cores):
            found = weighted_sum(terms)
    assert torch.equal(found, expected)
    exact = sum(vector.double() * c for vector, c in terms)
    assert torch.allclose(found.double(), torch.as_tensor(exact), rtol=1e-5, atol=1e-5)
    assert found.untyped_storage().nbytes() == size * found.element_size()  # memory of its own


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("others", [1.0, 3e38])  # the sum of the larger ones is infinite
@pytest.mark.parametrize("position", [0, state_vectors.PART, 2 * state_vectors.PART + 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_value_that_is_not_finite_is_found(value: float, position: int, others: float, dtype: torch.dtype) -> None:
    vector = torch.full((2 * state_vectors.PART + 7,), others, dtype=dtype)
    assert all_finite(vector)
    vector[position] = value
    assert not all_finite(vector)


@pytest.mark.parametrize("model", ["cnn", "residual"])
def test_an_evaluation_has_the_same_bits_on_any_number_of_cores(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("defedavg.training.trainer.EVAL_CHUNK", 7)
    task, found = task_of(model), list[Tensor]()
    run = batched_run(how("fedavg"), task, 1)
    first = run.reference.versions[0]
    versions = [first, first * 1.1, first * 0.9]
    for cores in (1, 2, 3):
        with threads(cores):
            found.append(Trainer(task, run.reference.module).evaluate(versions, task.test))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for version, (loss, accuracy) in zip(versions, found[0].tolist(), strict=True):
        expected = run.reference.evaluate(version, task.test)
        assert loss == pytest.approx(expected[0], rel=1e-12)
        assert accuracy == expected[1]


class FakeLibrary:
    """A C library that records the calls of mallopt."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}

    def mallopt(self, setting: int, value: int) -> int:
        self.calls[setting] = value
        return 1


@pytest.mark.parametrize("chosen", ["", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_freed_memory_is_kept_unless_the_user_chose_otherwise(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    if chosen:
        monkeypatch.setenv(chosen, "1")
    library = FakeLibrary()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    keep_freed_memory.__wrapped__()  # it works once per process
    assert library.calls == ({} if chosen else MALLOC_SETTINGS)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None) if os.name == "posix" else None, "mallopt"), reason="not glibc")
def test_glibc_accepts_the_settings() -> None:
    code = "import ctypes; from defedavg.training.threads import MALLOC_SETTINGS as s; m = ctypes.CDLL(None).mallopt"
    command = [sys.executable, "-c", f"{code}; print([m(*pair) for pair in s.items()])"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[1, 1, 1]"
