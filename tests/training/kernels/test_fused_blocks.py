"""Blocks of normalised convolutions with 16-bit operands, in Triton's interpreter, and the same layers one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn

from defedavg.algorithms.protocol import Update
from defedavg.tasks import make_task
from defedavg.tasks.models import Residual
from defedavg.training import LocalTraining, Reference, Trainer, TrainingJob
from defedavg.training import trainer as trainer_module
from defedavg.training.kernels.plain import Block, LayerKernels, LayerWeights, NormalisedConv, Saved, Window

if torch.cuda.is_available():
    pytest.skip("these tests interpret the kernels", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from defedavg.training.kernels.triton_convolutions import aligned
from defedavg.training.kernels.triton_layers import TritonLayerKernels
from helpers.replayed_graphs import trained, without_a_device

# Triton's interpreter converts arrays of one element to numbers, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

CLIENTS, ACTIVE = 3, [0, 2]
RATES = torch.tensor([0.5, 0.0, 0.25])  # the second client is not updated
GROUPS, EPS = 2, 1e-5
Shape = tuple[str, int, int]  # kind of block, output channels, stride
RESNET: tuple[Shape, ...] = (("plain", 8, 1), ("adds inputs", 8, 1), ("projects", 16, 2), ("projects", 16, 2))


class Parameters:
    """Draws the weights of blocks, with targets of zeros, so that a step yields gradients."""

    def __init__(self, dtype: torch.dtype, shift: float = 0.0, seed: int = 0, clients: int = CLIENTS) -> None:
        self._source, self._dtype, self._shift = torch.Generator().manual_seed(seed), dtype, shift
        self._clients = clients
        self.targets = list[Tensor]()

    def draw(self, *shape: int) -> Tensor:
        drawn = torch.randn(CLIENTS, *shape, generator=self._source, dtype=torch.float64)
        return drawn[: self._clients].to(self._dtype)

    def _of(self, weight: Tensor, bias: Tensor | None) -> LayerWeights:
        targets = torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
        self.targets += [target for target in targets if target is not None]
        rates = RATES[: self._clients].to(self._dtype)
        return LayerWeights(weight, bias, rates, (True, bias is not None), targets)

    def unit(self, ins: int, outs: int, size: int, stride: int) -> NormalisedConv:
        conv = self._of(self.draw(outs, size, size, ins), None)
        norm = self._of(1 + 0.2 * self.draw(outs), 0.2 * self.draw(outs) + self._shift)
        return NormalisedConv(conv, Window((size, size), (stride, stride), (size // 2, size // 2)), norm, GROUPS, EPS)

    def blocks(self, shapes: Sequence[Shape], ins: int) -> list[Block]:
        made = []
        for kind, outs, stride in shapes:
            first = self.unit(ins, outs, 3, stride)
            second = None if kind == "plain" else self.unit(outs, outs, 3, 1)
            made.append(Block(first, second, self.unit(ins, outs, 1, stride) if kind == "projects" else None))
            ins = outs
        return made


def pair(kernels: LayerKernels, x: Tensor, unit: NormalisedConv, relu: bool) -> tuple[Tensor, Callable[..., Tensor]]:
    """Return the outputs of a normalised convolution of (C·B, H, W, I) images, and its backward pass."""
    values, of_conv = kernels.conv(x, unit.conv, unit.window)
    out, of_norm = kernels.group_norm(values.permute(0, 3, 1, 2), unit.norm, unit.groups, unit.eps, relu)

    def backward(grad: Tensor) -> Tensor:
        inner = kernels.group_norm_backward(grad.permute(0, 3, 1, 2), of_norm, unit.norm, unit.groups, relu, True)
        assert inner is not None
        grad_x = kernels.conv_backward(inner.permute(0, 2, 3, 1), of_conv, x.shape, unit.conv, unit.window, True)
        assert grad_x is not None
        return grad_x

    return out.permute(0, 2, 3, 1).contiguous(), backward


def one_by_one(kernels: LayerKernels, x: Tensor, blocks: Sequence[Block], slopes: Callable[[Tensor], Tensor]) -> Saved:
    """Return outputs and gradient of the images, by the passes of single layers."""
    backwards = list[Callable[[Tensor], Tensor]]()
    for block in blocks:
        x, backward = residual(kernels, x, block)
        backwards.append(backward)
    grad = slopes(x)
    for backward in reversed(backwards):
        grad = backward(grad)
    return x, grad


def residual(kernels: LayerKernels, x: Tensor, block: Block) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    between, first = pair(kernels, x, block.first, True)
    if block.second is None:
        return between, first
    body, second = pair(kernels, between, block.second, False)
    shortcut, third = (x, None) if block.shortcut is None else pair(kernels, x, block.shortcut, False)
    out = torch.relu(body + shortcut)

    def backward(grad: Tensor) -> Tensor:
        grad = torch.where(out <= 0, 0.0, grad)
        return first(second(grad)) + (grad if third is None else third(grad))

    return out, backward


def fused(kernels: LayerKernels, x: Tensor, blocks: Sequence[Block], slopes: Callable[[Tensor], Tensor]) -> Saved:
    result = kernels.blocks(x, blocks)
    assert result is not None
    out, saved = result
    grad = kernels.blocks_backward(slopes(out), saved, blocks, needs_x=True)
    assert grad is not None
    return out, grad


def step(
    how: Callable[..., Saved], kernels: LayerKernels, x: Tensor, shapes: Sequence[Shape], shift: float = 0.0,
    slope: float = 1.0, clients: int = CLIENTS,
) -> list[Tensor]:  # fmt: skip
    """Return outputs, gradient of the images and all gradients of parameters, with a first dimension C."""
    params = Parameters(x.dtype, shift, clients=clients)
    blocks = params.blocks(shapes, x.shape[-1])

    def slopes(out: Tensor) -> Tensor:
        return slope * params.draw(len(out) // clients, *out.shape[1:]).flatten(0, 1)

    out, grad = how(kernels, x[: len(x) // CLIENTS * clients], blocks, slopes)
    return [values.view(clients, -1, *values.shape[1:]) for values in (out, grad)] + params.targets


def images(samples: int, *shape: int, scale: float = 1.0) -> Tensor:
    source = torch.Generator().manual_seed(9)
    return scale * torch.randn(CLIENTS * samples, *shape, generator=source, dtype=torch.float64)


def far(found: Tensor, expected: Tensor) -> float:
    found, expected = found[ACTIVE].double(), expected[ACTIVE].double()
    return float((found - expected).norm() / expected.norm())


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, tuple[int, int, int], list[Shape]]:
    """Draw samples, images and blocks."""
    kinds, channels = st.sampled_from(["plain", "adds inputs", "projects"]), draw(st.sampled_from([2, 3, 4, 8, 20]))
    shapes, ins = list[Shape](), channels
    for _ in range(draw(st.integers(1, 3))):
        kind, outs, stride = draw(kinds), draw(st.sampled_from([2, 8, 16])), draw(st.integers(1, 3))
        if kind == "adds inputs":
            kind, outs, stride = ("adds inputs", ins, 1) if ins in (2, 4, 8, 16) else ("plain", outs, 1)
        shapes.append((kind, outs, stride))
        ins = outs
    return draw(st.integers(1, 3)), (draw(st.integers(5, 9)), draw(st.integers(5, 9)), channels), shapes


@pytest.mark.no_cover
@examples(max_examples=12)
@given(sequences())
@example((3, (9, 8, 3), list(RESNET)))
@example((2, (8, 7, 4), [("adds inputs", 4, 1), ("plain", 8, 3)]))
@example((1, (7, 5, 2), [("plain", 2, 3), ("plain", 2, 3), ("plain", 2, 1)]))  # at last, one value in a group
def test_blocks_do_what_their_layers_do_one_by_one(
    case: tuple[int, tuple[int, int, int], list[Shape]],
) -> None:
    """Other powers of two change no digit of a 16-bit number, except of gradients far below the largest."""
    samples, image, shapes = case
    kernels, x = TritonLayerKernels("tf32"), images(samples, *image).float()
    expected, found = step(one_by_one, kernels, x, shapes), step(fused, kernels, x, shapes)
    assert torch.equal(found[0][ACTIVE], expected[0][ACTIVE])
    for a, b in zip(found[1:], expected[1:], strict=True):
        a, b = a[ACTIVE].double(), b[ACTIVE].double()
        assert (a - b).norm() <= 1e-4 * b.norm()  # both are zero where a group has one value
    assert not any(target[1].any() for target in found[2:])


@pytest.mark.no_cover
@pytest.mark.parametrize("slope", [1e-20, 1e-9, 1.0, 1e9])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_blocks_agree_with_float64(scale: float, slope: float) -> None:
    """No ReLU is zero, so that no rounding error changes a sign before one."""
    x = images(2, 8, 8, 3, scale=scale)
    shapes = [("plain", 8, 1), ("adds inputs", 8, 1), ("projects", 8, 2)]
    exact = step(one_by_one, LayerKernels(), x, shapes, shift=30.0, slope=slope)
    found = step(fused, TritonLayerKernels("tf32"), x.float(), shapes, shift=30.0, slope=slope)
    assert bool((exact[0] > 0).all())
    single = step(one_by_one, TritonLayerKernels("tf32"), x.float(), shapes, shift=30.0, slope=slope)
    for a, b, c in zip(found, single, exact, strict=True):
        assert far(a, c) <= max(1.01 * far(b, c), 1e-6)  # not less exact than with the power of the largest magnitude


def test_a_bound_is_not_exceeded() -> None:
    """One pixel of a constant image: the largest value that normalisation can have."""
    x = torch.zeros(CLIENTS * 2, 8, 8, 2, dtype=torch.float64)
    x[:, 3, 3] = 1e4
    shapes = [("plain", 2, 1), ("adds inputs", 2, 1), ("projects", 4, 2)]
    found = step(fused, TritonLayerKernels("tf32"), x.float(), shapes, slope=1e3)
    assert all(bool(values[ACTIVE].isfinite().all()) for values in found)
    exact = step(one_by_one, LayerKernels(), x, shapes, slope=1e3)
    assert far(found[0], exact[0]) < 2e-3


@pytest.mark.no_cover
def test_a_flat_image_without_a_gradient_takes_no_digits_from_the_others() -> None:
    """Its inverse deviation is the largest possible, and counts in the bound of the gradients."""
    x = images(2, 8, 8, 3, scale=255.0)
    x[::2] = 0
    shapes = [("plain", 8, 1), ("plain", 8, 1)]
    exact = step(one_by_one, LayerKernels(), x, shapes, shift=-0.5)
    single, found = (
        step(how, TritonLayerKernels("tf32"), x.float(), shapes, shift=-0.5) for how in (one_by_one, fused)
    )
    for a, b, c in zip(found, single, exact, strict=True):
        assert far(a, c) <= 1.05 * far(b, c)


@pytest.mark.no_cover
def test_results_of_a_client_do_not_depend_on_the_others() -> None:
    kernels, x = TritonLayerKernels("tf32"), images(2, 9, 9, 3).float()
    together, alone = step(fused, kernels, x, RESNET), step(fused, kernels, x, RESNET, clients=1)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(together, alone, strict=True))
    x[4:] = torch.nan
    beside = step(fused, kernels, x, RESNET)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(together, beside, strict=True))
    # The gradients of the last shifts are sums of the given slopes.
    assert all(bool(values[2].isnan().any()) for values in beside if values.ndim != 2)


def test_a_gradient_that_is_not_a_number_stays_one() -> None:
    kernels, x = TritonLayerKernels("tf32"), images(1, 8, 8, 3).float()
    found = step(fused, kernels, x, RESNET, slope=torch.nan)
    assert bool(found[0][ACTIVE].isfinite().all())
    assert all(bool(values[ACTIVE].isnan().any()) for values in found[1:])
    assert not any(target[1].any() for target in found[2:])


def test_the_first_block_of_a_model_computes_no_gradient_of_its_images() -> None:
    kernels, x = TritonLayerKernels("tf32"), images(2, 8, 8, 3).float()
    shapes: list[Shape] = [("projects", 8, 2), ("plain", 4, 2)]
    expected, params = step(fused, kernels, x, shapes)[2:], Parameters(torch.float32)
    blocks = params.blocks(shapes, 3)
    result = kernels.blocks(x, blocks)
    assert result is not None
    slopes = params.draw(2, *result[0].shape[1:]).flatten(0, 1)
    assert kernels.blocks_backward(slopes, result[1], blocks, needs_x=False) is None
    assert all(torch.equal(a, b) for a, b in zip(params.targets, expected, strict=True))


@pytest.mark.parametrize(("channels", "side"), [(6, 8), (2, 96)])
def test_other_sizes_are_not_fused(channels: int, side: int) -> None:
    """Numbers of channels that are no powers of two, and samples that one program cannot hold."""
    blocks = Parameters(torch.float32).blocks([("plain", channels, 1)], 2)
    assert TritonLayerKernels("tf32").blocks(images(1, side, side, 2).float(), blocks) is None


def test_sums_that_broadcast_are_not_fused() -> None:
    """PyTorch adds images of one pixel or one channel to every pixel or channel of others."""
    params, kernels = Parameters(torch.float32), TritonLayerKernels("tf32")
    padded, one = params.unit(4, 4, 3, 1), params.unit(4, 4, 1, 5)
    unpadded = replace(padded, window=Window((3, 3), (1, 1), (0, 0)))
    narrow = params.unit(1, 4, 3, 1)
    for block, side, channels in ((Block(padded, padded, one), 5, 4), (Block(unpadded, padded), 3, 4),
                                  (Block(narrow, padded), 5, 1)):  # fmt: skip
        assert kernels.blocks(images(1, side, side, channels).float(), [block]) is None


def test_aligned_images_are_contiguous() -> None:
    x = images(1, 5, 1, 3).as_strided((CLIENTS, 5, 1, 3), (15, 1, 15, 5))
    assert aligned(x).is_contiguous()
    assert torch.equal(aligned(x)[..., :3], x)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, and integers with the bits of one that is above all others."""

    def filled(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    empty, empty_like = Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **named: filled(empty(*args, **named)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **named: filled(empty_like(*args, **named)))


LAST_LINES: tuple[Shape, ...] = (("projects", 8, 3), ("plain", 2, 2), ("projects", 4, 1))


@pytest.mark.no_cover
@pytest.mark.parametrize(("shapes", "image"), [(RESNET, (10, 7, 3)), (LAST_LINES, (12, 11, 5))])
def test_memory_that_no_kernel_has_written_is_not_read(
    monkeypatch: pytest.MonkeyPatch, shapes: Sequence[Shape], image: tuple[int, int, int]
) -> None:
    """Kernels leave out a client with learning rate zero; the others' sides are no multiples of the strides."""
    kernels, x = TritonLayerKernels("tf32"), images(1, *image).float()
    expected = step(fused, kernels, x, shapes)
    poison(monkeypatch)
    found = step(fused, kernels, x, shapes)
    assert all(torch.equal(a[ACTIVE], b[ACTIVE]) for a, b in zip(found, expected, strict=True))
    assert not any(target[1].any() for target in found[2:])


def test_only_steps_with_16_bit_operands_have_blocks() -> None:
    assert [TritonLayerKernels(p).fuses_blocks for p in ("tf32", "float32", "bf16")] == [True, False, False]
    assert not LayerKernels().fuses_blocks
    block = Parameters(torch.float32).blocks([("plain", 4, 1)], 2)
    frozen = replace(block[0].first.conv, trainable=(False, False))
    result = TritonLayerKernels("tf32").blocks(
        images(1, 5, 5, 2).float(), [Block(replace(block[0].first, conv=frozen))]
    )
    assert result is not None


def small_resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.ReLU(), Residual(4, 8, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    )


@pytest.mark.no_cover
def test_a_replayed_step_of_a_model_agrees_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of different lengths and unused slots, whose kernels do nothing; the buffers are those of the job before."""
    source = np.random.default_rng(0)
    data = source.random((24, 3, 5, 5), np.float32), np.arange(24) % 3
    task = make_task(model=small_resnet, train=data, test=data, clients=[np.arange(i, 24, 4) for i in range(4)])
    training = LocalTraining(0, batch_size=2)
    executor = Reference(task, training)
    monkeypatch.setattr(trainer_module, "kernels_for", lambda *_: TritonLayerKernels("tf32"))
    trainer = Trainer(task, executor.module, batch_size=2, max_batch_jobs=3)
    without_a_device(monkeypatch)
    updates = [Update(i, i, 0, 2 - i) for i in range(2)]
    jobs = [TrainingJob(training, task, executor.versions[0], update, 0.1) for update in updates]
    together, alone = trained(trainer, jobs), trained(trainer, jobs[:1])
    assert torch.equal(together[0], alone[0])
    for update, delta in zip(updates, together, strict=True):
        expected, _ = executor.train(update, executor.versions[0], rate=0.1)
        assert float((delta - expected).norm() / expected.norm()) < 1e-2
