"""On the CPU, the results of a client do not depend on the clients that share its batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from defedavg.training.kernels.cpu_kernels import CpuLayerKernels
from defedavg.training.kernels.plain import LayerWeights, Window
from defedavg.training.threads import threads
from helpers.strategies import bounded

SIZES = st.sampled_from([1, 3, 5, 9, 10, 27, 31, 33, 64, 75, 99, 133])
CLIENTS = 5


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def part(params: LayerWeights, clients: slice) -> LayerWeights:
    assert params.bias is not None
    assert params.rates is not None
    copies = {name: getattr(params, name)[clients].clone() for name in ("weight", "bias", "rates")}
    return dataclasses.replace(params, **copies)


def equal_for_every_width(step: object, width: int) -> None:
    """Assert that a step gives every client the bits that it gets alone."""
    assert callable(step)
    with threads(1):
        alone = [step(slice(c, c + 1)) for c in range(CLIENTS)]
        for first in range(0, CLIENTS, width):
            clients = range(first, min(first + width, CLIENTS))
            for found, *single in zip(
                step(slice(clients.start, clients.stop)), *(alone[c] for c in clients), strict=True
            ):
                assert torch.equal(found, torch.cat(single))


@bounded(100)
@given(
    rows=SIZES,
    ins=SIZES,
    outs=SIZES,
    width=st.integers(2, CLIENTS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_fully_connected_layer(rows: int, ins: int, outs: int, width: int, dtype: torch.dtype) -> None:
    kernels = CpuLayerKernels()
    x, grad = drawn(0, CLIENTS, rows, ins, dtype=dtype), drawn(1, CLIENTS, rows, outs, dtype=dtype)
    weight, bias = drawn(2, CLIENTS, outs, ins, dtype=dtype), drawn(3, CLIENTS, outs, dtype=dtype)
    whole = LayerWeights(weight, bias, torch.linspace(0.1, 0.3, CLIENTS, dtype=dtype))

    def step(clients: slice) -> tuple[Tensor, ...]:
        params = part(whole, clients)
        out, saved = kernels.linear(x[clients].clone(), params, relu=False)
        grad_x = kernels.linear_backward(grad[clients].clone(), saved, params, relu=False, needs_x=True)
        assert grad_x is not None
        assert params.bias is not None
        return out, grad_x, params.weight, params.bias

    equal_for_every_width(step, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("ins", "outs", "size"), [(1, 3, 3), (1, 5, 3), (3, 7, 5), (5, 1, 3), (13, 5, 3), (1, 1, 1)])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_convolution(ins: int, outs: int, size: int, width: int, dtype: torch.dtype) -> None:
    kernels, window, images, side = CpuLayerKernels(), Window((size, size), (1, 1), (1, 1)), 4, 9
    x = drawn(0, CLIENTS, images, side, side, ins, dtype=dtype)
    high, wide = window.out(side, side)
    grad = drawn(1, CLIENTS, images, high, wide, outs, dtype=dtype)
    weight, bias = drawn(2, CLIENTS, outs, size, size, ins, dtype=dtype), drawn(3, CLIENTS, outs, dtype=dtype)
    whole = LayerWeights(weight, bias, torch.linspace(0.1, 0.3, CLIENTS, dtype=dtype))

    def step(clients: slice) -> tuple[Tensor, ...]:
        params, inputs = part(whole, clients), x[clients].flatten(0, 1).clone()
        out, saved = kernels.conv(inputs, params, window)
        grads = grad[clients].flatten(0, 1).clone()
        grad_x = kernels.conv_backward(grads, saved, inputs.shape, params, window, needs_x=True)
        assert grad_x is not None
        assert params.bias is not None
        return out, grad_x, params.weight, params.bias

    equal_for_every_width(step, width)
