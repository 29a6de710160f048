"""A stacked form is tried before it is used: three clients, one step, against the module itself for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...errors import first_line
from ...rng import generator, key
from ..kernels.plain import LayerKernels
from ..module_state import keyed_copy
from .layers import CHANNELS_FIRST, CHANNELS_LAST, CannotStack, Stacked, Step

CLIENTS, SAMPLES = 3, 2
TAKES = {
    "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__", "item", "tolist", "numpy", "equal",
    "allclose", "is_nonzero", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive",
}  # fmt: skip
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}

Form = Callable[[nn.Module, LayerKernels, Tensor], Stacked]
"""How a module becomes stacked; it may look at a few samples."""


class _Watch(TorchFunctionMode):
    """Follows the data through a pass, and sees where Python takes a value of theirs: to decide by it, as a rule."""

    def __init__(self, starts: Iterable[Tensor]) -> None:
        super().__init__()
        self.decides = False
        self._known = {id(tensor): tensor for tensor in starts}  # kept alive, so that no other gets its number

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if any(id(value) in self._known for value in given):
            self.decides = self.decides or getattr(func, "__name__", "") in TAKES
            changed = [*given[:1], *tree_leaves(found)]  # the first may have been written to
            self._known.update((id(value), value) for value in changed if isinstance(value, Tensor))
        return found


@dataclass(frozen=True, slots=True)
class _Found:
    """What a step gives: outputs, those of a pass that only looks, and how far every parameter moved."""

    outputs: Tensor
    looks: Tensor
    moves: dict[str, Tensor]


class EquivalenceCheck:
    """Three clients with weights and samples of their own, in double precision if the module can compute with that.

    ``decides`` says whether the module takes values from its data into Python, which a trial cannot judge.
    """

    def __init__(self, module: nn.Module, sample: Tensor) -> None:
        first = next(module.parameters()).dtype
        for dtype in dict.fromkeys((torch.float64, first)):
            try:
                self._prepare(module, sample, dtype)
                with torch.random.fork_rng(devices=[]):
                    self._expected = self._alone()
            except CannotStack:
                raise
            except Exception as error:  # whatever a module may raise
                if dtype == first:
                    raise CannotStack(f"it fails on {SAMPLES} samples: {first_line(error)}") from error
            else:
                self._tolerance = TOLERANCES.get(dtype, 1e-1)
                return

    def _prepare(self, module: nn.Module, sample: Tensor, dtype: torch.dtype) -> None:
        random, self.decides = generator(key(0, "trial")), False
        self._module, self._draws = keyed_copy(module)
        self._module.cpu().to(dtype)
        self._sample = sample.cpu().to(dtype) if sample.is_floating_point() else sample.cpu()
        self._weights = {name: _noisy(p.detach(), random) for name, p in self._module.named_parameters()}
        self._trainable = [name for name, p in self._module.named_parameters() if p.requires_grad]
        places = (torch.arange(CLIENTS)[:, None] + torch.arange(SAMPLES)) % len(sample)
        self._inputs = self._sample[places]
        if sample.is_floating_point():  # no two alike, and none beyond the range of the data
            shrink = torch.from_numpy(random.uniform(0.5, 1.0, tuple(self._inputs.shape))).to(dtype)
            self._inputs = torch.where(self._inputs == 0, shrink, self._inputs * shrink)
        self._keys = torch.from_numpy(random.integers(0, 2**62, CLIENTS))
        self._rates = torch.tensor([0.1, 0.2, 0.3], dtype=dtype)
        self._random = random

    def _alone(self) -> _Found:
        """The module for one client after the other."""
        outputs, moves = [], []
        state = torch.get_rng_state()
        self._module.eval()
        with torch.no_grad():
            looks = [self._call(self._of(c), c) for c in range(CLIENTS)]
        if not all(isinstance(out, Tensor) and len(out) == SAMPLES for out in looks):
            raise CannotStack("its output is no tensor with one row per sample")
        slopes = self._random.normal(size=(CLIENTS, *looks[0].shape))
        self._slopes = torch.from_numpy(slopes).to(looks[0].dtype)
        self._module.train()
        for c in range(CLIENTS):
            own = self._of(c)
            leaves = [own[name].requires_grad_() for name in self._trainable]
            self._draws.key = self._keys[c]
            out = self._call(own, c)
            loss = (out * self._slopes[c]).sum()
            slope = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            outputs.append(out.detach())
            moves.append({name: self._rates[c] * g for name, g in zip(self._trainable, slope, strict=True)})
        self._draws.key = None
        if not torch.equal(state, torch.get_rng_state()):
            raise CannotStack("it draws random numbers of its own; nn.Dropout, nn.Dropout1d and nn.Dropout2d are keyed")
        together = {name: torch.stack([move[name] for move in moves]) for name in self._trainable}
        if not all(bool(value.isfinite().all()) for value in (*outputs, *looks, *together.values())):
            raise CannotStack("it gives no finite numbers with weights close to its own")
        return _Found(torch.cat(outputs), torch.cat(looks), together)

    def _call(self, own: dict[str, Tensor], client: int) -> Any:
        inputs = self._inputs[client].clone()  # a module may write to them
        with _Watch([inputs, *own.values()]) as watch:
            out = functional_call(self._module, own, (inputs,))
        self.decides = self.decides or watch.decides
        return out

    def _of(self, client: int) -> dict[str, Tensor]:
        return {name: weight[client].clone() for name, weight in self._weights.items()}

    def check(self, form: Form) -> None:
        """Raise ``CannotStack`` if the module, stacked like this, gives something else."""
        try:
            with torch.random.fork_rng(devices=[]):
                found = self._together(form(self._module, LayerKernels(), self._sample))
        except Exception as error:
            raise CannotStack(first_line(error)) from error
        wanted = self._expected
        pairs = [(found.outputs, wanted.outputs), (found.looks, wanted.looks)]
        furthest = max(map(_largest, wanted.moves.values()))
        moves = [(found.moves[name], move) for name, move in wanted.moves.items()]
        if not all(self._near(a, b, 0.0) for a, b in pairs) or not all(self._near(a, b, furthest) for a, b in moves):
            raise CannotStack("together, clients give other results than alone: does the model mix samples?")
        if any(bool(found.moves[name].any()) for name in self._weights.keys() - wanted.moves.keys()):
            raise CannotStack("a frozen parameter moves")

    def _near(self, found: Tensor, wanted: Tensor, scale: float) -> bool:
        if found.shape != wanted.shape:
            return False
        limit = self._tolerance * (_largest(wanted) + 0.01 * scale)
        return bool(((found - wanted).abs() <= limit).all())

    def _together(self, stacked: Stacked) -> _Found:
        before = {
            name: (own.permute(CHANNELS_LAST) if name in stacked.turned else own).contiguous()
            for name, own in self._weights.items()
        }
        inputs = self._inputs.flatten(0, 1)
        with torch.no_grad():
            looks = stacked.run(Step(before), inputs.clone())
        after = {name: own.clone() for name, own in before.items()}
        slopes = self._slopes.flatten(0, 1)
        outputs = stacked.learn(
            after, self._trainable, self._rates, self._keys, inputs.clone(), lambda out: (out * slopes).sum()
        )
        moves = {name: before[name] - own for name, own in after.items()}
        moves.update((name, moves[name].permute(CHANNELS_FIRST)) for name in stacked.turned)
        return _Found(outputs.detach(), looks, moves)


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _noisy(weight: Tensor, random: np.random.Generator) -> Tensor:
    """This parameter for every client, each with noise of its own."""
    noise = torch.from_numpy(random.normal(size=(CLIENTS, *weight.shape))).to(weight.dtype)
    scale = float(weight.square().mean().sqrt()) if weight.numel() else 0.0
    return weight + noise * max(0.3 * scale, 0.03)
