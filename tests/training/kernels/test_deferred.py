"""Deferred updates of fully connected layers agree with updates at every step, in Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn

from defedavg.algorithms.protocol import Update
from defedavg.tasks import Task, make_task
from defedavg.training import LocalTraining, Reference, Trainer, TrainingJob
from defedavg.training import trainer as trainer_module
from defedavg.training.kernels import cuda_graph, deferred
from defedavg.training.kernels.deferred import PENDING_ROWS, DeferredUpdates, deferred_bytes, pending_steps
from defedavg.training.kernels.plain import LayerKernels, LayerWeights
from defedavg.training.stacked_optimizer import LocalMethod
from defedavg.training.stacking import sequences
from defedavg.training.stacking.sequences import deferrable_weights
from helpers.replayed_graphs import trained, without_a_device

if torch.cuda.is_available():
    pytest.skip("benchmarks/kernels.py checks the compiled kernels on a device", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from defedavg.training.kernels.triton_layers import TritonLayerKernels

pytestmark = [
    # Triton's interpreter converts arrays of one element to numbers, which NumPy deprecates.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    # Weights that have grown too much for their scale are stored again with another one.
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]

RATES = torch.tensor([1.0, 0.0, 2.0])
STEPS = torch.tensor([7, 7, 4])  # the third job ends between two additions
Draw = Callable[..., Tensor]


def whole_numbers(source: torch.Generator) -> Draw:
    """Return a function that draws numbers whose sums and products have no rounding error."""

    def draw(*shape: int, most: int = 1) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=source).float()

    return draw


def normal_numbers(source: torch.Generator) -> Draw:
    def draw(*shape: int, most: int = 1) -> Tensor:
        return torch.randn(shape, generator=source) * most * 0.1

    return draw


def trajectory(draw: Draw, size: int, ins: int, outs: int, relu: bool, deferring: bool) -> list[Tensor]:
    """Return outputs and gradients of all steps of three clients, and their parameters at the end."""
    start, bias = draw(3, outs, ins, most=8), draw(3, outs)
    dtype = torch.float32 if deferring else torch.float64
    kernels: LayerKernels = TritonLayerKernels("tf32") if deferring else LayerKernels()
    weight, bias, found = start.to(dtype), bias.to(dtype), []
    step = torch.zeros(1, dtype=torch.int64)
    updates = DeferredUpdates.of(weight, size, step) if deferring else None
    period, longest = pending_steps(size), int(STEPS.max())
    if updates is not None:
        kernels.add_updates(weight, updates, RATES, STEPS, (0, 0), size)
    for number in range(longest):
        step.fill_(number)
        x, grad = draw(3, size, ins).to(dtype), draw(3, size, outs).to(dtype)
        rates = torch.where(number < STEPS, RATES, 0.0).to(dtype)
        params = LayerWeights(weight, bias, rates, deferred=updates)
        out, saved = kernels.linear(x, params, relu)
        grad_x = kernels.linear_backward(grad, saved, params, relu, True)
        assert grad_x is not None
        active = rates != 0
        found += [out[active].double(), grad_x[active].double()]
        if updates is not None and ((number + 1) % period == 0 or number + 1 == longest):
            kernels.add_updates(weight, updates, RATES, STEPS, (number // period * period, number + 1), size)
    return [*found, weight.double(), bias.double()]


@pytest.mark.no_cover
@examples(max_examples=15)
@given(
    seed=st.integers(0, 2**32), size=st.integers(1, 32), ins=st.integers(1, 70), outs=st.integers(1, 70),
    relu=st.booleans(),
)  # fmt: skip
def test_whole_numbers_give_equal_results(seed: int, size: int, ins: int, outs: int, relu: bool) -> None:
    both = [
        trajectory(whole_numbers(torch.Generator().manual_seed(seed)), size, ins, outs, relu, deferring)
        for deferring in (True, False)
    ]
    for number, (found, expected) in enumerate(zip(*both, strict=True)):
        if float(expected.abs().max()) < 1024:  # beyond it, weights of 16 bits are rounded
            assert torch.equal(found, expected), number


def add(weight: Tensor, updates: DeferredUpdates, between: tuple[int, int]) -> None:
    """Add the updates of some steps of one client with rate 1 and mini-batches of one sample."""
    steps = torch.ones(1, dtype=torch.int64)
    TritonLayerKernels("tf32").add_updates(weight, updates, torch.ones(1), steps, between, 1)


def assert_stored(weight: Tensor, updates: DeferredUpdates) -> None:
    """Check that weights which are not much smaller than the largest of their row have eleven binary digits."""
    stored = updates.weight.float() * updates.scales.unsqueeze(2)
    largest = weight.abs().amax(2, keepdim=True)
    assert ((stored - weight).abs() <= 2.0**-11 * weight.abs() + 2.0**-32 * largest).all()


@examples(max_examples=10)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e6]), size=st.sampled_from([2, 10, 32]))
def test_the_scale_of_the_weights_does_not_matter(seed: int, scale: float, size: int) -> None:
    """Weights of any magnitude keep eleven binary digits; the update itself is added in float32."""

    def scaled(source: torch.Generator) -> Draw:
        draw = normal_numbers(source)
        return lambda *shape, most=1: draw(*shape, most=most) * (scale if most > 1 else 1.0)

    source = torch.Generator().manual_seed(seed)
    weight = scaled(source)(1, 40, 50, most=8)
    updates = DeferredUpdates.of(weight, size, torch.zeros(1, dtype=torch.int64))
    before = weight.clone()
    add(weight, updates, (0, 0))
    assert torch.equal(weight, before)
    assert_stored(weight, updates)


@pytest.mark.parametrize("factor", [1.0, 7.0, 100.0, 1e6, 1e-4])
def test_weights_that_grow_or_shrink_stay_representable(factor: float) -> None:
    weight = normal_numbers(torch.Generator().manual_seed(0))(1, 1, 50, most=8).expand(1, 40, 50).contiguous()
    updates = DeferredUpdates.of(weight, 1, torch.zeros(1, dtype=torch.int64))
    add(weight, updates, (0, 0))
    start = weight.clone()
    updates.inputs[0, 0], updates.gradients[0, 0] = start[0, 0], 1 - factor
    add(weight, updates, (0, 1))
    torch.testing.assert_close(weight, factor * start, rtol=2e-3, atol=1e-6 * float(start.abs().max()))
    assert_stored(weight, updates)


def test_results_stay_close_with_any_numbers() -> None:
    both = [
        trajectory(normal_numbers(torch.Generator().manual_seed(3)), 10, 50, 40, True, deferring)
        for deferring in (True, False)
    ]
    for found, expected in zip(*both, strict=True):
        assert float((found - expected).norm()) <= 2e-3 * float(expected.norm())


def test_buffers_have_the_bytes_that_are_counted() -> None:
    weight = torch.zeros(1, 512, 1024)
    updates = DeferredUpdates.of(weight, 10, torch.zeros(1, dtype=torch.int64))
    tensors = (updates.weight, updates.scales, updates.inputs, updates.gradients)
    assert deferred_bytes([weight.shape[1:]]) == sum(tensor.nbytes for tensor in tensors)
    assert updates.period * 10 <= PENDING_ROWS
    assert [pending_steps(size) for size in (1, 10, 32, 33, 100)] == [64, 6, 2, 1, 1]


def test_only_large_trained_layers_with_one_row_per_sample_are_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "LEAST_WEIGHTS", 12)
    frozen = nn.Linear(3, 4)
    assert frozen.bias is not None
    frozen.bias.requires_grad_(False)
    layers: list[nn.Module] = [
        nn.Linear(3, 4), nn.Flatten(), nn.Linear(8, 3), nn.Linear(3, 2), nn.Linear(2, 3), frozen, nn.Linear(4, 6),
        nn.Unflatten(1, (2, 3)), nn.Linear(3, 4),
    ]  # fmt: skip
    assert deferrable_weights(nn.Sequential(*layers)) == ("2.weight", "6.weight")


def small_task() -> Task:
    source = torch.Generator().manual_seed(0)
    data = torch.randn(60, 12, generator=source).numpy(), torch.randint(0, 3, (60,), generator=source).numpy()
    clients = [torch.arange(i, 60, 5).numpy() for i in range(5)]
    model = functools.partial(
        nn.Sequential, nn.Flatten(), nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 18), nn.ReLU(), nn.Linear(18, 3)
    )
    return make_task(model=model, train=data, test=data, clients=clients)


@pytest.fixture
def _deferring(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)
    monkeypatch.setattr(sequences, "LEAST_WEIGHTS", 200)
    monkeypatch.setattr(trainer_module, "kernels_for", lambda *_: TritonLayerKernels("tf32"))
    monkeypatch.setattr(cuda_graph, "TWO_STREAMS", 2)
    monkeypatch.setattr(cuda_graph, "ALIGNED", 1)


@pytest.mark.no_cover
@pytest.mark.usefixtures("_deferring")
@pytest.mark.parametrize(("size", "more"), [(4, 9), (16, 3), (40, 3)])
def test_replayed_steps_agree_with_the_reference(size: int, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of different lengths, two layers, two streams, a second batch in the same buffers; 40: not deferred.

    The steps of the longest job fill several periods of pending updates, and a part of one.

    Weights of 32 bits leave no differences except those of the order of sums.
    """
    monkeypatch.setattr(deferred, "STORED", torch.float32)
    task, training = small_task(), LocalTraining(0, batch_size=size)
    executor = Reference(task, training)
    start = executor.versions[0]
    trainer = Trainer(task, executor.module, batch_size=size, max_batch_jobs=6)
    longest, period = 1 + 4 * more, pending_steps(size)
    assert longest // period >= 2
    assert longest % period or period == 1
    assert trainer.deferrable(LocalMethod(), size) == (("1.weight", "3.weight") if size < 40 else ())
    for first in (0, 5):
        updates = [Update(i % 5, i, 0, 1 + more * (i % 5)) for i in range(first, first + 5)]
        jobs = [TrainingJob(training, task, start, update, 0.05 + 0.01 * update.client) for update in updates]
        for job, delta in zip(jobs, trained(trainer, jobs), strict=True):
            expected, _ = executor.train(job.update, start, rate=job.rate)
            assert float((delta - expected).norm()) <= 1e-5 * float(expected.norm())


@pytest.mark.no_cover
@pytest.mark.usefixtures("_deferring")
def test_a_job_is_bit_identical_in_every_batch() -> None:
    task, training = small_task(), LocalTraining(0, batch_size=4)
    executor = Reference(task, training)

    def deltas(chosen: list[Update], most: int) -> list[Tensor]:
        trainer = Trainer(task, executor.module, batch_size=4, max_batch_jobs=most)
        jobs: list[Any] = [TrainingJob(training, task, executor.versions[0], update, 0.1) for update in chosen]
        return trained(trainer, jobs)

    updates = [Update(i, i, 0, steps) for i, steps in enumerate((20, 1, 17, 33, 16))]
    together = deltas(updates, 6)
    for update, expected in zip(updates, together, strict=True):
        assert torch.equal(deltas([update], 2)[0], expected)
