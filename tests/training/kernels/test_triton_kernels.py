"""The Triton kernels against plain operations, on the CPU in Triton's own interpreter: no device is needed."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from defedavg.training.kernels.plain import LayerKernels, Weights, Window

if torch.cuda.is_available():
    pytest.skip("benchmarks/kernels.py checks the compiled kernels on a device", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="Triton is not installed")

from defedavg.training.kernels.triton_layers import TritonLayerKernels

# Triton's interpreter turns arrays of one element into numbers, which NumPy will forbid one day.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

CLIENTS = 3


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max()) or 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * scale)


def moved(own: Weights, start: Weights) -> list[Tensor]:
    pairs = [(own.weight, start.weight), (own.bias, start.bias)]
    return [a - b for a, b in pairs if a is not None and b is not None]


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[int, tuple[int, int, int], int, Window]:
    """Samples per client, image (H, W, I), output channels, and a window that fits."""
    size = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    pool = draw(st.booleans())
    least = [max(1, k + (1 if pool else 0) * 2 - 2 * p) for k, p in zip(size, padding, strict=True)]
    stride = (1, 1) if pool else draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    high, wide = (draw(st.integers(low, low + 5)) for low in least)
    window = Window(size, stride, padding, relu=pool or draw(st.booleans()), pool=pool)
    return (
        draw(st.integers(1, 5)),
        (high, wide, draw(st.sampled_from([1, 2, 3, 4, 5, 17]))),
        draw(st.integers(1, 40)),
        window,
    )


@examples(max_examples=25)
@given(convolutions(), st.booleans(), st.booleans())
def test_convolutions(case: tuple[int, tuple[int, int, int], int, Window], bias: bool, frozen: bool) -> None:
    samples, image, outs, window = case
    x = random(0, CLIENTS * samples, *image)
    rates = torch.tensor([0.1, 0.0, 0.3])  # the second stands still
    start = Weights(random(1, CLIENTS, outs, *window.size, image[2]), random(2, CLIENTS, outs) if bias else None, rates)
    found = []
    for products in (TritonLayerKernels("float32"), LayerKernels()):
        own = Weights(
            start.weight.clone(), None if start.bias is None else start.bias.clone(), rates, (not frozen, bias)
        )
        out, saved = products.conv(x, own, window)
        grad_x = products.conv_back(random(3, *out.shape), saved, x.shape, own, window, True)
        assert grad_x is not None
        found.append((out, grad_x, *moved(own, start)))
    active = torch.tensor([0, 2])
    for a, b in zip(*found, strict=True):
        same(a.unflatten(0, (CLIENTS, -1))[active], b.unflatten(0, (CLIENTS, -1))[active])
    for change in found[0][2:]:
        assert not change[1].any()  # whatever its gradient
    if frozen:
        assert not found[0][2].any()


@examples(max_examples=25)
@given(
    rows=st.integers(1, 70), ins=st.integers(1, 150), outs=st.integers(1, 80), relu=st.booleans(), bias=st.booleans()
)
def test_fully_connected_layers(rows: int, ins: int, outs: int, relu: bool, bias: bool) -> None:
    x = random(0, CLIENTS, rows, ins)
    rates = torch.tensor([0.1, 0.0, 0.3])
    start = Weights(random(1, CLIENTS, outs, ins), random(2, CLIENTS, outs) if bias else None, rates)
    found = []
    for products in (TritonLayerKernels("float32"), LayerKernels()):
        own = Weights(start.weight.clone(), None if start.bias is None else start.bias.clone(), rates, (True, bias))
        out, saved = products.linear(x, own, relu)
        grad_x = products.linear_back(random(3, *out.shape), saved, own, relu, True)
        assert grad_x is not None
        found.append((out, grad_x, *moved(own, start)))
    for a, b in zip(*found, strict=True):
        same(a[[0, 2]], b[[0, 2]])
    for change in found[0][2:]:
        assert not change[1].any()


def test_without_rates_nobody_is_left_out() -> None:
    """Versions that are only measured have no rates: all of them are computed."""
    x, weight, bias = random(0, 4, 6, 6, 2), random(1, 2, 8, 3, 3, 2), random(2, 2, 8)
    window = Window((3, 3), (1, 1), (1, 1), relu=True, pool=True)
    own = Weights(weight, bias, None)
    same(TritonLayerKernels("float32").conv(x, own, window)[0], LayerKernels().conv(x, own, window)[0])


def test_what_is_not_a_number_stays_so_through_pooling() -> None:
    x = torch.full((1, 4, 4, 1), torch.nan)
    own = Weights(torch.ones(1, 1, 1, 1, 1), None, None)
    out, _ = TritonLayerKernels("float32").conv(x, own, Window((1, 1), (1, 1), (0, 0), relu=True, pool=True))
    assert torch.isnan(out).all()


def test_a_tie_at_zero_has_no_slope() -> None:
    x = torch.zeros(1, 4, 4, 1)
    own = Weights(torch.ones(1, 1, 1, 1, 1), None, torch.ones(1))
    window = Window((1, 1), (1, 1), (0, 0), relu=True, pool=True)
    out, saved = TritonLayerKernels("float32").conv(x, own, window)
    grad_x = TritonLayerKernels("float32").conv_back(torch.ones_like(out), saved, x.shape, own, window, True)
    assert grad_x is not None
    assert not grad_x.any()
