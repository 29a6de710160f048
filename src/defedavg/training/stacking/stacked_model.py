"""Stack a module: as a chain of layers, with its own ``forward`` over stacked layers, or through ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from threading import local
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cudnn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from ...errors import first_line
from ...tasks.samples import Inputs, each
from ..kernels.cpu_kernels import CpuLayerKernels
from ..kernels.plain import LayerKernels
from ..module_state import keyed_copy, updated_buffers
from .attention import PlainAttention
from .composed import chain, composed, shared_tables
from .equivalence_check import DisagreementError, EquivalenceCheck, Form, GradientError
from .layer_registry import StackedModel, StackedPass, StackingError, plugin_layers
from .layers import without_padding


def stack(module: nn.Module, kernels: LayerKernels | None = None, sample: Inputs | None = None) -> StackedModel:
    """Return the first stacked form of a module that agrees with it on a few samples of its data.

    Without samples there is no check, and the result is a chain or uses ``torch.func``.
    """
    _refuse_unsupported(module)
    kernels = kernels or CpuLayerKernels()
    try:
        model, _ = keyed_copy(module)
    except RuntimeError as error:
        raise StackingError(f"it cannot be copied: {first_line(error)}") from error
    if sample is None:
        return _unchecked(model, kernels)
    statistics = _statistics(model, sample)
    check, reason, disagreement = EquivalenceCheck(model, sample, statistics), "", ""
    # A module that branches on its data may branch once for all clients; only torch.func detects that.
    for form in (_mapped,) if check.branches_on_data else (_chained, _composed, _reshaped, _mapped):
        if form is _mapped and disagreement and (plugins := plugin_layers(model)):
            # torch.func does not use registered layers, and would hide that one of them is wrong.
            raise StackingError(f"with the registered form of {', '.join(plugins)}: {disagreement}")
        try:
            return _checked(check, form, model, kernels, sample, statistics)
        except DisagreementError as error:
            reason = disagreement = str(error)
        except StackingError as error:
            reason = str(error)
    raise StackingError(reason)


def _checked(
    check: EquivalenceCheck, form: Form, model: nn.Module, kernels: LayerKernels, sample: Inputs,
    statistics: frozenset[str],
) -> StackedModel:  # fmt: skip
    yields_gradients = True
    try:
        check.check(form)
    except GradientError:
        if not plugin_layers(model):
            raise
        yields_gradients = False  # a registered layer from outside updates its parameters itself, wherever asked to
    return replace(form(model, kernels, sample), statistics=statistics, yields_gradients=yields_gradients)


def _unchecked(model: nn.Module, kernels: LayerKernels) -> StackedModel:
    if any(True for _ in model.buffers()):
        raise StackingError("it has buffers, and without samples it is unknown whether training changes them")
    try:
        return _chained(model, kernels)
    except StackingError:
        return _mapped(model, kernels)


def _statistics(model: nn.Module, sample: Inputs) -> frozenset[str]:
    """Return the running statistics of a module; refuse one that keeps other state from step to step."""
    try:
        updated = updated_buffers(model, sample)
    except Exception as error:  # a module may raise anything
        raise StackingError(f"it fails on a few samples: {first_line(error)}") from error
    if updated.assigned:
        raise StackingError(f"it assigns a new tensor to the buffer {min(updated.assigned)}; update it in place")
    normalisations = [n for n, inner in model.named_modules() if isinstance(inner, nn.modules.batchnorm._NormBase)]
    unused = {f"{name}.num_batches_tracked".lstrip(".") for name in normalisations}  # with a fixed momentum
    if counters := updated.counters - unused:
        raise StackingError(f"the buffer {min(counters)} changes while it trains, and is not of floating point")
    return updated.statistics


def _refuse_unsupported(module: nn.Module) -> None:
    for inner in module.modules():
        kind = type(inner).__name__
        tracks = isinstance(inner, nn.modules.batchnorm._NormBase) and inner.running_mean is not None
        if tracks and inner.momentum is None:
            raise StackingError(f"{kind} with momentum=None counts its batches; give it a momentum")
        if isinstance(inner, nn.AlphaDropout | nn.FeatureAlphaDropout | nn.Dropout3d) and inner.p > 0:
            raise StackingError(f"{kind} draws from the global generator; use Dropout, Dropout1d or Dropout2d")


def _unshared(module: nn.Module) -> nn.Module:
    if len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters())):
        raise StackingError("layers share parameters")
    return module


def _chained(module: nn.Module, kernels: LayerKernels, _: Inputs | None = None) -> StackedModel:
    return chain(_unshared(module), kernels)


def _composed(module: nn.Module, kernels: LayerKernels, sample: Inputs, reshape: bool = False) -> StackedModel:
    tables = shared_tables(_unshared(module), sample)
    return _per_thread(lambda: composed(module, kernels, tables, reshape))


_reshaped = partial(_composed, reshape=True)


def _mapped(module: nn.Module, _kernels: LayerKernels, _sample: Inputs | None = None) -> StackedModel:
    return _per_thread(lambda: mapped(module))


def _per_thread(build: Callable[[], StackedModel]) -> StackedModel:
    """Return a model that is built again for every thread that runs it, because it keeps state while it runs."""
    first, thread = build(), local()
    thread.run = first.run

    def run(context: StackedPass, x: Inputs) -> Tensor:
        if not hasattr(thread, "run"):
            thread.run = build().run
        out: Tensor = thread.run(context, x)
        return out

    return replace(first, run=run)


class _Padding(TorchFunctionMode):
    """Replaces an embedding with padding: mapped over clients, PyTorch keeps only the first client's padding fixed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        given = signature(F.embedding).bind(*args, **(kwargs or {})).arguments
        padding = given.pop("padding_idx", None)
        if padding is not None and padding < 0:
            padding += len(given["weight"])
        return without_padding(F.embedding(**given), given["input"], padding)


def mapped(module: nn.Module) -> StackedModel:
    """Stack a module through ``torch.func``, which maps any module that draws no random numbers over the clients."""
    model, draws = keyed_copy(module)
    normalises = any(isinstance(inner, nn.modules.batchnorm._BatchNorm) for inner in model.modules())

    def one(params: dict[str, Tensor], samples: Inputs, key: Tensor | None = None) -> Tensor:
        draws.key = key
        out: Tensor = functional_call(model, params, (samples,))
        return out

    def run(context: StackedPass, x: Inputs) -> Tensor:
        if model.training != context.training:
            model.train(context.training)
        given = (dict(context.weights), each(lambda part: part.view(context.clients, -1, *part.shape[1:]), x))
        keys = () if context.keys is None else (context.keys,)
        try:
            # Mapped over clients, the inputs of batch normalisation have an order in memory that cuDNN refuses.
            with PlainAttention(), _Padding(), cudnn.flags(enabled=False) if normalises else nullcontext():
                out: Tensor = vmap(one, randomness="error")(*given, *keys)
        finally:
            draws.key = None
        return out.flatten(0, 1)

    return StackedModel(run, batch_invariant=not normalises)
