"""Kernels of stacked layers in plain PyTorch: forward, and backward with a fused SGD update.

The backward pass of a layer computes the gradient of its input and then updates the layer's parameters, so that no
gradient of weights is stored. Weights have a leading dimension C, one entry per client; convolution weights have the
shape (C, O, kh, kw, I). A client with learning rate zero is not updated, even if its gradient is not finite.
With separate targets the update is subtracted from these: zeros and rate −1 yield the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .deferred import DeferredUpdates

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The parameters of one layer for all clients, and their learning rates."""

    weight: Tensor
    bias: Tensor | None
    rates: Tensor | None  # (C,); None in an evaluation
    trainable: tuple[bool, bool] = (True, True)  # weight, bias
    targets: tuple[Tensor | None, Tensor | None] = (None, None)  # updated instead of weight and bias
    all_train: bool = False  # whether it is known that no rate is zero
    deferred: DeferredUpdates | None = None  # of the weight; without them, every step updates it

    @property
    def updated_weight(self) -> Tensor:
        """The tensor that the backward pass updates, of the shape of the weight."""
        return self.weight if self.targets[0] is None else self.targets[0]

    @property
    def updated_bias(self) -> Tensor | None:
        """The tensor that the backward pass updates, of the shape of the bias."""
        return self.bias if self.targets[1] is None else self.targets[1]

    @property
    def scale(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The function that multiplies gradients by rates."""
        return torch.mul if self.all_train else scaled

    def __len__(self) -> int:
        return self.weight.shape[0]  # much faster than the length of a tensor


@dataclass(frozen=True, slots=True)
class Window:
    """The shape of a convolution, and the operations that are fused with it."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    relu: bool = False
    pool: bool = False  # the maximum of 2×2

    def out(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the output, before pooling."""
        (kh, kw), (sh, sw), (down, across) = self.size, self.stride, self.padding
        return (height + 2 * down - kh) // sh + 1, (width + 2 * across - kw) // sw + 1


@dataclass(frozen=True, slots=True)
class NormalisedConv:
    """A convolution without bias, and the group normalisation of its outputs."""

    conv: LayerWeights
    window: Window
    norm: LayerWeights
    groups: int
    eps: float


@dataclass(frozen=True, slots=True)
class Block:
    """A normalised convolution with ReLU; with a second one, the residual block whose body they are.

    Without ``shortcut``, the inputs of a residual block are added to the body's outputs.
    """

    first: NormalisedConv
    second: NormalisedConv | None = None
    shortcut: NormalisedConv | None = None

    @property
    def adds_inputs(self) -> bool:
        """Whether the block adds its inputs to its outputs as they are."""
        return self.second is not None and self.shortcut is None


Saved = tuple[Tensor, ...]
Gradient = Tensor | None  # of the inputs, if it is needed


class LayerKernels:
    """One batched product per layer, for a convolution over the patches of all samples; for all devices and dtypes."""

    skips_zero_rates = False  # whether a client with learning rate zero costs almost no time
    defers_updates = False  # whether large fully connected layers may have deferred updates
    fuses_blocks = False  # whether sequences of blocks have passes of their own

    def __init__(self, half: bool = False) -> None:
        self._half = half

    def linear(self, x: Tensor, params: LayerWeights, relu: bool) -> tuple[Tensor, Saved]:
        """Return the (C, R, O) outputs of (C, R, I) inputs, and the tensors for the backward pass."""
        out = self.product(x, params.weight.transpose(1, 2), params.bias)
        if relu:
            out.relu_()
        return out, (x, out) if relu else (x,)

    def linear_backward(self, grad: Tensor, saved: Saved, params: LayerWeights, relu: bool, needs_x: bool) -> Gradient:
        """Update the layer's parameters in place, and return the gradient of the inputs."""
        x = saved[0]
        if relu:
            grad = aten.threshold_backward.default(grad, saved[1], 0)
        grad_x = self.product(grad, params.weight) if needs_x else None
        self._update(params, grad, x)
        return grad_x

    def add_updates(
        self, weight: Tensor, deferred: DeferredUpdates, rates: Tensor, steps: Tensor, between: tuple[int, int],
        size: int,
    ) -> None:  # fmt: skip
        """Add the updates of the steps between two numbers to the weights, of (C,) clients with these rates and steps.

        Steps have mini-batches of ``size``. With two equal numbers, this prepares the products of the first step.
        """
        raise NotImplementedError

    def conv(self, x: Tensor, params: LayerWeights, window: Window) -> tuple[Tensor, Saved]:
        """Return the (C·B, H', W', O) outputs of (C·B, H, W, I) images, and the tensors for the backward pass."""
        columns = self._columns(x, len(params), window)
        late_bias = window.pool and params.bias is not None  # one bias for four values does not change their order
        out = self.product(columns, params.weight.flatten(2).transpose(1, 2), None if late_bias else params.bias)
        high, wide = window.out(x.shape[1], x.shape[2])
        out, saved = self._activate(out.view(len(x), high, wide, -1), window, params.bias if late_bias else None)
        return out, (columns, *saved)

    def conv_backward(
        self, grad: Tensor, saved: Saved, shape: torch.Size, params: LayerWeights, window: Window, needs_x: bool
    ) -> Gradient:
        """Update the layer's parameters in place, and return the gradient of the images."""
        columns, *activation = saved
        high, wide = window.out(shape[1], shape[2])
        grad = self._activation_backward(grad, tuple(activation), window)
        flat = grad.reshape(len(params), -1, grad.shape[-1])
        grad_x = None
        if needs_x:
            patches = self.product(flat, params.weight.flatten(2)).view(len(grad), high, wide, *window.size, -1)
            grad_x = self._sum_patches(patches, shape, window)
        weight, target = params.weight.flatten(2), params.updated_weight.flatten(2)
        self._update(replace(params, weight=weight, targets=(target, params.targets[1])), flat, columns)
        return grad_x

    def group_norm(self, x: Tensor, params: LayerWeights, groups: int, eps: float, relu: bool) -> tuple[Tensor, Saved]:
        """Return normalised (C·B, channels, …) values times weight plus bias, and the tensors for the backward pass."""
        x = x.contiguous()  # CUDA's kernel refuses images that are stored channels last
        normal, means, deviations = aten.native_group_norm(x, None, None, *sizes(x), groups, eps)
        out = _by_sample(params.weight, x) * normal
        if params.bias is not None:
            out += _by_sample(params.bias, x)
        if relu:
            out.relu_()
        return out, (x, means, deviations, normal, *((out,) if relu else ()))

    def group_norm_backward(
        self, grad: Tensor, saved: Saved, params: LayerWeights, groups: int, relu: bool, needs_x: bool
    ) -> Gradient:
        """Update the layer's parameters in place, and return the gradient of the inputs."""
        x, means, deviations, normal = saved[:4]
        if relu:
            grad = aten.threshold_backward(grad, saved[4], 0)
        grad_x = None
        if needs_x:
            scaled_grad = (_by_sample(params.weight, x) * grad).contiguous()
            grad_x = aten.native_group_norm_backward(
                scaled_grad, x, means, deviations, None, *sizes(x), groups, (True, False, False)
            )[0]
        assert params.rates is not None
        targets = (params.updated_weight, params.updated_bias)
        for trainable, target, values in zip(params.trainable, targets, (grad * normal, grad), strict=True):
            if trainable and target is not None:
                by_client = values.reshape(len(params), -1, values.shape[1], values.shape[2:].numel())
                target.sub_(params.scale(by_client.sum((1, 3)), params.rates.unsqueeze(1)))
        return grad_x

    def blocks(self, x: Tensor, blocks: Sequence[Block]) -> tuple[Tensor, list[Any]] | None:
        """Return the outputs of blocks for (C·B, H, W, I) images, and what the backward pass needs.

        The result is None if the images are too large, or have other sizes that these passes do not support.
        """
        raise NotImplementedError

    def blocks_backward(self, grad: Tensor, saved: list[Any], blocks: Sequence[Block], needs_x: bool) -> Gradient:
        """Update the parameters of all blocks in place, and return the gradient of the images."""
        raise NotImplementedError

    def operand(self, weights: Tensor) -> Tensor:
        """Return weights in the precision of products, so that several products convert them once."""
        return weights.bfloat16() if self._half else weights

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the products of all clients' matrices, with a bias (C, columns) added to every row."""
        if self._half:
            out = torch.bmm(a.bfloat16(), b.bfloat16()).to(a.dtype)
            return out if bias is None else out.add_(bias.unsqueeze(1))
        return torch.bmm(a, b) if bias is None else torch.baddbmm(bias.unsqueeze(1), a, b)

    def _add_product(self, weight: Tensor, a: Tensor, b: Tensor) -> None:
        if self._half:
            weight.add_(self.product(a, b))
        else:
            weight.baddbmm_(a, b)

    def _update(self, params: LayerWeights, grad: Tensor, x: Tensor) -> None:
        """Subtract rate · gradᵀ·x from the weight, and rate · the sum of grad from the bias."""
        assert params.rates is not None
        rates, scale = params.rates.view(-1, 1, 1), params.scale
        if params.weight.shape[1] * params.weight.shape[2] < grad.shape[1] * grad.shape[2]:  # scale the smaller of both
            if params.trainable[0]:
                params.updated_weight.sub_(scale(self.product(grad.transpose(1, 2), x), rates))
            if (bias := params.updated_bias) is not None and params.trainable[1]:
                bias.sub_(scale(grad.sum(1), params.rates.view(-1, 1)))
            return
        step = scale(grad, -rates)
        if params.trainable[0]:
            self._add_product(params.updated_weight, step.transpose(1, 2), x)
        if (bias := params.updated_bias) is not None and params.trainable[1]:
            bias.add_(step.sum(1))

    def _columns(self, x: Tensor, clients: int, window: Window) -> Tensor:
        """Return the patches of all samples, (C, B·H'·W', kh·kw·I)."""
        down, across = window.padding
        if down or across:
            x = F.pad(x, (0, 0, across, across, down, down))
        n, height, width, ins = x.shape
        (kh, kw), (sh, sw) = window.size, window.stride
        if ins < 4:  # rows of a patch are short: gathering single values is faster than copying rows
            indices = _patch_indices(x.shape[1:], window, x.device)
            return x.view(n, -1).index_select(1, indices).view(clients, -1, kh * kw * ins)
        high, wide = (height - kh) // sh + 1, (width - kw) // sw + 1
        a, b, c, d = x.stride()
        patches = x.as_strided((n, high, wide, kh, kw, ins), (a, sh * b, sw * c, b, c, d))
        return patches.reshape(clients, -1, kh * kw * ins)

    def _sum_patches(self, patches: Tensor, shape: torch.Size, window: Window) -> Tensor:
        """Sum the gradients of overlapping patches, (n, H', W', kh, kw, I), to an image: first rows, then columns."""
        (kh, kw), (sh, sw), (down, across) = window.size, window.stride, window.padding
        n, height, width, ins = shape
        high, wide = patches.shape[1:3]
        rows = patches.new_zeros((n, high, width + 2 * across, kh, ins))
        for j in range(kw):
            rows[:, :, j : j + sw * (wide - 1) + 1 : sw] += patches[:, :, :, :, j]
        image = patches.new_zeros((n, height + 2 * down, width + 2 * across, ins))
        for i in range(kh):
            image[:, i : i + sh * (high - 1) + 1 : sh] += rows[:, :, :, i]
        return image[:, down : down + height, across : across + width]

    def _activate(self, out: Tensor, window: Window, bias: Tensor | None = None) -> tuple[Tensor, Saved]:
        if not window.pool:
            return (out.relu_(), (out,)) if window.relu else (out, ())
        pooled, which = aten.max_pool2d_with_indices.default(out.permute(0, 3, 1, 2), (2, 2), (2, 2))
        pooled = pooled.permute(0, 2, 3, 1)
        if bias is not None:
            pooled.view(len(bias), -1, bias.shape[-1]).add_(bias.unsqueeze(1))
        if window.relu:  # gives the same values as before pooling, from a quarter of the inputs
            pooled.relu_()
        # The backward pass uses the shape and the memory order of the pooling's input, never its values.
        return pooled, (pooled, which, out)

    def _activation_backward(self, grad: Tensor, saved: Saved, window: Window) -> Tensor:
        if not window.pool:
            return aten.threshold_backward.default(grad, saved[0], 0) if window.relu else grad
        pooled, which, out = saved
        if window.relu:  # where the maximum is not positive, the gradient is zero
            grad = aten.threshold_backward.default(grad.contiguous(), pooled, 0)
        grad_out: Tensor = aten.max_pool2d_with_indices_backward.default(
            grad.permute(0, 3, 1, 2), out.permute(0, 3, 1, 2), (2, 2), (2, 2), (0, 0), (1, 1), False, which
        )
        return grad_out.permute(0, 2, 3, 1)


@lru_cache(maxsize=32)
def _patch_indices(shape: torch.Size, window: Window, device: torch.device) -> Tensor:
    """Return the indices of the values of all patches in an image of this shape, (H, W, I)."""
    indices = torch.arange(shape.numel(), device=device).view(shape)
    cut = indices.unfold(0, window.size[0], window.stride[0]).unfold(1, window.size[1], window.stride[1])
    return cut.permute(0, 1, 3, 4, 2).reshape(-1)


def sizes(values: Tensor) -> tuple[int, int, int]:
    """Return the numbers of samples, of channels, and of values in a channel."""
    return values.shape[0], values.shape[1], values.shape[2:].numel()


def _by_sample(values: Tensor, x: Tensor) -> Tensor:
    """Repeat each client's values of channels, (C, channels), for each of its samples in ``x``."""
    return values.repeat_interleave(len(x) // len(values), dim=0).view(*x.shape[:2], *(1,) * (x.ndim - 2))


def scaled(values: Tensor, rates: Tensor) -> Tensor:
    """Return gradients times rates, and zero where the rate is zero, even if the gradient is not finite."""
    return torch.where(rates == 0, 0.0, values * rates)
