"""Any module over stacked layers: its own ``forward`` runs over the samples of all clients, with its layers replaced.

That is right as long as what ``forward`` does between its layers treats every sample by itself: whether it does is
seen by a trial (``trial.py``), not from the code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ..kernels.plain import LayerKernels
from .chain import fused, is_sequence
from .layers import CannotStack, Stacked, StackedLayer, Step, embedding

ALONE = {"exp", "log", "sigmoid", "tanh", "relu", "softplus", "neg", "abs", "sqrt", "rsqrt", "square", "clamp", "to"}
BETWEEN = {"add", "sub", "rsub", "mul", "div", "rdiv", "pow", "rpow", "maximum", "minimum"}
ELEMENTWISE = ALONE | BETWEEN


class _Reshaping(TorchFunctionMode):
    """``view`` as ``reshape``: images behind a stacked convolution lie channels last."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.view and not isinstance(args[-1], torch.dtype):
            func = Tensor.reshape
        return func(*args, **(kwargs or {}))


class _Own(Tensor):
    """A parameter that ``forward`` uses by itself, one for every sample, (C·B, …).

    The module sees it without the dimension for samples where it is combined with activations element by element.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        tensors = [value for value in args if isinstance(value, Tensor)]
        if name in BETWEEN and len(tensors) == 2:
            rank = max(value.ndim for value in tensors)
            args = tuple(_lined_up(value, rank) if isinstance(value, cls) else value for value in args)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            owned = name in ELEMENTWISE and all(isinstance(value, cls) for value in tensors)
            return found.as_subclass(cls) if owned else found


def _lined_up(own: Tensor, rank: int) -> Tensor:
    """With as many dimensions as what it meets."""
    with torch._C.DisableTorchFunctionSubclass():
        return own.reshape(len(own), *(1,) * (rank - own.ndim), *own.shape[1:])


def _for_samples(values: Tensor, rows: int) -> Tensor:
    """What every client has one of, (C, …), for each of its samples; a dimension that stood for samples goes."""
    if values.ndim > 1 and values.shape[1] == 1:
        values = values.squeeze(1)
    return values.repeat_interleave(rows // len(values), dim=0).as_subclass(_Own)


@dataclass(slots=True)
class _Pass:
    """The pass that is being made."""

    step: Step | None = None
    rows: int = 0
    used: set[int] = field(default_factory=set)


class _Layer(nn.Module):
    """Stands where a layer stood."""

    def __init__(self, part: StackedLayer, like: nn.Module, now: _Pass) -> None:
        super().__init__()
        self.__dict__.update(part=part, like=like, now=now)  # not as a child: its parameters are not used

    def __getattr__(self, name: str) -> Any:
        return getattr(self.like, name)  # sizes and the like; a use of its parameters fails the trial

    def forward(self, *args: Any, **options: Any) -> Any:
        """The stacked layer."""
        if self.part.moved:  # it moves on the way back, so that there must be one way only
            if id(self) in self.now.used:
                raise CannotStack(f"{type(self.like).__name__} is used twice in one pass")
            self.now.used.add(id(self))
        given = (*args, *options.values())
        plain = {id(x): x.as_subclass(Tensor) for x in given if isinstance(x, _Own)}  # what is the same stays the same
        args = tuple(plain.get(id(x), x) for x in args)
        return self.part.run(self.now.step, *args, **{name: plain.get(id(x), x) for name, x in options.items()})


def _shared_table(module: nn.Embedding, name: str, now: _Pass) -> StackedLayer:
    """An embedding of places that all samples share."""
    embedding(module, name)  # refuses what cannot be stacked
    return StackedLayer(lambda step, x: _for_samples(step.weights[f"{name}weight"][:, x], now.rows))


def shared_tables(module: nn.Module, sample: Tensor) -> frozenset[str]:
    """The names of embeddings whose inputs do not come with one row per sample: positions, as a rule."""
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
                module.eval()(sample[:1].repeat_interleave(size, dim=0))
    finally:
        for hook in hooks:
            hook.remove()
    return frozenset(f"{name}." for name, found in rows.items() if found != sizes)


@dataclass(slots=True)
class _Builder:
    """Replaces the layers of a module, each once wherever it stands."""

    products: LayerKernels
    shared: frozenset[str]
    now: _Pass = field(default_factory=_Pass)
    done: dict[int, nn.Module] = field(default_factory=dict)
    parts: list[StackedLayer] = field(default_factory=list)

    def replace(self, module: nn.Module, name: str) -> None:
        children = [(child, inner) for child, inner in module._modules.items() if inner is not None]
        named = [(inner, f"{name}{child}.") for child, inner in children]
        taken = 1
        for place, (child, inner) in enumerate(children):
            if taken > 1:  # in the layer before it
                taken -= 1
                setattr(module, child, nn.Identity())
            elif id(inner) in self.done:
                setattr(module, child, self.done[id(inner)])
            else:
                try:
                    group = named[place:] if is_sequence(module) else named[place : place + 1]
                    part, taken = self._part(group)
                except CannotStack:
                    self.replace(inner, f"{name}{child}.")
                    continue
                self.parts.append(part)
                self.done[id(inner)] = _Layer(part, inner, self.now)
                setattr(module, child, self.done[id(inner)])

    def _part(self, group: list[tuple[nn.Module, str]]) -> tuple[StackedLayer, int]:
        inner, name = group[0]
        if name in self.shared and isinstance(inner, nn.Embedding):
            return _shared_table(inner, name, self.now), 1
        return fused(group, self.products)


def composed(module: nn.Module, products: LayerKernels, shared: frozenset[str], reshape: bool) -> Stacked:
    """The module with its own ``forward`` over stacked layers, where asked for with ``reshape`` in place of ``view``.

    It keeps the pass that is being made: no two threads may run it at the same time.
    """
    builder = _Builder(products, shared)
    module, now = copy.deepcopy(module), builder.now
    for inner in module.modules():
        if isinstance(inner, nn.TransformerEncoderLayer):
            inner.activation_relu_or_gelu = 0  # else it goes past its layers where it does not learn
    builder.replace(module, "")
    direct = [name for name, _ in module.named_parameters()]

    def run(step: Step, x: Tensor) -> Tensor:
        learns = step.rates is not None
        if module.training != learns:
            module.train(learns)
        now.step, now.rows, now.used = step, len(x), set()
        try:
            own = {name: _for_samples(step.weights[name], len(x)) for name in direct}
            with _Reshaping() if reshape else nullcontext():
                out: Tensor = functional_call(module, own, (x,)) if own else module(x)
        finally:
            now.step = None
        return out

    return Stacked(
        run,
        frozenset(name for part in builder.parts for name in part.moved),
        frozenset(name for part in builder.parts for name in part.turned),
    )
