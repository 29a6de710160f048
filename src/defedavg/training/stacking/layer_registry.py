"""The registry of stacked layers: a module class -> the function that makes its stacked form.

The project's own layers are registered in ``layers.py``, ``dropout.py`` and ``attention.py``. A plugin file registers
its own layer in the same way (docs/extending.md has an example).

The contract of ``run(context, x)``:

* Shapes: ``x`` is (C·B, …), B samples for each of C clients, the samples of one client adjacent; so is the result.
  ``context.weights`` maps ``site.name`` + the parameter's name in the module to the parameters of all clients, (C, …).
  It contains the buffers that training changes, too; ``run`` updates them in place if ``context.training`` is True.
* SGD update: by default, autograd computes the gradients of ``context.weights`` and the trainer applies the update. A
  layer that names parameters in ``StackedLayer.self_updating`` updates these itself in its backward pass, in place, by
  ``context.rates`` (C,), and must leave a client with rate zero unchanged even if its gradient is not finite. Pass
  ``context.anchor`` to such a layer's autograd function: it makes the backward pass visit the layer. It subtracts
  the update from ``context.targets[name]`` instead, where there is one: optimisers other than plain SGD need gradients.
* Randomness: a random layer draws from ``context.keys`` (C,), and draws nothing if ``context.training`` is False.
* Exactness: each client must get the result that the module computes for its parameters and samples alone, up to
  rounding, whatever the other clients compute. ``run`` may neither mix clients nor keep state between passes.

Before a stacked model is used, ``equivalence_check.py`` compares outputs and updates with those of the module itself,
and refuses a model that differs. A layer with options that the stacked form does not support raises ``StackingError``.
Only the class itself is looked up, because a subclass may compute something else; register subclasses, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...registry import note_registration
from ..kernels.deferred import DeferredUpdates
from ..kernels.plain import Gradient, LayerKernels, scaled

CHANNELS_LAST = (0, 1, 3, 4, 2)
CHANNELS_FIRST = (0, 1, 4, 2, 3)
"""Permutations of stacked convolution weights: from (C, O, I, kh, kw) to (C, O, kh, kw, I), and the inverse."""


class StackingError(Exception):
    """The module can only be trained one client at a time; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class StackedPass:
    """The context of one forward pass: with ``rates`` it is part of an SGD step, without them an evaluation."""

    weights: Mapping[str, Tensor]  # name -> the parameter or running statistic of every client, (C, …)
    rates: Tensor | None = None  # learning rates, (C,)
    keys: Tensor | None = None  # (C,): random layers draw from them
    anchor: Tensor | None = None  # a leaf that needs a gradient, so that the backward pass visits every layer
    targets: Mapping[str, Tensor] = field(default_factory=dict)  # name -> updated instead of the parameter, (C, …)
    all_train: bool = False  # whether it is known that no rate is zero
    deferred: Mapping[str, DeferredUpdates] = field(default_factory=dict)  # name of a weight -> its pending updates

    @property
    def clients(self) -> int:
        """The number of clients, C."""
        return next(iter(self.weights.values())).shape[0]

    @property
    def training(self) -> bool:
        """Whether the pass is part of an SGD step."""
        return self.rates is not None


Passes = tuple[Callable[[Tensor], tuple[Tensor, Any]], Callable[[Tensor, Any, bool], Gradient]]
"""The forward pass of a layer, x -> its outputs and what the backward pass needs, and the backward pass.

The latter maps the gradient of the outputs, what was saved, and whether it is needed, to the gradient of x.
"""


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """A layer for many clients.

    ``run(context, x)`` computes the layer; ``self_updating`` names the parameters whose SGD update is fused into its
    backward pass; ``channels_last`` those that it expects as (C, O, kh, kw, I). ``absorbs`` counts the layers that
    follow in the sequence and that ``run`` computes, too. If ``batch_invariant`` is False, the rounding of one client's
    results depends on the number of clients, even on the CPU. ``passes(context)`` returns the same layer as two
    functions for the weights and rates of this context, for steps without autograd (``direct.py``); it needs no anchor.
    """

    run: Callable[..., Any]  # attention has three inputs and two outputs
    self_updating: tuple[str, ...] = ()
    channels_last: tuple[str, ...] = ()
    absorbs: int = 0
    batch_invariant: bool = True
    passes: Callable[[StackedPass], Passes] | None = None


@dataclass(frozen=True, slots=True)
class StackedModel:
    """A model for many clients; the sets of names are those of all its layers.

    ``statistics`` are the buffers that a training step updates. If ``batch_invariant`` is False, the rounding of one
    client's results depends on the other clients, even on the CPU. If ``yields_gradients`` is False, a registered
    layer ignores ``targets``: only plain SGD can train the model. ``direct`` are the layers of a chain whose steps need
    no autograd, and otherwise empty; ``deferrable`` names those of its weights that may have deferred updates.
    """

    run: Callable[[StackedPass, Any], Tensor]  # the inputs of the task
    self_updating: frozenset[str] = frozenset()
    channels_last: frozenset[str] = frozenset()
    statistics: frozenset[str] = frozenset()
    batch_invariant: bool = True
    yields_gradients: bool = True
    direct: tuple[StackedLayer, ...] = ()
    deferrable: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Callable[[StackedPass, Any], Tensor], layers: Iterable[StackedLayer]) -> StackedModel:
        """Return the model that computes ``run`` with these layers."""
        self_updating, channels_last, batch_invariant = set[str](), set[str](), True
        for layer in layers:
            self_updating.update(layer.self_updating)
            channels_last.update(layer.channels_last)
            batch_invariant = batch_invariant and layer.batch_invariant
        return cls(run, frozenset(self_updating), frozenset(channels_last), batch_invariant=batch_invariant)

    def sgd_step(
        self, weights: Mapping[str, Tensor], trainable: Iterable[str], rates: Tensor, keys: Tensor, inputs: Any,
        loss: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        """Do one SGD step for every client in place, and return the outputs: (C, …) weights, (C,) rates and keys."""
        outputs, gradients = self._backward(weights, trainable, StackedPass(weights, rates, keys), inputs, loss)
        with torch.no_grad():
            for name, gradient in gradients.items():
                if gradient is not None:
                    weights[name].sub_(scaled(gradient, rates.view(-1, *(1,) * (gradient.ndim - 1))))
        return outputs

    def gradients(
        self, weights: Mapping[str, Tensor], into: Mapping[str, Tensor], active: Tensor, keys: Tensor, inputs: Any,
        loss: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        """Store the gradients of the parameters that ``into`` names, and update the running statistics.

        Clients that are not ``active`` (C,) keep their statistics; their gradients are arbitrary.
        """
        for target in into.values():
            target.zero_()
        rates = -active.to(next(iter(weights.values())).dtype)
        targets = {name: target for name, target in into.items() if name in self.self_updating}
        context = StackedPass(weights, rates, keys, targets=targets)
        _, gradients = self._backward(weights, into, context, inputs, loss)
        with torch.no_grad():
            for name, gradient in gradients.items():
                if gradient is not None:
                    into[name].copy_(gradient)

    def _backward(
        self, weights: Mapping[str, Tensor], trainable: Iterable[str], context: StackedPass, inputs: Any,
        loss: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, dict[str, Tensor | None]]:  # fmt: skip
        """Run both passes; return the outputs and the gradients of the parameters that no layer updates itself."""
        rates = context.rates
        assert rates is not None
        anchor = rates.new_zeros((), requires_grad=True)
        leaves = {name: weights[name].detach().requires_grad_() for name in trainable if name not in self.self_updating}
        all_train = rates.device.type == "cpu" and bool(rates.all())  # a device would have to wait
        with_leaves = {**weights, **leaves} if leaves else weights
        context = replace(context, weights=with_leaves, anchor=anchor, all_train=all_train)
        statistics = {name: weights[name].clone() for name in self.statistics}
        outputs = self.run(context, inputs)
        gradients = torch.autograd.grad(loss(outputs), [*leaves.values(), anchor], allow_unused=True)
        with torch.no_grad():
            for name, before in statistics.items():  # a client with rate zero keeps them
                idle = (rates == 0).view(-1, *(1,) * (before.ndim - 1))
                weights[name].copy_(torch.where(idle, before, weights[name]))
        return outputs, dict(zip(leaves, gradients, strict=False))


@dataclass(frozen=True, slots=True)
class LayerSite:
    """Where a layer is in its model: the prefix of its parameters' names, the kernels, and the layers that follow.

    ``following`` has the next layers of an ``nn.Sequential``, as far as they have no hooks; elsewhere it is empty.
    """

    name: str
    kernels: LayerKernels
    following: Sequence[nn.Module] = ()


LayerBuilder = Callable[[Any, LayerSite], StackedLayer]
Builder = TypeVar("Builder", bound=LayerBuilder)

_BUILDERS: dict[type[nn.Module], LayerBuilder] = {}


def stacked_layer(*kinds: type[nn.Module]) -> Callable[[Builder], Builder]:
    """Register the decorated function as the one that stacks layers of these classes."""

    def register(builder: Builder) -> Builder:
        for kind in kinds:
            if _BUILDERS.setdefault(kind, builder) is not builder:
                raise UserError(f"a stacked form of {kind.__name__} already exists; register a subclass instead")
            note_registration(partial(_BUILDERS.__delitem__, kind))
        return builder

    return register


def samplewise(module: nn.Module, site: LayerSite) -> StackedLayer:
    """Stack a layer without parameters that treats every sample by itself: the module is its own stacked form."""
    if next(module.parameters(), None) is not None:
        raise StackingError(f"{site.name}: {type(module).__name__} with parameters")
    if getattr(module, "running_mean", None) is not None:
        raise StackingError(f"{site.name}: {type(module).__name__} with running statistics")
    return StackedLayer(lambda _, x: module(x), passes=lambda _: (partial(_tracked, module), _tracked_backward))


def _tracked(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute a layer without parameters with autograd, which a step without autograd uses for this layer alone."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(x.is_floating_point())
        out = module(leaf.clone() if getattr(module, "inplace", False) else leaf)
    return out.detach(), (leaf, out)


def _tracked_backward(grad: Tensor, saved: tuple[Tensor, Tensor], _: bool) -> Gradient:
    leaf, out = saved
    return torch.autograd.grad(out, leaf, grad)[0]


def build_layer(module: nn.Module, site: LayerSite) -> StackedLayer:
    """Return the stacked form of a layer, or raise ``StackingError``."""
    if type(module) not in _BUILDERS:
        raise StackingError(type(module).__name__)
    return _BUILDERS[type(module)](module, site)


def plugin_layers(module: nn.Module) -> list[str]:
    """Return the names of the module's layer classes whose stacked form is not one of this package."""
    package = __name__.partition(".")[0]
    kinds = {type(inner) for inner in module.modules()}
    outside = {kind for kind in kinds & _BUILDERS.keys() if _BUILDERS[kind].__module__.partition(".")[0] != package}
    return sorted(kind.__name__ for kind in outside)
