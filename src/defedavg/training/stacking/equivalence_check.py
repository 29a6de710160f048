"""The equivalence check: compares one step of three stacked clients with the module itself, client by client.

It compares the fused update of plain SGD, and the gradients that other optimisers use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...errors import first_line
from ...rng import generator, key
from ...tasks.samples import Inputs, each, tensors_of
from ..kernels.plain import LayerKernels
from ..module_state import keyed_copy
from .direct import DirectStep
from .layer_registry import CHANNELS_FIRST, CHANNELS_LAST, StackedModel, StackedPass, StackingError

CLIENTS, SAMPLES = 3, 2
READS_VALUES = {
    "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__", "item", "tolist", "numpy", "equal",
    "allclose", "is_nonzero", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive",
}  # fmt: skip
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}

Form = Callable[[nn.Module, LayerKernels, Inputs], StackedModel]
"""Stacks a module; it may use a few samples."""

StepResult = tuple[Tensor, Tensor, dict[str, Tensor]]
"""The outputs of a step, those of an evaluation before it, and the changes of parameters and running statistics."""


class DisagreementError(StackingError):
    """A stacked form computes something else than the module."""


class GradientError(DisagreementError):
    """A stacked form computes plain SGD correctly, but a registered layer yields no gradients."""


class _DataFlow(TorchFunctionMode):
    """Follows the data through a pass, and notes where Python reads a value of them, usually to branch on it."""

    def __init__(self, starts: Iterable[Tensor]) -> None:
        super().__init__()
        self.values_read = False
        self._derived = {id(tensor): tensor for tensor in starts}  # kept alive, so that no id is reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if any(id(value) in self._derived for value in given):
            self.values_read = self.values_read or getattr(func, "__name__", "") in READS_VALUES
            changed = [*given[:1], *tree_leaves(result)]  # an in-place operation writes to its first argument
            self._derived.update((id(value), value) for value in changed if isinstance(value, Tensor))
        return result


class EquivalenceCheck:
    """Three clients with different weights and samples, in double precision if the module supports it.

    If ``branches_on_data`` is True, Python code of the module reads values of its data, and a check on a few samples
    proves nothing.
    """

    def __init__(self, module: nn.Module, sample: Inputs, statistics: Collection[str] = ()) -> None:
        self._statistics = statistics
        first = next(module.parameters()).dtype
        for dtype in dict.fromkeys((torch.float64, first)):
            try:
                self._prepare(module, sample, dtype)
                with torch.random.fork_rng(devices=[]):
                    self._expected = self._one_by_one()
            except StackingError:
                raise
            except Exception as error:  # a module may raise anything
                if dtype == first:
                    raise StackingError(f"it fails on {SAMPLES} samples: {first_line(error)}") from error
            else:
                self._tolerance = TOLERANCES.get(dtype, 1e-1)
                return

    def _prepare(self, module: nn.Module, sample: Inputs, dtype: torch.dtype) -> None:
        random, self.branches_on_data = generator(key(0, "trial")), False
        self._module, self._draws = keyed_copy(module)
        self._module.cpu().to(dtype)
        self._sample = each(lambda part: part.cpu().to(dtype if part.is_floating_point() else part.dtype), sample)
        self._weights = {name: _noisy(p.detach(), random) for name, p in self._module.named_parameters()}
        self._trainable = [name for name, p in self._module.named_parameters() if p.requires_grad]
        kept = {name: b for name, b in self._module.named_buffers() if name in self._statistics}
        # With noise above zero, because a variance is.
        self._weights.update((name, buffer + (_noisy(buffer, random) - buffer).abs()) for name, buffer in kept.items())
        self._inputs = each(partial(_varied, random), self._sample)
        self._keys = torch.from_numpy(random.integers(0, 2**62, CLIENTS))
        self._rates = torch.tensor([0.1, 0.2, 0.3], dtype=dtype)
        self._random = random

    def _one_by_one(self) -> StepResult:
        state = torch.get_rng_state()
        self._module.eval()
        with torch.no_grad():
            evaluated = [self._call(self._weights_of(c), c) for c in range(CLIENTS)]
        if not all(isinstance(out, Tensor) and len(out) == SAMPLES for out in evaluated):
            raise StackingError("its output is not a tensor with one row per sample")
        slopes = torch.from_numpy(self._random.normal(size=(CLIENTS, *evaluated[0].shape)))
        self._slopes = slopes.to(evaluated[0].dtype)
        self._module.train()
        outputs, changes = zip(*map(self._step, range(CLIENTS)), strict=True)
        self._draws.key = None
        if not torch.equal(state, torch.get_rng_state()):
            raise StackingError("it draws from the global generator; use nn.Dropout, nn.Dropout1d or nn.Dropout2d")
        stacked = {name: torch.stack([change[name] for change in changes]) for name in changes[0]}
        if not all(bool(value.isfinite().all()) for value in (*outputs, *evaluated, *stacked.values())):
            raise StackingError("its results are not finite with weights close to its own")
        return torch.cat(outputs), torch.cat(evaluated), stacked

    def _step(self, c: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the outputs of one client and the changes of its parameters and statistics."""
        weights = self._weights_of(c)
        leaves = [weights[name].requires_grad_() for name in self._trainable]
        self._draws.key = self._keys[c]
        out = self._call(weights, c)
        loss = (out * self._slopes[c]).sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        change = {name: self._rates[c] * g for name, g in zip(self._trainable, gradients, strict=True)}
        change.update((name, self._weights[name][c] - weights[name]) for name in self._statistics)
        return out.detach(), change

    def _call(self, weights: dict[str, Tensor], client: int) -> Any:
        inputs = each(lambda part: part[client].clone(), self._inputs)  # a module may write to them
        with _DataFlow([*tensors_of(inputs), *weights.values()]) as flow:
            out = functional_call(self._module, weights, (inputs,))
        self.branches_on_data = self.branches_on_data or flow.values_read
        return out

    def _weights_of(self, client: int) -> dict[str, Tensor]:
        return {name: weight[client].clone() for name, weight in self._weights.items()}

    def check(self, form: Form) -> None:
        """Raise ``DisagreementError`` if the form fails or computes something else than the module.

        If the form does not support the module, raise ``StackingError``. If plain SGD agrees, but the gradients do not,
        raise ``GradientError``.
        """
        try:
            with torch.random.fork_rng(devices=[]):
                model = form(self._module, LayerKernels(), self._sample)
                *outputs, changes = self._stacked(model)
                gradients, unchanged = self._gradients(model)
        except StackingError:
            raise
        except Exception as error:  # a module may raise anything
            raise DisagreementError(first_line(error)) from error
        *expected, expected_changes = self._expected
        largest = max(map(_largest, expected_changes.values()))
        near = [self._near(a, b, 0.0) for a, b in zip(outputs, expected, strict=True)]
        near += [self._near(changes[name], change, largest) for name, change in expected_changes.items()]
        if not all(near):
            raise DisagreementError("stacked clients get other results than single ones: does the model mix samples?")
        if any(bool(changes[name].any()) for name in self._weights.keys() - expected_changes.keys()):
            raise DisagreementError("a frozen parameter changes")
        if not unchanged or not all(self._near(gradients[n], expected_changes[n], largest) for n in gradients):
            raise GradientError("the gradients of stacked clients differ from those of single ones")

    def _near(self, found: Tensor, expected: Tensor, scale: float) -> bool:
        if found.shape != expected.shape:
            return False
        limit = self._tolerance * (_largest(expected) + 0.01 * scale)
        return bool(((found - expected).abs() <= limit).all())

    def _reordered(self, model: StackedModel) -> dict[str, Tensor]:
        permuted = {name: self._weights[name].permute(CHANNELS_LAST).contiguous() for name in model.channels_last}
        return self._weights | permuted

    def _gradients(self, model: StackedModel) -> tuple[dict[str, Tensor], bool]:
        """Return rates times gradients, and whether the parameters keep their values."""
        before = self._reordered(model)
        weights = {name: values.clone() for name, values in before.items()}
        into = {name: torch.empty_like(weights[name]) for name in self._trainable}
        active, slopes = self._rates > 0, self._slopes.flatten(0, 1)
        inputs = each(lambda part: part.flatten(0, 1).clone(), self._inputs)
        model.gradients(weights, into, active, self._keys, inputs, lambda out: (out * slopes).sum())
        unchanged = all(torch.equal(weights[name], before[name]) for name in self._weights.keys() - self._statistics)
        into.update((name, into[name].permute(CHANNELS_FIRST)) for name in model.channels_last if name in into)
        return {name: g * self._rates.view(-1, *(1,) * (g.ndim - 1)) for name, g in into.items()}, unchanged

    def _stacked(self, model: StackedModel) -> StepResult:
        before = self._reordered(model)
        inputs = each(lambda part: part.flatten(0, 1), self._inputs)
        with torch.no_grad():
            evaluated = model.run(StackedPass(before), each(Tensor.clone, inputs))
        after = {name: weights.clone() for name, weights in before.items()}
        slopes = self._slopes.flatten(0, 1)
        given = self._trainable, self._rates, self._keys, each(Tensor.clone, inputs)
        outputs = model.sgd_step(after, *given, lambda out: (out * slopes).sum())
        if model.direct and isinstance(inputs, Tensor):  # the step of the CPU, and of plain SGD on a device
            after = {name: weights.clone() for name, weights in before.items()}
            outputs = DirectStep(model.direct, StackedPass(after, self._rates))(inputs, lambda _: slopes.clone())
        changes = {name: before[name] - weights for name, weights in after.items()}
        changes.update((name, changes[name].permute(CHANNELS_FIRST)) for name in model.channels_last)
        return outputs.detach(), evaluated, changes


def _varied(random: np.random.Generator, sample: Tensor) -> Tensor:
    """Return inputs for every client; if they are real, all differ, and none is outside the range of the data."""
    inputs = sample[(torch.arange(CLIENTS)[:, None] + torch.arange(SAMPLES)) % len(sample)]
    if not inputs.is_floating_point():
        return inputs
    shrink = torch.from_numpy(random.uniform(0.5, 1.0, tuple(inputs.shape))).to(inputs.dtype)
    return torch.where(inputs == 0, shrink, inputs * shrink)


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _noisy(weight: Tensor, random: np.random.Generator) -> Tensor:
    """Return this parameter for every client, each with different noise."""
    noise = torch.from_numpy(random.normal(size=(CLIENTS, *weight.shape))).to(weight.dtype)
    scale = float(weight.square().mean().sqrt()) if weight.numel() else 0.0
    return weight + noise * max(0.3 * scale, 0.03)
