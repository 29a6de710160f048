"""Build the model of a task so that it maps the task's inputs to one tensor: its logits.

Hooks on the module pass named inputs as keyword arguments and pick the logits out of its output. They leave the names
of its parameters as they are, and ``torch.func`` and copies of the module keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import UserError, first_line
from .models import seeded
from .samples import Inputs, each
from .task import Logits, Task


def build_model(task: Task, k: int) -> nn.Module:
    """Return the task's model with initial weights from key ``k``, on the device of its data."""
    sample = each(lambda part: part[:1].cpu(), task.train.inputs)  # the key seeds the generator of the CPU
    try:
        module = seeded(partial(_initialised, task.model, sample), k).to(task.train.device)
    except UserError:
        raise
    except Exception as error:  # a model may raise anything
        raise UserError(f"the model cannot be built: {describe(error)}") from error
    if isinstance(sample, dict):
        module.register_forward_pre_hook(_as_keywords, with_kwargs=True)
    if task.logits is not None:
        module.register_forward_hook(PickLogits(task.logits))
    return module


def logits_of(module: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits; where the output is not a tensor, the module returns its logits from now on."""
    output = module(inputs)
    if isinstance(output, Tensor):
        return output
    hook = PickLogits(None)
    module.register_forward_hook(hook)
    return hook(module, inputs, output)


def describe(error: Exception) -> str:
    """Return the first line of an error of the user's code; the type is part of it where the text alone says little."""
    plain = isinstance(error, RuntimeError | TypeError | ValueError | IndexError)
    return first_line(error) if plain else f"{type(error).__name__}: {first_line(error)}"


def _initialised(model_fn: Callable[[], nn.Module], sample: Inputs) -> nn.Module:
    """Build a module; a forward pass with one example, in evaluation mode, initialises its lazy layers."""
    module = model_fn()
    if isinstance(module, nn.Module) and any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        with torch.no_grad():
            module.eval()(**sample) if isinstance(sample, dict) else module.eval()(sample)
        module.train()
    return module


def _as_keywords(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), {**args[0], **kwargs}) if args and isinstance(args[0], dict) else (args, kwargs)


@dataclass(frozen=True)
class PickLogits:
    """A forward hook that replaces a module's output by its logits; a tensor is not changed by a name or position."""

    logits: Logits | None

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Tensor:
        """Return the logits, or raise ``UserError`` if they are not where the task says."""
        found = self._find(output)
        if not isinstance(found, Tensor):
            raise UserError(f"logits={self.logits!r} picks {type(found).__name__} out of the model's output, no tensor")
        return found

    def _find(self, output: Any) -> Any:
        if callable(self.logits):
            return self.logits(output)
        if isinstance(output, Tensor):
            return output
        wanted = "logits" if self.logits is None else self.logits
        try:
            if isinstance(wanted, str) and not (isinstance(output, Mapping) and wanted in output):
                return getattr(output, wanted)
            return output[wanted]
        except (AttributeError, LookupError, TypeError):
            where = "no 'logits'" if self.logits is None else f"no {wanted!r}"
            raise UserError(
                f"the model returns {_shown(output)}, which has {where}; say with make_task(logits=…) where the "
                "logits are: a name, a position, or a function of the output"
            ) from None


def _shown(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"{type(output).__name__} with {', '.join(map(repr, output)) or 'nothing'}"
    if isinstance(output, tuple | list):
        return f"{type(output).__name__} of {', '.join(type(part).__name__ for part in output) or 'nothing'}"
    return type(output).__name__
