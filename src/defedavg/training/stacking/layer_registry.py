"""The registry of stacked layers: a module class -> the function that makes its stacked form.

The project's own layers are registered in ``layers.py``, ``dropout.py`` and ``attention.py``. A plugin file registers
its own layer in the same way:

    @stacked_layer(Scale)
    def scale(module: Scale, site: LayerSite) -> StackedLayer:
        def run(context: StackedPass, x: Tensor) -> Tensor:
            factors = context.weights[f"{site.name}factors"]  # (C, features)
            return (x.reshape(len(factors), -1, x.shape[-1]) * factors.unsqueeze(1)).reshape(x.shape)

        return StackedLayer(run)

The contract of ``run(context, x)``:

* Shapes: ``x`` is (C·B, …), B samples for each of C clients, the samples of one client adjacent; so is the result.
  ``context.weights`` maps ``site.name`` + the parameter's name in the module to the parameters of all clients, (C, …).
* SGD update: by default, autograd computes the gradients of ``context.weights`` and the trainer applies the update. A
  layer that names parameters in ``StackedLayer.self_updating`` updates these itself in its backward pass, in place, by
  ``context.rates`` (C,), and must leave a client with rate zero unchanged even if its gradient is not finite. Pass
  ``context.anchor`` to such a layer's autograd function: it makes the backward pass visit the layer.
* Randomness: a random layer draws from ``context.keys`` (C,), and draws nothing if ``context.training`` is False.
* Exactness: each client must get the result that the module computes for its parameters and samples alone, up to
  rounding, whatever the other clients compute. ``run`` may neither mix clients nor keep state between passes.

Before a stacked model is used, ``equivalence_check.py`` compares outputs and updates with those of the module itself,
and refuses a model that differs. A layer with options that the stacked form does not support raises ``StackingError``.
Only the class itself is looked up, because a subclass may compute something else; register subclasses, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ...errors import UserError
from ..kernels.plain import LayerKernels
from .stacked_types import StackedLayer, StackingError


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
        return builder

    return register


def samplewise(module: nn.Module, site: LayerSite) -> StackedLayer:
    """Stack a layer without parameters that treats every sample by itself: the module is its own stacked form."""
    if next(module.parameters(), None) is not None:
        raise StackingError(f"{site.name}: {type(module).__name__} with parameters")
    return StackedLayer(lambda _, x: module(x))


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
