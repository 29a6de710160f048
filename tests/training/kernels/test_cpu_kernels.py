"""On the CPU, the results of a client do not depend on the clients that share its batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from defedavg.training.kernels.cpu_kernels import CpuLayerKernels
from defedavg.training.kernels.plain import LayerWeights, Window
from defedavg.training.precision import cpu_has_bf16
from defedavg.training.threads import threads
from helpers.strategies import bounded

BF16 = pytest.mark.skipif(not cpu_has_bf16(), reason="this processor has no bfloat16")
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
    half=st.booleans() if cpu_has_bf16() else st.just(False),
)
def test_a_fully_connected_layer(rows: int, ins: int, outs: int, width: int, dtype: torch.dtype, half: bool) -> None:
    kernels = CpuLayerKernels(half)
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


@pytest.mark.parametrize("half", [False, pytest.param(True, marks=BF16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("ins", "outs", "size"), [(1, 3, 3), (1, 5, 3), (3, 7, 5), (5, 1, 3), (13, 5, 3), (1, 1, 1)])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_convolution(ins: int, outs: int, size: int, width: int, dtype: torch.dtype, half: bool) -> None:
    kernels, window, images, side = CpuLayerKernels(half), Window((size, size), (1, 1), (1, 1)), 4, 9
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


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("width", [2, 5])
def test_a_group_normalisation(width: int, channels_last: bool) -> None:
    kernels, shape = CpuLayerKernels(), (CLIENTS, 3, 8, 5, 5)
    x, grad = drawn(0, *shape, dtype=torch.float32), drawn(1, *shape, dtype=torch.float32)
    weight, bias = drawn(2, CLIENTS, 8, dtype=torch.float32), drawn(3, CLIENTS, 8, dtype=torch.float32)
    whole = LayerWeights(weight, bias, torch.linspace(0.1, 0.3, CLIENTS))
    order = torch.channels_last if channels_last else torch.contiguous_format

    def step(clients: slice) -> tuple[Tensor, ...]:
        params = part(whole, clients)
        values, grads = (tensor[clients].flatten(0, 1).clone(memory_format=order) for tensor in (x, grad))
        out, saved = kernels.group_norm(values, params, 4, 1e-5, relu=True)
        grad_x = kernels.group_norm_backward(grads, saved, params, 4, relu=True, needs_x=True)
        assert grad_x is not None
        assert params.bias is not None
        return out, grad_x, params.weight, params.bias

    equal_for_every_width(step, width)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("trainable", [(True, True), (True, False), (False, True)])
def test_a_group_normalisation_computes_and_updates_what_the_module_does(
    relu: bool, trainable: tuple[bool, bool]
) -> None:
    x, grad = (drawn(seed, 2, 3, 6, 4, dtype=torch.float64) for seed in (0, 1))
    weight, bias = (drawn(seed, 2, 6, dtype=torch.float64) for seed in (2, 3))
    params = LayerWeights(weight.clone(), bias.clone(), torch.tensor([0.1, 0.0], dtype=torch.float64), trainable)
    kernels = CpuLayerKernels()
    out, saved = kernels.group_norm(x.flatten(0, 1), params, 3, 1e-5, relu)
    grad_x = kernels.group_norm_backward(grad.flatten(0, 1), saved, params, 3, relu, needs_x=True)
    assert grad_x is not None
    for client, rate in enumerate((0.1, 0.0)):
        module = nn.GroupNorm(3, 6).double()
        module.weight.data, module.bias.data = weight[client].clone(), bias[client].clone()
        values = x[client].clone().requires_grad_()
        expected = module(values).relu() if relu else module(values)
        wanted = torch.autograd.grad(expected, [values, module.weight, module.bias], grad[client])
        assert torch.allclose(out.view_as(x)[client], expected, rtol=1e-12, atol=1e-12)
        assert torch.allclose(grad_x.view_as(x)[client], wanted[0], rtol=1e-12, atol=1e-12)
        assert params.bias is not None
        for found, before, step, used in zip(
            (params.weight, params.bias), (weight, bias), wanted[1:], trainable, strict=True
        ):
            moved = before[client] - rate * used * step
            assert torch.allclose(found[client], moved, rtol=1e-12, atol=1e-12)


def test_a_client_with_rate_zero_keeps_its_parameters_even_if_its_gradient_is_not_finite() -> None:
    weight, bias = drawn(0, 2, 4, 3, 3, 2, dtype=torch.float32), drawn(1, 2, 4, dtype=torch.float32)
    params = LayerWeights(weight.clone(), bias.clone(), torch.tensor([0.1, 0.0]))
    x, kernels, window = drawn(2, 6, 5, 5, 2, dtype=torch.float32), CpuLayerKernels(), Window((3, 3), (1, 1), (0, 0))
    out, saved = kernels.conv(x, params, window)
    kernels.conv_backward(torch.full_like(out, torch.inf), saved, x.shape, params, window, needs_x=False)
    assert params.bias is not None
    assert torch.equal(params.weight[1], weight[1])
    assert torch.equal(params.bias[1], bias[1])
    assert not params.weight[0].isfinite().all()


@BF16
def test_bfloat16_rounds_operands_and_is_exact_for_numbers_that_it_represents() -> None:
    """A sum of few products of numbers that bfloat16 represents is exact, also when the result is rounded."""
    kernels, source = CpuLayerKernels(half=True), torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-3, 4, shape, generator=source).float() for shape in ((2, 4, 8), (2, 5, 8)))
    bias = drawn(1, 2, 5, dtype=torch.float32)  # is not rounded
    out, _ = kernels.linear(x, LayerWeights(weight, bias, None), relu=False)
    assert torch.equal(out, torch.bmm(x, weight.transpose(1, 2)) + bias.unsqueeze(1))
    images, kernel = (
        torch.randint(-1, 2, shape, generator=source).float() for shape in ((4, 5, 5, 2), (2, 3, 3, 3, 2))
    )
    window, params = Window((3, 3), (1, 1), (1, 1)), LayerWeights(kernel, drawn(2, 2, 3, dtype=torch.float32), None)
    assert torch.equal(kernels.conv(images, params, window)[0], CpuLayerKernels().conv(images, params, window)[0])
    fine = x * (1 + 2.0**-12)
    assert torch.equal(kernels.product(fine, weight.transpose(1, 2)), kernels.product(x, weight.transpose(1, 2)))
