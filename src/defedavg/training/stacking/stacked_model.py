"""From a module to its stacked form: a chain of layers, its own ``forward`` over stacked layers, or ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import local

from torch import Tensor, nn
from torch.func import functional_call, vmap

from ...errors import first_line
from ..kernels.plain import CpuLayerKernels, LayerKernels
from ..module_state import keyed_copy, moving_buffers
from .attention import PlainAttention
from .chain import chain
from .composed import composed, shared_tables
from .equivalence_check import EquivalenceCheck
from .layers import CannotStack, Stacked, Step


def stack(module: nn.Module, products: LayerKernels | None = None, sample: Tensor | None = None) -> Stacked:
    """The module for many clients at once; the first of three forms that agrees with it on a few samples of its data.

    Without samples nothing is tried, and only a chain or ``torch.func`` is used.
    """
    _refuse(module)
    products = products or CpuLayerKernels()
    try:
        model, _ = keyed_copy(module)
    except RuntimeError as error:
        raise CannotStack(f"it cannot be copied: {first_line(error)}") from error
    if sample is None:
        if any(True for _ in module.buffers()):
            raise CannotStack("it has buffers, and there are no samples to see whether they change")
        try:
            return _chained(model, products)
        except CannotStack:
            return _mapped(model, products)
    trial, reason = EquivalenceCheck(model, sample), ""
    if moving := moving_buffers(model, sample):
        raise CannotStack(f"the buffer {min(moving)} changes while it trains")
    # What decides by its data may decide for all clients as one: only torch.func sees when it does.
    for form in (_mapped,) if trial.decides else (_chained, _composed, _reshaped, _mapped):
        try:
            trial.check(form)
            return form(model, products, sample)
        except CannotStack as error:
            reason = str(error)
    raise CannotStack(reason)


def _refuse(module: nn.Module) -> None:
    for inner in module.modules():
        if isinstance(inner, nn.modules.batchnorm._BatchNorm) and inner.running_mean is not None:
            kind = type(inner).__name__
            raise CannotStack(f"{kind} keeps running statistics; use GroupNorm or {kind}(…, track_running_stats=False)")
        if isinstance(inner, nn.AlphaDropout | nn.FeatureAlphaDropout | nn.Dropout3d) and inner.p > 0:
            raise CannotStack(f"{type(inner).__name__} draws for itself; use Dropout, Dropout1d or Dropout2d")


def _unshared(module: nn.Module) -> nn.Module:
    if len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters())):
        raise CannotStack("layers share parameters")
    return module


def _chained(module: nn.Module, products: LayerKernels, sample: Tensor | None = None) -> Stacked:
    return chain(_unshared(module), products)


def _composed(module: nn.Module, products: LayerKernels, sample: Tensor, reshape: bool = False) -> Stacked:
    tables = shared_tables(_unshared(module), sample)
    return _for_threads(lambda: composed(module, products, tables, reshape))


def _reshaped(module: nn.Module, products: LayerKernels, sample: Tensor) -> Stacked:
    return _composed(module, products, sample, reshape=True)


def _mapped(module: nn.Module, products: LayerKernels, sample: Tensor | None = None) -> Stacked:
    return _for_threads(lambda: mapped(module))


def _for_threads(build: Callable[[], Stacked]) -> Stacked:
    """What keeps something while it runs, built anew for every thread that uses it."""
    first, own = build(), local()
    own.run = first.run

    def run(step: Step, x: Tensor) -> Tensor:
        if not hasattr(own, "run"):
            own.run = build().run
        found: Tensor = own.run(step, x)
        return found

    return replace(first, run=run)


def mapped(module: nn.Module) -> Stacked:
    """The module through ``torch.func``: anything that does not draw."""
    model, draws = keyed_copy(module)

    def one(own: dict[str, Tensor], samples: Tensor, key: Tensor | None = None) -> Tensor:
        draws.key = key
        out: Tensor = functional_call(model, own, (samples,))
        return out

    def run(step: Step, x: Tensor) -> Tensor:
        learns = step.rates is not None
        if model.training != learns:
            model.train(learns)
        given = (dict(step.weights), x.view(step.clients, -1, *x.shape[1:]))
        try:
            with PlainAttention():
                out: Tensor = vmap(one, randomness="error")(*given, *(() if step.keys is None else (step.keys,)))
        finally:
            draws.key = None
        return out.flatten(0, 1)

    return Stacked(run)
