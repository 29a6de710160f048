"""The stacked forms of PyTorch's layers: each computes the samples of many clients with each client's own parameters.

Activations have the shape (C·B, …), B samples for each of C clients. ``layer_registry.py`` documents the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.plain import Gradient, LayerWeights, Saved, Window
from .layer_registry import LayerSite, Passes, StackedLayer, StackedPass, StackingError, samplewise, stacked_layer

stacked_layer(
    nn.ReLU, nn.GELU, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.ReLU6, nn.SELU, nn.Mish, nn.Hardswish,
    nn.Softplus, nn.Softmax, nn.LogSoftmax, nn.Unflatten, nn.MaxPool1d, nn.MaxPool2d,
    nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d,
    nn.InstanceNorm1d, nn.InstanceNorm2d,
)(samplewise)  # fmt: skip


@stacked_layer(nn.Flatten)
def flatten(module: nn.Flatten, site: LayerSite) -> StackedLayer:
    """Stack a layer that joins dimensions of every sample."""
    passes: Passes = (lambda x: (module(x), x.shape)), (lambda grad, shape, _: grad.reshape(shape))
    return replace(samplewise(module, site), passes=lambda _: passes)


@stacked_layer(nn.AvgPool2d)
def average_pooling(module: nn.AvgPool2d, site: LayerSite) -> StackedLayer:
    """Stack average pooling; on the CPU, sums of slices take a seventh of the time of PyTorch's own for 2x2 pixels."""
    layer = samplewise(module, site)
    options = (module.kernel_size, module.stride, module.padding, module.ceil_mode, module.divisor_override)
    if options not in ((2, 2, 0, False, None), ((2, 2), (2, 2), 0, False, None)):
        return layer

    def forward(x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
            return F.avg_pool2d(x, 2)
        rows, columns = (side // 2 * 2 for side in x.shape[-2:])
        pairs = x[..., 0:rows:2, :columns] + x[..., 1:rows:2, :columns]
        return (pairs[..., 0::2] + pairs[..., 1::2]) * 0.25

    spread = torch.ops.aten.avg_pool2d_backward.default
    passes: Passes = (
        lambda x: (forward(x), x),
        lambda grad, x, _: spread(grad, x, [2, 2], [2, 2], [0, 0], False, True, None),
    )
    return replace(layer, run=lambda _, x: forward(x), passes=lambda _: passes)


@stacked_layer(nn.Identity)
def identity(module: nn.Identity, site: LayerSite) -> StackedLayer:
    """Stack a layer that returns its inputs."""
    passes: Passes = (lambda x: (x, None)), (lambda grad, *_: grad)
    return replace(samplewise(module, site), passes=lambda _: passes)


@stacked_layer(nn.Tanh)
def tanh(module: nn.Tanh, site: LayerSite) -> StackedLayer:
    """Stack the hyperbolic tangent."""
    backward = torch.ops.aten.tanh_backward.default
    passes: Passes = (lambda x: (out := x.tanh(), out)), (lambda grad, out, _: backward(grad, out))
    return replace(samplewise(module, site), passes=lambda _: passes)


class _FusedLayer(torch.autograd.Function):
    """Computes a layer with its kernels, which update its parameters in the backward pass."""

    @staticmethod
    def forward(ctx, anchor, x, forward, backward):  # type: ignore[no-untyped-def]  # noqa: ARG004  anchor makes autograd call backward
        out, saved = forward(x)
        ctx.save_for_backward(*saved)
        ctx.layer_backward = backward
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return None, ctx.layer_backward(grad, ctx.saved_tensors, needs_x=ctx.needs_input_grad[1]), None, None


def layer_weights(module: nn.Linear | nn.Conv2d | nn.GroupNorm, name: str, context: StackedPass) -> LayerWeights:
    """Return the parameters of a layer, and their learning rates."""
    weight, bias = context.weights[f"{name}weight"], context.weights.get(f"{name}bias")
    trainable = (module.weight.requires_grad, module.bias is not None and module.bias.requires_grad)
    targets = context.targets.get(f"{name}weight"), context.targets.get(f"{name}bias")
    deferred = context.deferred.get(f"{name}weight")
    return LayerWeights(weight, bias, context.rates, trainable, targets, context.all_train, deferred)


def _parameter_names(module: nn.Module, name: str) -> tuple[str, ...]:
    return tuple(f"{name}{parameter}" for parameter, _ in module.named_parameters(recurse=False))


def _relu_follows(following: Sequence[nn.Module]) -> bool:
    return bool(following) and type(following[0]) is nn.ReLU


def _is_halving_pool(module: nn.Module) -> bool:
    """Return whether this is a plain 2×2 maximum."""
    if type(module) is not nn.MaxPool2d or module.return_indices or module.ceil_mode:
        return False
    given = module.kernel_size, module.stride, module.padding, module.dilation
    return all(value in (want, (want, want)) for value, want in zip(given, (2, 2, 0, 1), strict=True))


@stacked_layer(nn.Linear)
def linear(module: nn.Linear, site: LayerSite) -> StackedLayer:
    """Stack a fully connected layer, with the ReLU that may follow it."""
    relu = _relu_follows(site.following)

    def run(context: StackedPass, x: Tensor) -> Tensor:
        params = layer_weights(module, site.name, context)
        rows = x.reshape(len(params), -1, x.shape[-1])
        forward = partial(site.kernels.linear, params=params, relu=relu)
        backward = partial(site.kernels.linear_backward, params=params, relu=relu)
        out: Tensor = _FusedLayer.apply(context.anchor, rows, forward, backward)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)

    def passes(context: StackedPass) -> Passes:
        params, clients = layer_weights(module, site.name, context), context.clients

        def forward(x: Tensor) -> tuple[Tensor, Saved]:
            out, saved = site.kernels.linear(x.reshape(clients, -1, x.shape[-1]), params, relu)
            return out.view(*x.shape[:-1], -1), saved

        def backward(grad: Tensor, saved: Saved, needs_x: bool) -> Gradient:
            rows = grad.reshape(clients, -1, grad.shape[-1])
            grad_x = site.kernels.linear_backward(rows, saved, params, relu, needs_x)
            return None if grad_x is None else grad_x.view(*grad.shape[:-1], -1)

        return forward, backward

    names = _parameter_names(module, site.name)
    return StackedLayer(run, self_updating=names, absorbs=int(relu), passes=passes)


def _padding(module: nn.Conv2d, site: LayerSite) -> tuple[int, ...]:
    """Return how many rows and columns of zeros are added on each side."""
    if not isinstance(module.padding, str):
        return module.padding
    if module.padding == "same" and any(k % 2 == 0 for k in module.kernel_size):
        raise StackingError(f"{site.name}: a convolution with uneven padding")
    return tuple(k // 2 for k in module.kernel_size) if module.padding == "same" else (0, 0)


@stacked_layer(nn.Conv2d)
def conv(module: nn.Conv2d, site: LayerSite) -> StackedLayer:
    """Stack a convolution, with the ReLU and the 2×2 pooling that may follow it."""
    if module.groups != 1 or tuple(module.dilation) != (1, 1) or module.padding_mode != "zeros":
        raise StackingError(f"{site.name}: a convolution with groups, dilation or this padding")
    (kh, kw), (sh, sw), (down, across) = module.kernel_size, module.stride, _padding(module, site)
    relu = _relu_follows(site.following)
    pool = relu and len(site.following) > 1 and _is_halving_pool(site.following[1])
    window = Window((kh, kw), (sh, sw), (down, across), relu, pool)

    def run(context: StackedPass, x: Tensor) -> Tensor:
        image = x.permute(0, 2, 3, 1).contiguous()
        params = layer_weights(module, site.name, context)
        forward = partial(site.kernels.conv, params=params, window=window)
        backward = partial(site.kernels.conv_backward, shape=image.shape, params=params, window=window)
        out: Tensor = _FusedLayer.apply(context.anchor, image, forward, backward)  # type: ignore[no-untyped-call]
        return out.permute(0, 3, 1, 2)

    def passes(context: StackedPass) -> Passes:
        params = layer_weights(module, site.name, context)

        def forward(x: Tensor) -> tuple[Tensor, Any]:
            image = x.permute(0, 2, 3, 1).contiguous()
            out, saved = site.kernels.conv(image, params, window)
            return out.permute(0, 3, 1, 2), (image.shape, saved)

        def backward(grad: Tensor, saved: Any, needs_x: bool) -> Gradient:
            shape, tensors = saved
            grad_x = site.kernels.conv_backward(grad.permute(0, 2, 3, 1), tensors, shape, params, window, needs_x)
            return None if grad_x is None else grad_x.permute(0, 3, 1, 2)

        return forward, backward

    names = _parameter_names(module, site.name)
    absorbs = int(relu) + int(pool)
    return StackedLayer(run, names, channels_last=(f"{site.name}weight",), absorbs=absorbs, passes=passes)


def _per_sample(values: Tensor, x: Tensor, *shape: int) -> Tensor:
    """Repeat each client's values for each of its samples in ``x``, in a shape that broadcasts with them."""
    return values.repeat_interleave(len(x) // len(values), dim=0).view(len(x), *shape)


def _affine(x: Tensor, context: StackedPass, site: LayerSite, *shape: int) -> Tensor:
    weight, bias = (context.weights.get(f"{site.name}{parameter}") for parameter in ("weight", "bias"))
    if weight is None:
        return x
    scale = _per_sample(weight, x, *shape)
    return x * scale if bias is None else torch.addcmul(_per_sample(bias, x, *shape), x, scale)


@stacked_layer(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm, site: LayerSite) -> StackedLayer:
    """Stack a normalisation over the last dimensions."""

    def run(context: StackedPass, x: Tensor) -> Tensor:
        out = F.layer_norm(x, module.normalized_shape, eps=module.eps)
        leading = x.ndim - 1 - len(module.normalized_shape)
        return _affine(out, context, site, *(1,) * leading, *module.normalized_shape)

    return StackedLayer(run)


def _images(x: Tensor) -> Tensor:
    """Return images that are stored channels last as they are, and other values contiguous."""
    channels_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x if channels_last else x.contiguous()


@stacked_layer(nn.GroupNorm)
def group_norm(module: nn.GroupNorm, site: LayerSite) -> StackedLayer:
    """Stack a normalisation over groups of channels, with the ReLU that may follow it."""
    groups, eps = module.num_groups, module.eps
    if not module.affine:
        return StackedLayer(lambda _context, x: F.group_norm(x, groups, eps=eps))
    relu = _relu_follows(site.following)

    def run(context: StackedPass, x: Tensor) -> Tensor:
        params = layer_weights(module, site.name, context)
        forward = partial(site.kernels.group_norm, params=params, groups=groups, eps=eps, relu=relu)
        backward = partial(site.kernels.group_norm_backward, params=params, groups=groups, relu=relu)
        out: Tensor = _FusedLayer.apply(context.anchor, _images(x), forward, backward)  # type: ignore[no-untyped-call]
        return out

    def passes(context: StackedPass) -> Passes:
        params = layer_weights(module, site.name, context)

        def forward(x: Tensor) -> tuple[Tensor, Saved]:
            return site.kernels.group_norm(_images(x), params, groups, eps, relu)

        def backward(grad: Tensor, saved: Saved, needs_x: bool) -> Gradient:
            return site.kernels.group_norm_backward(grad, saved, params, groups, relu, needs_x)

        return forward, backward

    names = _parameter_names(module, site.name)
    return StackedLayer(run, self_updating=names, absorbs=int(relu), passes=passes)


class _Contiguous(torch.autograd.Function):
    """Makes a tensor and its gradient contiguous: the rounding of kernels depends on the order in memory."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]  # noqa: ARG004  (signature)
        return x.contiguous()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]  # noqa: ARG004  (signature)
        return grad.contiguous()


def _contiguous(x: Tensor) -> Tensor:
    out: Tensor = _Contiguous.apply(x)  # type: ignore[no-untyped-call]
    return out


@stacked_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(module: nn.modules.batchnorm._BatchNorm, site: LayerSite) -> StackedLayer:
    """Stack a normalisation over the batch of each client; evaluations use its running statistics, if it has any."""

    def run(context: StackedPass, x: Tensor) -> Tensor:
        names = ("running_mean", "running_var", "weight", "bias")
        given = (context.weights.get(f"{site.name}{name}") for name in names)
        # As views, because F.batch_norm updates the statistics in place.
        mean, variance, weight, bias = (None if values is None else values.view(-1) for values in given)
        training, momentum = context.training or mean is None, module.momentum or 0.0
        by_client = _contiguous(x).view(context.clients, -1, *x.shape[1:]).transpose(1, 2)
        # In (1, C·channels, values of a channel), the rounding of a channel does not depend on the other channels.
        flat = by_client.reshape(1, by_client.shape[0] * by_client.shape[1], -1).contiguous()
        out = _contiguous(F.batch_norm(flat, mean, variance, weight, bias, training, momentum, module.eps))
        return _contiguous(out.view(by_client.shape).transpose(1, 2).reshape(x.shape))

    return StackedLayer(run)


@stacked_layer(nn.Embedding)
def embedding(module: nn.Embedding, site: LayerSite) -> StackedLayer:
    """Stack a table of vectors."""
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise StackingError(f"{site.name}: an embedding with max_norm, frequencies or sparse gradients")

    def run(context: StackedPass, x: Tensor) -> Tensor:
        table = context.weights[f"{site.name}weight"]
        clients, words, size = table.shape
        offsets = _per_sample(torch.arange(clients, device=x.device) * words, x, *(1,) * (x.ndim - 1))
        return without_padding(F.embedding(x + offsets, table.reshape(clients * words, size)), x, module.padding_idx)

    return StackedLayer(run)


def without_padding(vectors: Tensor, indices: Tensor, padding: int | None) -> Tensor:
    """Return the vectors of these indices, such that no gradient reaches the vector of the padding."""
    return vectors if padding is None else torch.where((indices == padding).unsqueeze(-1), vectors.detach(), vectors)
