"""Average pooling of 2x2 pixels as sums of slices is PyTorch's pooling, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from defedavg.training.kernels.cpu_kernels import CpuLayerKernels
from defedavg.training.stacking.layer_registry import LayerSite, StackedPass, build_layer

POOLING = nn.AvgPool2d(2)
CONTEXT = StackedPass({}, None)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sides", [(2, 2), (4, 6), (5, 8), (7, 3)])
def test_values_and_gradients_are_those_of_the_module(sides: tuple[int, int], memory: torch.memory_format) -> None:
    layer = build_layer(POOLING, LayerSite("", CpuLayerKernels()))
    x = drawn(6, 3, *sides).contiguous(memory_format=memory)
    slopes = drawn(6, 3, sides[0] // 2, sides[1] // 2)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    out, expected = layer.run(CONTEXT, ours), F.avg_pool2d(theirs, 2)
    torch.testing.assert_close(out, expected, rtol=1e-15, atol=1e-15)
    (expected_gradient,) = torch.autograd.grad(expected, theirs, slopes)
    assert torch.equal(torch.autograd.grad(out, ours, slopes)[0], expected_gradient)
    assert layer.passes is not None
    forward, backward = layer.passes(CONTEXT)
    value, saved = forward(x)
    assert torch.equal(value, out.detach())
    spread = backward(slopes, saved, True)
    assert spread is not None
    assert torch.equal(spread, expected_gradient)


@pytest.mark.parametrize("options", [{"ceil_mode": True}, {"padding": 1}, {"divisor_override": 3}, {"stride": 1}])
def test_other_options_are_computed_by_the_module(options: dict[str, Any]) -> None:
    module = nn.AvgPool2d(2, **options)
    x = drawn(2, 3, 5, 5)
    assert torch.equal(build_layer(module, LayerSite("", CpuLayerKernels())).run(CONTEXT, x), module(x))
