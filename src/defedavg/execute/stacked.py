"""Many clients' models as one: parameters get a leading dimension C, samples of all clients lie behind each other.

Activations have the shape (C·B, …), B samples for each of C clients. A layer without parameters sees just that, and is
the module itself. Only layers with parameters are written anew: Linear, Conv2d, LayerNorm, GroupNorm, Embedding. Any
other module without randomness or moving buffers goes through ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

kernels: Any  # a module without types
try:
    from . import kernels
except ImportError:  # no Triton: the same results from plain operations
    kernels = None

Params = Mapping[str, Tensor]
"""Name -> the parameter of every client, shape (C, …)."""

Layer = Callable[[Params, Tensor], Tensor]

WEIGHTLESS = (
    nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softmax, nn.LogSoftmax, nn.Identity,
    nn.Flatten, nn.Unflatten, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    nn.ZeroPad2d,
)  # fmt: skip


class CannotStack(Exception):
    """This module can only be trained one client at a time; the message says why."""


class _Columns(torch.autograd.Function):
    """Convolution as one product per client: the patches of all samples times the kernel, in channels-last order."""

    @staticmethod
    def forward(ctx, x_nhwi, kernel_cpo, bias_co, size, stride):  # type: ignore[no-untyped-def]
        clients, _, outs = kernel_cpo.shape
        n, height, width, ins = x_nhwi.shape
        (kh, kw), (sh, sw) = size, stride
        high, wide = (height - kh) // sh + 1, (width - kw) // sw + 1
        if x_nhwi.is_cuda and kernels is not None:
            patches = kernels.columns(x_nhwi, size, stride)
        else:
            a, b, c, d = x_nhwi.stride()
            patches = x_nhwi.as_strided((n, high, wide, kh, kw, ins), (a, sh * b, sw * c, b, c, d))
        columns = patches.reshape(clients, -1, kh * kw * ins)
        if bias_co is None:
            out = torch.bmm(columns, kernel_cpo)
        else:
            out = torch.baddbmm(bias_co.unsqueeze(1), columns, kernel_cpo)
        ctx.save_for_backward(columns, kernel_cpo)
        ctx.shape, ctx.size, ctx.stride, ctx.bias = x_nhwi.shape, size, stride, bias_co is not None
        return out.view(n, high, wide, outs)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        columns, kernel = ctx.saved_tensors
        (kh, kw), (sh, sw) = ctx.size, ctx.stride
        n, high, wide, outs = grad.shape
        flat = grad.reshape(kernel.shape[0], -1, outs)
        grad_kernel = torch.bmm(columns.transpose(1, 2), flat)
        grad_bias = flat.sum(1) if ctx.bias else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            spread = torch.bmm(flat, kernel.transpose(1, 2)).view(n, high, wide, kh, kw, -1)
            if spread.is_cuda and kernels is not None:
                return kernels.gather_patches(spread, ctx.shape, ctx.stride), grad_kernel, grad_bias, None, None
            grad_x = torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device)
            for i in range(kh):
                for j in range(kw):
                    rows, cols = slice(i, i + sh * high, sh), slice(j, j + sw * wide, sw)
                    grad_x[:, rows, cols] += spread[:, :, :, i, j]
        return grad_x, grad_kernel, grad_bias, None, None


class _ReluPool(torch.autograd.Function):
    """ReLU and 2×2 maximum in one pass, channels last."""

    @staticmethod
    def forward(ctx, x_nhwi):  # type: ignore[no-untyped-def]
        out, which = kernels.relu_pool(x_nhwi)
        ctx.save_for_backward(which)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return kernels.relu_pool_backward(grad.contiguous(), ctx.saved_tensors[0])


def _relu_pool(x_nhwi: Tensor) -> Tensor:
    if x_nhwi.is_cuda and kernels is not None and x_nhwi.shape[1] % 2 == 0 and x_nhwi.shape[2] % 2 == 0:
        found: Tensor = _ReluPool.apply(x_nhwi)  # type: ignore[no-untyped-call]
        return found
    return F.max_pool2d(F.relu(x_nhwi.permute(0, 3, 1, 2)), 2).permute(0, 2, 3, 1)


def _conv(module: nn.Conv2d, name: str, after: Callable[[Tensor], Tensor] | None = None) -> Layer:
    if (
        module.groups != 1
        or module.dilation != (1, 1)
        or module.padding_mode != "zeros"
        or isinstance(module.padding, str)
    ):
        raise CannotStack(f"{name}: a convolution with groups, dilation or this padding")
    down, across = module.padding
    size, stride = tuple(module.kernel_size), tuple(module.stride)

    def layer(params: Params, x: Tensor) -> Tensor:
        weight = params[f"{name}weight"]
        clients, outs = weight.shape[:2]
        kernel = weight.permute(0, 3, 4, 2, 1).reshape(clients, -1, outs)
        image = x.permute(0, 2, 3, 1)
        image = F.pad(image, (0, 0, across, across, down, down)) if down or across else image.contiguous()
        found: Tensor = _Columns.apply(image, kernel, params.get(f"{name}bias"), size, stride)  # type: ignore[no-untyped-call]
        return (found if after is None else after(found)).permute(0, 3, 1, 2)

    return layer


class _Rows(torch.autograd.Function):
    """One product per client; the gradient of the weights comes out in their own order, ready for the step."""

    @staticmethod
    def forward(ctx, x_cri, weight_coi, bias_co):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_cri, weight_coi)
        ctx.bias = bias_co is not None
        turned = weight_coi.transpose(1, 2)
        return torch.baddbmm(bias_co.unsqueeze(1), x_cri, turned) if ctx.bias else torch.bmm(x_cri, turned)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad_x = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
        return grad_x, torch.bmm(grad.transpose(1, 2), x), grad.sum(1) if ctx.bias else None


def _linear(name: str) -> Layer:
    def layer(params: Params, x: Tensor) -> Tensor:
        weight = params[f"{name}weight"]
        clients, outs, ins = weight.shape
        rows = x.reshape(clients, -1, ins)
        out: Tensor = _Rows.apply(rows, weight, params.get(f"{name}bias"))  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], outs)

    return layer


def _per_sample(values: Tensor, x: Tensor, *shape: int) -> Tensor:
    """What every client has one of, repeated for each of its samples in ``x`` and shaped to broadcast with them."""
    return values.repeat_interleave(len(x) // len(values), dim=0).view(len(x), *shape)


def _layer_norm(module: nn.LayerNorm, name: str) -> Layer:
    def layer(params: Params, x: Tensor) -> Tensor:
        out = F.layer_norm(x, module.normalized_shape, eps=module.eps)
        if not module.elementwise_affine:
            return out
        shape = (*(1,) * (x.ndim - 1 - len(module.normalized_shape)), *module.normalized_shape)
        out = out * _per_sample(params[f"{name}weight"], x, *shape)
        bias = params.get(f"{name}bias")
        return out if bias is None else out + _per_sample(bias, x, *shape)

    return layer


def _group_norm(module: nn.GroupNorm, name: str) -> Layer:
    def layer(params: Params, x: Tensor) -> Tensor:
        out = F.group_norm(x, module.num_groups, eps=module.eps)
        if module.affine:
            shape = (x.shape[1], *(1,) * (x.ndim - 2))
            out = out * _per_sample(params[f"{name}weight"], x, *shape)
            out = out + _per_sample(params[f"{name}bias"], x, *shape)
        return out

    return layer


def _embedding(module: nn.Embedding, name: str) -> Layer:
    if module.max_norm is not None or module.padding_idx is not None or module.sparse:
        raise CannotStack(f"{name}: an embedding with max_norm, padding or sparse gradients")

    def layer(params: Params, x: Tensor) -> Tensor:
        table = params[f"{name}weight"]
        clients, words, width = table.shape
        shift = _per_sample(torch.arange(clients, device=x.device) * words, x, *(1,) * (x.ndim - 1))
        return F.embedding(x + shift, table.reshape(clients * words, width))

    return layer


def _leaves(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """The layers of a chain, with the names of their parameters."""
    if isinstance(module, nn.Sequential):
        for child, inner in module.named_children():
            yield from _leaves(inner, f"{name}{child}.")
    else:
        yield module, name


def _layer(module: nn.Module, name: str) -> Layer:
    if type(module) is nn.Linear:
        return _linear(name)
    if type(module) is nn.Conv2d:
        return _conv(module, name)
    if type(module) is nn.LayerNorm:
        return _layer_norm(module, name)
    if type(module) is nn.GroupNorm:
        return _group_norm(module, name)
    if type(module) is nn.Embedding:
        return _embedding(module, name)
    if type(module) in WEIGHTLESS or (type(module) is nn.Dropout and module.p == 0.0):
        return lambda params, x: module(x)
    raise CannotStack(f"{type(module).__name__}")


def _is_halving(module: nn.Module) -> bool:
    """Whether this is a plain 2×2 maximum."""
    if type(module) is not nn.MaxPool2d or module.return_indices or module.ceil_mode:
        return False
    return all(given in (want, (want, want)) for given, want in (
        (module.kernel_size, 2), (module.stride, 2), (module.padding, 0), (module.dilation, 1),
    ))  # fmt: skip


def _chain(module: nn.Module) -> list[Layer]:
    """The layers of a chain, a convolution together with the ReLU and the pooling that follow it."""
    leaves = list(_leaves(module, ""))
    chain: list[Layer] = []
    while leaves:
        (first, name), rest = leaves[0], [inner for inner, _ in leaves[1:3]]
        if type(first) is nn.Conv2d and len(rest) == 2 and type(rest[0]) is nn.ReLU and _is_halving(rest[1]):
            chain.append(_conv(first, name, after=_relu_pool))
            leaves = leaves[3:]
        else:
            chain.append(_layer(first, name))
            leaves = leaves[1:]
    return chain


def descend(weights: Tensor, gradients: Tensor, rates: Tensor) -> None:
    """A step of SGD in place, with a rate for each client."""
    if weights.is_cuda and kernels is not None:
        kernels.descend(weights, gradients, rates)
    else:
        weights.addcmul_(gradients, rates.view(-1, *(1,) * (weights.ndim - 1)), value=-1.0)


def stack(module: nn.Module) -> Layer:
    """The module for many clients at once: layer by layer if it is a chain of known layers, else by ``torch.func``."""
    if any(isinstance(inner, nn.modules.batchnorm._NormBase) for inner in module.modules()):
        raise CannotStack("batch normalisation moves its statistics as it trains")
    if any(isinstance(inner, nn.modules.dropout._DropoutNd) and inner.p > 0 for inner in module.modules()):
        raise CannotStack("dropout draws for itself")
    if any(True for _ in module.buffers()):
        raise CannotStack("it has buffers")
    try:
        chain = _chain(module)
    except CannotStack:
        return _mapped(module)

    def run(params: Params, x: Tensor) -> Tensor:
        for layer in chain:
            x = layer(params, x)
        return x

    return run


def _mapped(module: nn.Module) -> Layer:
    def run(params: Params, x: Tensor) -> Tensor:
        clients = len(next(iter(params.values())))
        many = vmap(lambda own, samples: functional_call(module, own, (samples,)), randomness="error")
        out: Tensor = many(dict(params), x.view(clients, -1, *x.shape[1:]))
        return out.flatten(0, 1)

    return run
