"""The Triton kernels agree with plain operations; Triton's interpreter runs them on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from defedavg.training.kernels.plain import LayerKernels, LayerWeights, Window
from helpers.convolutions import Convolution, convolutions

if torch.cuda.is_available():
    pytest.skip("benchmarks/kernels.py checks the compiled kernels on a device", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from defedavg.training.kernels.triton_layers import TritonLayerKernels

# Triton's interpreter converts arrays of one element to numbers, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

CLIENTS = 3


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max()) or 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * scale)


def changes(params: LayerWeights, start: LayerWeights) -> list[Tensor]:
    pairs = [(params.weight, start.weight), (params.bias, start.bias)]
    return [a - b for a, b in pairs if a is not None and b is not None]


@pytest.mark.no_cover
@examples(max_examples=25)
@given(convolutions(), st.booleans(), st.booleans())
@example((2, (7, 8, 3), 4, Window((3, 3), (2, 2), (0, 0), relu=True)), True, False)  # lines of patches
@example((1, (1, 3, 2), 1, Window((1, 1), (1, 2), (0, 0))), False, False)
def test_convolutions(case: Convolution, bias: bool, frozen: bool) -> None:
    samples, image, outs, window = case
    x = random(0, CLIENTS * samples, *image)
    rates = torch.tensor([0.1, 0.0, 0.3])  # the second client is not updated
    start = LayerWeights(
        random(1, CLIENTS, outs, *window.size, image[2]), random(2, CLIENTS, outs) if bias else None, rates
    )
    found = []
    for kernels in (TritonLayerKernels("float32"), LayerKernels()):
        params = LayerWeights(
            start.weight.clone(), None if start.bias is None else start.bias.clone(), rates, (not frozen, bias)
        )
        out, saved = kernels.conv(x, params, window)
        grad_x = kernels.conv_backward(random(3, *out.shape), saved, x.shape, params, window, True)
        assert grad_x is not None
        found.append((out, grad_x, *changes(params, start)))
    active = torch.tensor([0, 2])
    for a, b in zip(*found, strict=True):
        same(a.unflatten(0, (CLIENTS, -1))[active], b.unflatten(0, (CLIENTS, -1))[active])
    for change in found[0][2:]:
        assert not change[1].any()  # whatever its gradient
    if frozen:
        assert not found[0][2].any()


@pytest.mark.no_cover
@examples(max_examples=25)
@given(
    rows=st.integers(1, 70), ins=st.integers(1, 150), outs=st.integers(1, 80), relu=st.booleans(), bias=st.booleans()
)
def test_fully_connected_layers(rows: int, ins: int, outs: int, relu: bool, bias: bool) -> None:
    x = random(0, CLIENTS, rows, ins)
    rates = torch.tensor([0.1, 0.0, 0.3])
    start = LayerWeights(random(1, CLIENTS, outs, ins), random(2, CLIENTS, outs) if bias else None, rates)
    found = []
    for kernels in (TritonLayerKernels("float32"), LayerKernels()):
        params = LayerWeights(
            start.weight.clone(), None if start.bias is None else start.bias.clone(), rates, (True, bias)
        )
        out, saved = kernels.linear(x, params, relu)
        grad_x = kernels.linear_backward(random(3, *out.shape), saved, params, relu, True)
        assert grad_x is not None
        found.append((out, grad_x, *changes(params, start)))
    for a, b in zip(*found, strict=True):
        same(a[[0, 2]], b[[0, 2]])
    for change in found[0][2:]:
        assert not change[1].any()


@examples(max_examples=25)
@given(
    samples=st.integers(1, 4),
    side=st.integers(2, 9),
    channels=st.sampled_from([(1, 1), (4, 4), (2, 16), (4, 8), (3, 6)]),
    relu=st.booleans(),
    frozen=st.booleans(),
    channels_last=st.booleans(),
)
def test_group_normalisation(
    samples: int, side: int, channels: tuple[int, int], relu: bool, frozen: bool, channels_last: bool
) -> None:
    """Also where plain operations compute it: numbers of channels that are no powers of two, other memory orders."""
    groups, count = channels
    shape = CLIENTS * samples, count, side, side + 1
    order = torch.channels_last if channels_last else torch.contiguous_format
    x, rates = random(0, *shape).to(memory_format=order), torch.tensor([0.1, 0.0, 0.3])
    start = LayerWeights(random(1, CLIENTS, count), random(2, CLIENTS, count), rates)
    found = []
    for kernels in (TritonLayerKernels("float32"), LayerKernels()):
        assert start.bias is not None
        params = LayerWeights(start.weight.clone(), start.bias.clone(), rates, (not frozen, True))
        out, saved = kernels.group_norm(x, params, groups, 1e-5, relu)
        grad_x = kernels.group_norm_backward(random(3, *shape), saved, params, groups, relu, True)
        assert grad_x is not None
        found.append((out, grad_x, *changes(params, start)))
    for a, b in zip(*found, strict=True):
        a, b = (values.unflatten(0, (CLIENTS, -1))[[0, 2]] for values in (a, b))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * max(1.0, float(b.abs().max())))
    assert not any(change[1].any() for change in found[0][2:])
    assert found[0][2].any() != frozen


def separated(params: LayerWeights) -> LayerWeights:
    """Return the same parameters with targets of zeros and rates −1; the second client is idle."""
    targets = torch.zeros_like(params.weight), None if params.bias is None else torch.zeros_like(params.bias)
    return dataclasses.replace(params, rates=torch.tensor([-1.0, -0.0, -1.0]), targets=targets)


@pytest.mark.no_cover
@examples(max_examples=15)
@given(convolutions(), st.booleans())
def test_gradients_of_convolutions(case: Convolution, bias: bool) -> None:
    samples, image, outs, window = case
    x = random(0, CLIENTS * samples, *image)
    weight = random(1, CLIENTS, outs, *window.size, image[2])
    given = LayerWeights(weight.clone(), random(2, CLIENTS, outs) if bias else None, None, (True, bias))
    found = []
    for kernels in (TritonLayerKernels("float32"), LayerKernels()):
        params = separated(given)
        out, saved = kernels.conv(x, params, window)
        kernels.conv_backward(random(3, *out.shape), saved, x.shape, params, window, True)
        found.append(params.targets)
        assert torch.equal(params.weight, weight)
    for a, b in zip(*found, strict=True):
        if a is not None and b is not None:
            same(a[[0, 2]], b[[0, 2]])
            assert not a[1].any()


@examples(max_examples=15)
@given(rows=st.integers(1, 70), ins=st.integers(1, 150), outs=st.integers(1, 80), bias=st.booleans())
def test_gradients_of_fully_connected_layers(rows: int, ins: int, outs: int, bias: bool) -> None:
    x, weight = random(0, CLIENTS, rows, ins), random(1, CLIENTS, outs, ins)
    given = LayerWeights(weight.clone(), random(2, CLIENTS, outs) if bias else None, None, (True, bias))
    found = []
    for kernels in (TritonLayerKernels("float32"), LayerKernels()):
        params = separated(given)
        out, saved = kernels.linear(x, params, True)
        grad_x = kernels.linear_backward(random(3, *out.shape), saved, params, True, True)
        found.append((*params.targets, grad_x))
        assert torch.equal(params.weight, weight)
    for a, b in zip(*found, strict=True):
        if a is not None and b is not None:
            same(a[[0, 2]], b[[0, 2]])
    assert not any(target is not None and target[1].any() for target in found[0][:2])


def test_an_evaluation_skips_no_client() -> None:
    """An evaluation has no rates: all clients are computed."""
    x, weight, bias = random(0, 4, 6, 6, 2), random(1, 2, 8, 3, 3, 2), random(2, 2, 8)
    window = Window((3, 3), (1, 1), (1, 1), relu=True, pool=True)
    params = LayerWeights(weight, bias, None)
    same(TritonLayerKernels("float32").conv(x, params, window)[0], LayerKernels().conv(x, params, window)[0])


def test_pooling_keeps_nan() -> None:
    x = torch.full((1, 4, 4, 1), torch.nan)
    params = LayerWeights(torch.ones(1, 1, 1, 1, 1), None, None)
    out, _ = TritonLayerKernels("float32").conv(x, params, Window((1, 1), (1, 1), (0, 0), relu=True, pool=True))
    assert torch.isnan(out).all()


def test_the_gradient_of_a_tie_at_zero_is_zero() -> None:
    x = torch.zeros(1, 4, 4, 1)
    params = LayerWeights(torch.ones(1, 1, 1, 1, 1), None, torch.ones(1))
    window = Window((1, 1), (1, 1), (0, 0), relu=True, pool=True)
    out, saved = TritonLayerKernels("float32").conv(x, params, window)
    grad_x = TritonLayerKernels("float32").conv_backward(torch.ones_like(out), saved, x.shape, params, window, True)
    assert grad_x is not None
    assert not grad_x.any()
