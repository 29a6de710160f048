"""The products of stacked layers in plain PyTorch: forward, and backward with the step of SGD in the same pass.

A layer's own parameters move in its backward pass, after the gradient of its input was taken: no gradient of weights
is ever stored. Weights have a leading dimension C, one entry per client; convolution weights lie as (C, O, kh, kw, I).
Rate zero means that a client stands still, whatever its gradient is, even where that is no number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

SMALL_PATCH = 64  # up to here one product over patches beats oneDNN's convolution (benchmarks/layers.py)


@dataclass(frozen=True, slots=True)
class Weights:
    """The parameters of one layer for all clients, and how fast they move."""

    weight: Tensor
    bias: Tensor | None
    rates: Tensor | None  # (C,); None where nothing is learned
    moves: tuple[bool, bool] = (True, True)  # whether weight and bias are trained

    def __len__(self) -> int:
        return len(self.weight)


@dataclass(frozen=True, slots=True)
class Window:
    """The shape of a convolution, and what follows it in the same pass."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    relu: bool = False
    pool: bool = False  # the maximum of 2×2

    def out(self, height: int, width: int) -> tuple[int, int]:
        """The image that comes out, before pooling."""
        (kh, kw), (sh, sw), (down, across) = self.size, self.stride, self.padding
        return (height + 2 * down - kh) // sh + 1, (width + 2 * across - kw) // sw + 1


Saved = tuple[Tensor, ...]


class LayerKernels:
    """One batched product per layer, over the patches of all samples for a convolution; any device, any precision."""

    skips = False  # whether a client with rate zero costs next to nothing

    def __init__(self, half: bool = False) -> None:
        self._half = half

    def linear(self, x: Tensor, own: Weights, relu: bool) -> tuple[Tensor, Saved]:
        """(C, R, I) inputs to (C, R, O) outputs, and what the way back needs."""
        out = self._product(x, own.weight.transpose(1, 2), own.bias)
        if relu:
            out.relu_()
        return out, (x, out) if relu else (x,)

    def linear_back(self, grad: Tensor, saved: Saved, own: Weights, relu: bool, needs_x: bool) -> Tensor | None:
        """The gradient of the inputs; the layer's own parameters are moved."""
        x = saved[0]
        if relu:
            grad = aten.threshold_backward(grad, saved[1], 0)
        grad_x = self._product(grad, own.weight) if needs_x else None
        self._descend(own, grad, x)
        return grad_x

    def conv(self, x: Tensor, own: Weights, window: Window) -> tuple[Tensor, Saved]:
        """(C·B, H, W, I) images to (C·B, H', W', O), and what the way back needs."""
        columns = self._columns(x, len(own), window)
        late = window.pool and own.bias is not None  # the largest of four stays so when all get the same bias
        out = self._product(columns, own.weight.flatten(2).transpose(1, 2), None if late else own.bias)
        high, wide = window.out(x.shape[1], x.shape[2])
        ends, more = self._after(out.view(len(x), high, wide, -1), window, own.bias if late else None)
        return ends, (columns, *more)

    def conv_back(
        self, grad: Tensor, saved: Saved, shape: torch.Size, own: Weights, window: Window, needs_x: bool
    ) -> Tensor | None:
        """The gradient of the images; the layer's own parameters are moved."""
        columns, *more = saved
        high, wide = window.out(shape[1], shape[2])
        grad = self._before(grad, tuple(more), window)
        flat = grad.reshape(len(own), -1, grad.shape[-1])
        grad_x = None
        if needs_x:
            spread = self._product(flat, own.weight.flatten(2)).view(len(grad), high, wide, *window.size, -1)
            grad_x = _add_patches(spread, shape, window)
        self._descend(Weights(own.weight.flatten(2), own.bias, own.rates, own.moves), flat, columns)
        return grad_x

    def _product(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._half:
            out = torch.bmm(a.bfloat16(), b.bfloat16()).to(a.dtype)
            return out if bias is None else out.add_(bias.unsqueeze(1))
        return torch.bmm(a, b) if bias is None else torch.baddbmm(bias.unsqueeze(1), a, b)

    def _descend(self, own: Weights, grad: Tensor, x: Tensor) -> None:
        """Move weight by rate · gradᵀ·x, and bias by rate · the sum of grad."""
        assert own.rates is not None
        rates = own.rates.view(-1, 1, 1)
        if own.weight[0].numel() < grad[0].numel():  # the smaller of the two is scaled
            if own.moves[0]:
                own.weight.sub_(scaled(self._product(grad.transpose(1, 2), x), rates))
            if own.bias is not None and own.moves[1]:
                own.bias.sub_(scaled(grad.sum(1), own.rates.view(-1, 1)))
            return
        step = scaled(grad, -rates)
        if own.moves[0]:
            if self._half:
                own.weight.add_(self._product(step.transpose(1, 2), x))
            else:
                own.weight.baddbmm_(step.transpose(1, 2), x)
        if own.bias is not None and own.moves[1]:
            own.bias.add_(step.sum(1))

    def _columns(self, x: Tensor, clients: int, window: Window) -> Tensor:
        """The patches of all samples behind each other, (C, B·H'·W', kh·kw·I)."""
        down, across = window.padding
        if down or across:
            x = F.pad(x, (0, 0, across, across, down, down))
        n, height, width, ins = x.shape
        (kh, kw), (sh, sw) = window.size, window.stride
        if ins < 4:  # lines of a patch are short: picked by number they are copied faster than line by line
            picked = x.view(n, -1).index_select(1, _patches(height, width, ins, window.size, window.stride, x.device))
            return picked.view(clients, -1, kh * kw * ins)
        high, wide = (height - kh) // sh + 1, (width - kw) // sw + 1
        a, b, c, d = x.stride()
        patches = x.as_strided((n, high, wide, kh, kw, ins), (a, sh * b, sw * c, b, c, d))
        return patches.reshape(clients, -1, kh * kw * ins)

    def _after(self, out: Tensor, window: Window, bias: Tensor | None = None) -> tuple[Tensor, Saved]:
        """Pooling, a bias that was left for here, and ReLU, where the layer has them."""
        if not window.pool:
            return (out.relu_(), (out,)) if window.relu else (out, ())
        pooled, which = aten.max_pool2d_with_indices(out.permute(0, 3, 1, 2), (2, 2), (2, 2))
        pooled = pooled.permute(0, 2, 3, 1)
        if bias is not None:
            pooled.view(len(bias), -1, bias.shape[-1]).add_(bias.unsqueeze(1))
        if window.relu:  # after pooling it is the same, and on a quarter of the values
            pooled.relu_()
        # The way back asks for the shape and the memory order of what was pooled, never for its values.
        return pooled, (pooled, which, out)

    def _before(self, grad: Tensor, saved: Saved, window: Window) -> Tensor:
        """The gradient before pooling and ReLU."""
        if not window.pool:
            return aten.threshold_backward(grad, saved[0], 0) if window.relu else grad
        pooled, which, out = saved
        if window.relu:  # a maximum of zero or less has no slope, and neither has what it was taken from
            grad = aten.threshold_backward(grad.contiguous(), pooled, 0)
        found: Tensor = aten.max_pool2d_with_indices_backward(
            grad.permute(0, 3, 1, 2), out.permute(0, 3, 1, 2), (2, 2), (2, 2), (0, 0), (1, 1), False, which
        )
        return found.permute(0, 2, 3, 1)


@lru_cache(maxsize=32)
def _patches(
    height: int, width: int, ins: int, size: tuple[int, int], stride: tuple[int, int], device: torch.device
) -> Tensor:
    """Where the values of all patches of an image (H, W, I) lie."""
    places = torch.arange(height * width * ins, device=device).view(height, width, ins)
    cut = places.unfold(0, size[0], stride[0]).unfold(1, size[1], stride[1])
    return cut.permute(0, 1, 3, 4, 2).reshape(-1)


def scaled(values: Tensor, rates: Tensor) -> Tensor:
    """Gradients times rates; nothing at all where the rate is zero, even where the gradient is no number."""
    return torch.where(rates == 0, 0.0, values * rates)


def _add_patches(spread: Tensor, shape: torch.Size, window: Window) -> Tensor:
    """Sum the gradients of overlapping patches, (n, H', W', kh, kw, I), to an image: across first, then down."""
    (kh, kw), (sh, sw), (down, across) = window.size, window.stride, window.padding
    n, height, width, ins = shape
    high, wide = spread.shape[1:3]
    rows = spread.new_zeros((n, high, width + 2 * across, kh, ins))
    for j in range(kw):
        rows[:, :, j : j + sw * (wide - 1) + 1 : sw] += spread[:, :, :, :, j]
    image = spread.new_zeros((n, height + 2 * down, width + 2 * across, ins))
    for i in range(kh):
        image[:, i : i + sh * (high - 1) + 1 : sh] += rows[:, :, :, i]
    return image[:, down : down + height, across : across + width]


class CpuLayerKernels(LayerKernels):
    """In float32 on the CPU convolutions with large patches go to oneDNN, one client after the other."""

    def conv(self, x: Tensor, own: Weights, window: Window) -> tuple[Tensor, Saved]:
        """As ``Products.conv``."""
        if not _suits_onednn(own.weight):
            return super().conv(x, own, window)
        images = x.view(len(own), -1, *x.shape[1:]).permute(0, 1, 4, 2, 3)
        kernels = own.weight.permute(0, 1, 4, 2, 3)
        biases = own.bias if own.bias is not None else [None] * len(own)
        outs = [
            F.conv2d(image, kernel, bias, window.stride, window.padding)
            for image, kernel, bias in zip(images, kernels, biases, strict=True)
        ]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        ends, more = self._after(out.permute(0, 2, 3, 1), window)
        return ends, (x, *more)

    def conv_back(
        self, grad: Tensor, saved: Saved, shape: torch.Size, own: Weights, window: Window, needs_x: bool
    ) -> Tensor | None:
        """As ``Products.conv_back``."""
        if not _suits_onednn(own.weight):
            return super().conv_back(grad, saved, shape, own, window, needs_x)
        x, *more = saved
        grad = self._before(grad, tuple(more), window)
        assert own.rates is not None
        slots = len(own)
        slopes, images = (tensor.permute(0, 3, 1, 2).chunk(slots) for tensor in (grad, x))
        kernels = own.weight.permute(0, 1, 4, 2, 3).unbind()
        wanted = (needs_x, own.moves[0], False)
        found = []
        for slope, image, kernel, rate in zip(slopes, images, kernels, own.rates.tolist(), strict=True):
            grad_x, grad_kernel, _ = aten.convolution_backward(
                slope, image, kernel, None, window.stride, window.padding, (1, 1), False, (0, 0), 1, wanted
            )
            if own.moves[0]:
                kernel.sub_(grad_kernel, alpha=rate)
            found.append(grad_x)
        if own.bias is not None and own.moves[1]:  # a sum of its own takes a tenth of the time that oneDNN takes for it
            own.bias.sub_(grad.reshape(slots, -1, grad.shape[-1]).sum(1) * own.rates.unsqueeze(1))
        if not needs_x:
            return None
        return (found[0] if slots == 1 else torch.cat(found)).permute(0, 2, 3, 1)


def _suits_onednn(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight[0, 0].numel() > SMALL_PATCH
