"""Stacked layers: each works on the samples of many clients at once, every client with parameters of its own.

Activations have the shape (C·B, …), B samples for each of C clients. A layer without parameters sees just that, and is
the module itself. Layers with parameters are written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.plain import LayerKernels, Weights, Window, scaled

CHANNELS_LAST = (0, 1, 3, 4, 2)
CHANNELS_FIRST = (0, 1, 4, 2, 3)
"""How stacked convolution weights (C, O, I, kh, kw) are kept: as (C, O, kh, kw, I); and the way back."""


class CannotStack(Exception):
    """This module can only be trained one client at a time; the message says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a pass over the model needs besides samples; with ``rates`` it is a step of SGD, without it only looks."""

    weights: Mapping[str, Tensor]  # name -> the parameter of every client, (C, …)
    rates: Tensor | None = None  # (C,)
    keys: Tensor | None = None  # (C,): from which layers that draw take their draws
    anchor: Tensor | None = None  # a leaf that needs a gradient, so that every layer is visited on the way back

    @property
    def clients(self) -> int:
        """C."""
        return len(next(iter(self.weights.values())))


Layer = Callable[[Step, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """A stacked layer: the call, the parameters that it moves by itself on the way back, those kept channels last."""

    run: Callable[..., Any]  # what a Layer is, or attention with its three inputs
    moved: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stacked:
    """A module for many clients at once."""

    run: Layer
    moved: frozenset[str] = frozenset()  # parameters that the way back moves; the others have gradients
    turned: frozenset[str] = frozenset()  # convolution weights, kept channels last

    def learn(
        self,
        weights: Mapping[str, Tensor],
        trainable: Iterable[str],
        rates: Tensor,
        keys: Tensor,
        inputs: Tensor,
        loss: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """One step of SGD for every client, in place: (C, …) weights, (C,) rates and keys; gives the outputs."""
        anchor = rates.new_zeros((), requires_grad=True)
        leaves = {name: weights[name].detach().requires_grad_() for name in trainable if name not in self.moved}
        outputs = self.run(Step({**weights, **leaves} if leaves else weights, rates, keys, anchor), inputs)
        gradients = torch.autograd.grad(loss(outputs), [*leaves.values(), anchor], allow_unused=True)
        with torch.no_grad():
            for name, gradient in zip(leaves, gradients, strict=False):
                if gradient is not None:
                    weights[name].sub_(scaled(gradient, rates.view(-1, *(1,) * (gradient.ndim - 1))))
        return outputs


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, x_cri, own, relu, products):  # type: ignore[no-untyped-def]
        out, saved = products.linear(x_cri, own, relu)
        ctx.save_for_backward(*saved)
        ctx.rest = own, relu, products
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        own, relu, products = ctx.rest
        grad_x = products.linear_back(grad, ctx.saved_tensors, own, relu, ctx.needs_input_grad[1])
        return None, grad_x, None, None, None


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, x_nhwi, own, window, products):  # type: ignore[no-untyped-def]
        out, saved = products.conv(x_nhwi, own, window)
        ctx.save_for_backward(*saved)
        ctx.rest = x_nhwi.shape, own, window, products
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad_x = ctx.rest[-1].conv_back(grad, ctx.saved_tensors, *ctx.rest[:-1], ctx.needs_input_grad[1])
        return None, grad_x, None, None, None


def _own(module: nn.Linear | nn.Conv2d, name: str, step: Step) -> Weights:
    bias = module.bias
    moves = (module.weight.requires_grad, bias is not None and bias.requires_grad)
    return Weights(step.weights[f"{name}weight"], step.weights.get(f"{name}bias"), step.rates, moves)


def _names(module: nn.Module, name: str) -> tuple[str, ...]:
    return tuple(f"{name}{own}" for own, _ in module.named_parameters(recurse=False))


def linear(module: nn.Linear, name: str, products: LayerKernels, relu: bool = False) -> StackedLayer:
    """A fully connected layer, with the ReLU that may follow it."""

    def run(step: Step, x: Tensor) -> Tensor:
        own = _own(module, name, step)
        rows = x.reshape(len(own), -1, x.shape[-1])
        out: Tensor = _Linear.apply(step.anchor, rows, own, relu, products)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)

    return StackedLayer(run, moved=_names(module, name))


def conv(module: nn.Conv2d, name: str, products: LayerKernels, relu: bool = False, pool: bool = False) -> StackedLayer:
    """A convolution, with the ReLU and the 2×2 pooling that may follow it."""
    padding = module.padding
    if isinstance(padding, str):
        if padding == "same" and any(k % 2 == 0 for k in module.kernel_size):
            raise CannotStack(f"{name}: a convolution with uneven padding")
        padding = tuple(k // 2 for k in module.kernel_size) if padding == "same" else (0, 0)
    if module.groups != 1 or tuple(module.dilation) != (1, 1) or module.padding_mode != "zeros":
        raise CannotStack(f"{name}: a convolution with groups, dilation or this padding")
    kh, kw = module.kernel_size
    sh, sw = module.stride
    down, across = padding
    window = Window((kh, kw), (sh, sw), (down, across), relu, pool)

    def run(step: Step, x: Tensor) -> Tensor:
        image = x.permute(0, 2, 3, 1).contiguous()
        own = _own(module, name, step)
        out: Tensor = _Conv.apply(step.anchor, image, own, window, products)  # type: ignore[no-untyped-call]
        return out.permute(0, 3, 1, 2)

    return StackedLayer(run, moved=_names(module, name), turned=(f"{name}weight",))


def _per_sample(values: Tensor, x: Tensor, *shape: int) -> Tensor:
    """What every client has one of, repeated for each of its samples in ``x`` and shaped to broadcast with them."""
    return values.repeat_interleave(len(x) // len(values), dim=0).view(len(x), *shape)


def layer_norm(module: nn.LayerNorm, name: str) -> StackedLayer:
    """Normalisation over the last dimensions."""

    def run(step: Step, x: Tensor) -> Tensor:
        out = F.layer_norm(x, module.normalized_shape, eps=module.eps)
        if not module.elementwise_affine:
            return out
        shape = (*(1,) * (x.ndim - 1 - len(module.normalized_shape)), *module.normalized_shape)
        scale, bias = _per_sample(step.weights[f"{name}weight"], x, *shape), step.weights.get(f"{name}bias")
        return out * scale if bias is None else torch.addcmul(_per_sample(bias, x, *shape), out, scale)

    return StackedLayer(run)


def group_norm(module: nn.GroupNorm, name: str) -> StackedLayer:
    """Normalisation over groups of channels."""

    def run(step: Step, x: Tensor) -> Tensor:
        out = F.group_norm(x, module.num_groups, eps=module.eps)
        if not module.affine:
            return out
        shape = (x.shape[1], *(1,) * (x.ndim - 2))
        scale, bias = (_per_sample(step.weights[f"{name}{own}"], x, *shape) for own in ("weight", "bias"))
        return torch.addcmul(bias, out, scale)

    return StackedLayer(run)


def batch_norm(module: nn.modules.batchnorm._BatchNorm, name: str) -> StackedLayer:
    """Normalisation over the batch of each client, without running statistics."""
    if module.running_mean is not None:
        raise CannotStack(f"{name}: batch normalisation with running statistics")

    def run(step: Step, x: Tensor) -> Tensor:
        apart = x.reshape(step.clients, -1, *x.shape[1:]).transpose(0, 1)
        weight, bias = step.weights.get(f"{name}weight"), step.weights.get(f"{name}bias")
        out = F.batch_norm(
            apart.flatten(1, 2), None, None, None if weight is None else weight.reshape(-1),
            None if bias is None else bias.reshape(-1), training=True, eps=module.eps,
        )  # fmt: skip
        return out.view_as(apart).transpose(0, 1).reshape(x.shape)

    return StackedLayer(run)


def embedding(module: nn.Embedding, name: str) -> StackedLayer:
    """A table of vectors."""
    if module.max_norm is not None or module.padding_idx is not None or module.sparse or module.scale_grad_by_freq:
        raise CannotStack(f"{name}: an embedding with max_norm, padding, frequencies or sparse gradients")

    def run(step: Step, x: Tensor) -> Tensor:
        table = step.weights[f"{name}weight"]
        clients, words, width = table.shape
        shift = _per_sample(torch.arange(clients, device=x.device) * words, x, *(1,) * (x.ndim - 1))
        return F.embedding(x + shift, table.reshape(clients * words, width))

    return StackedLayer(run)
