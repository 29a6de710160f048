"""Models of registered layers: chains, and modules with a ``forward`` of their own.

A chain is a sequence of layers, stacked one by one. In a composed model, the module's own ``forward`` runs over the
samples of all clients, with its layers replaced. That is correct as long as ``forward`` treats every sample by itself
between its layers. The equivalence check (``equivalence_check.py``) tests whether it does.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ...tasks.samples import Inputs, each, tensors_of
from ..kernels.plain import LayerKernels
from . import attention, dropout, recurrent, residual  # noqa: F401  these modules register layers
from .direct import is_direct
from .fused_blocks import stack_blocks
from .layer_registry import LayerSite, StackedLayer, StackedModel, StackedPass, StackingError
from .layers import embedding
from .sequences import NamedLayer, deferrable_weights, is_sequence, run_sequence, stack_first, stack_sequence

UNARY = {"exp", "log", "sigmoid", "tanh", "relu", "softplus", "neg", "abs", "sqrt", "rsqrt", "square", "clamp", "to"}
BINARY = {"add", "sub", "rsub", "mul", "div", "rdiv", "pow", "rpow", "maximum", "minimum"}
ELEMENTWISE = UNARY | BINARY


def chain(module: nn.Module, kernels: LayerKernels) -> StackedModel:
    """Stack a sequence of registered layers."""
    stacked = stack_sequence(module, "", kernels, stack_blocks)
    model = StackedModel.of(partial(run_sequence, stacked), stacked)
    if not is_direct(stacked):
        return model
    return replace(
        model, direct=tuple(stacked), deferrable=deferrable_weights(module) if kernels.defers_updates else ()
    )


class _Reshaping(TorchFunctionMode):
    """Replaces ``view`` by ``reshape``: the images that a stacked convolution returns are stored channels last."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.view and not isinstance(args[-1], torch.dtype):
            func = Tensor.reshape
        return func(*args, **(kwargs or {}))


class _SampleParameter(Tensor):
    """A parameter that ``forward`` uses directly, repeated for every sample, (C·B, …).

    Where ``forward`` combines it elementwise with activations, it behaves as if it had no dimension for samples.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        tensors = [value for value in args if isinstance(value, Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            if name in BINARY and len(tensors) == 2:
                rank = max(value.ndim for value in tensors)
                args = tuple(_with_rank(value, rank) if isinstance(value, cls) else value for value in args)
            result = func(*args, **(kwargs or {}))
            still_parameter = name in ELEMENTWISE and all(isinstance(value, cls) for value in tensors)
            return result.as_subclass(cls) if still_parameter else result


def _with_rank(parameter: Tensor, rank: int) -> Tensor:
    """Insert dimensions of size one behind the samples."""
    return parameter.reshape(len(parameter), *(1,) * (rank - parameter.ndim), *parameter.shape[1:])


def _for_samples(values: Tensor, rows: int) -> Tensor:
    """Repeat each client's values, (C, …), for each of its samples; a dimension of one sample is removed."""
    if values.ndim > 1 and values.shape[1] == 1:
        values = values.squeeze(1)
    return values.repeat_interleave(rows // len(values), dim=0).as_subclass(_SampleParameter)


class _LayerSlot(nn.Module):
    """Replaces a layer of the module."""

    def __init__(self, stacked: StackedLayer, like: nn.Module, now: _Composition) -> None:
        super().__init__()
        self.__dict__.update(stacked=stacked, like=like, now=now)  # not as a child, whose parameters would be unused

    def __getattr__(self, name: str) -> Any:
        return getattr(self.like, name)  # sizes and the like; a use of its parameters fails the equivalence check

    def forward(self, *args: Any, **options: Any) -> Any:
        if self.stacked.self_updating:  # a second backward pass through it would use updated weights
            if id(self) in self.now.used:
                raise StackingError(f"{type(self.like).__name__} is used twice in one pass")
            self.now.used.add(id(self))
        given = (*args, *options.values())
        # Equal inputs stay one tensor.
        plain = {id(x): x.as_subclass(Tensor) for x in given if isinstance(x, _SampleParameter)}
        args = tuple(plain.get(id(x), x) for x in args)
        return self.stacked.run(self.now.context, *args, **{name: plain.get(id(x), x) for name, x in options.items()})


def shared_tables(module: nn.Module, sample: Inputs) -> frozenset[str]:
    """Return the names of embeddings whose inputs do not have one row per sample: usually positions."""
    tables = {name: inner for name, inner in module.named_modules() if type(inner) is nn.Embedding}
    rows: dict[str, list[int]] = {name: [] for name in tables}
    hooks = [
        inner.register_forward_pre_hook(lambda _, args, name=name: rows[name].append(len(args[0])))
        for name, inner in tables.items()
    ]
    sizes = [2, 3]
    try:
        with torch.no_grad():
            for size in sizes if tables else []:
                module.eval()(each(partial(_repeat_first, size), sample))
    finally:
        for hook in hooks:
            hook.remove()
    return frozenset(f"{name}." for name, found in rows.items() if found != sizes)


def _repeat_first(size: int, sample: Tensor) -> Tensor:
    return sample[:1].repeat_interleave(size, dim=0)


@dataclass(slots=True)
class _Composition:
    """Replaces the layers of a module, each once, wherever it occurs; holds the forward pass in progress."""

    kernels: LayerKernels
    shared: frozenset[str]
    done: dict[int, nn.Module] = field(default_factory=dict)
    layers: list[StackedLayer] = field(default_factory=list)
    context: StackedPass | None = None
    rows: int = 0  # of the pass
    used: set[int] = field(default_factory=set)  # in the pass

    def replace(self, module: nn.Module, name: str) -> None:
        children = [(child, inner) for child, inner in module._modules.items() if inner is not None]
        named = [(inner, f"{name}{child}.") for child, inner in children]
        absorbed = 0
        for i, (child, inner) in enumerate(children):
            if absorbed:  # the layer before computes this one, too
                absorbed -= 1
                setattr(module, child, nn.Identity())
            elif id(inner) in self.done:
                setattr(module, child, self.done[id(inner)])
            else:
                try:
                    stacked = self._stack(named[i:] if is_sequence(module) else named[i : i + 1])
                except StackingError:
                    self.replace(inner, f"{name}{child}.")
                    continue
                absorbed = stacked.absorbs
                self.layers.append(stacked)
                self.done[id(inner)] = _LayerSlot(stacked, inner, self)
                setattr(module, child, self.done[id(inner)])

    def _stack(self, group: list[NamedLayer]) -> StackedLayer:
        inner, name = group[0]
        if name in self.shared and isinstance(inner, nn.Embedding):  # its indices are the same for all samples
            embedding(inner, LayerSite(name, self.kernels))  # raises StackingError for options that cannot be stacked
            if inner.padding_idx is not None:
                raise StackingError(f"{name}: an embedding of positions with padding")
            return StackedLayer(lambda context, x: _for_samples(context.weights[f"{name}weight"][:, x], self.rows))
        return stack_first(group, self.kernels)


def composed(module: nn.Module, kernels: LayerKernels, shared: frozenset[str], reshape: bool) -> StackedModel:
    """Stack the layers of a module that keeps its own ``forward``; ``reshape`` replaces ``view`` by ``reshape``.

    The result holds the pass in progress: two threads must not run it at the same time.
    """
    now, module = _Composition(kernels, shared), copy.deepcopy(module)
    for inner in module.modules():
        if isinstance(inner, nn.TransformerEncoderLayer):
            inner.activation_relu_or_gelu = 0  # otherwise it bypasses its layers in evaluation mode
    now.replace(module, "")
    direct = [name for name, _ in module.named_parameters()]

    def run(context: StackedPass, x: Inputs) -> Tensor:
        if module.training != context.training:
            module.train(context.training)
        rows = len(tensors_of(x)[0])
        now.context, now.rows, now.used = context, rows, set()
        try:
            params = {name: _for_samples(context.weights[name], rows) for name in direct}
            with _Reshaping() if reshape else nullcontext():
                out: Tensor = functional_call(module, params, (x,)) if params else module(x)
        finally:
            now.context = None
        return out

    return StackedModel.of(run, now.layers)
