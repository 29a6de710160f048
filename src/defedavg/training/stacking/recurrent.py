"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``: with keyed dropout between their layers, and stacked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.plain import LayerKernels
from ..kernels.recurrence import STATES, States, has_fast_lstm, lstm_one_by_one, projected, recurrence
from .dropout import Draws, factors
from .layer_registry import LayerSite, StackedLayer, StackedPass, StackingError, stacked_layer

HiddenState = Tensor | tuple[Tensor, ...] | None
"""The states that modules receive and return: (layers · directions, samples, H), for an LSTM two; None for zeros."""


def _first_states(module: nn.RNNBase, x: Tensor, hx: HiddenState) -> States:
    """Return the states before the first time step of these samples, (samples, T, I)."""
    if hx is not None:
        return (hx,) if isinstance(hx, Tensor) else tuple(hx)
    shape = (module.num_layers * (1 + module.bidirectional), len(x), module.hidden_size)
    return (x.new_zeros(shape),) * STATES[module.mode]


def _of_layer(module: nn.RNNBase, layer: int, states: States) -> States:
    directions = 1 + module.bidirectional
    return tuple(state[layer * directions : (layer + 1) * directions] for state in states)


def _joined(found: Iterable[States]) -> HiddenState:
    """Return the last states of all layers as the modules return them."""
    joined = tuple(torch.cat(states) for states in zip(*found, strict=True))
    return joined if len(joined) > 1 else joined[0]


class KeyedRecurrent(nn.RNNBase):
    """A recurrent module whose dropout draws keyed masks; ``number`` is that of the mask after its first layer."""

    number: int
    draws: Draws

    def forward(self, x: Any, hx: HiddenState = None) -> Any:
        """Compute the module; inputs without a dimension for samples use PyTorch's own dropout."""
        if not self.training or not isinstance(x, Tensor) or x.ndim != 3:
            return super().forward(x, hx)  # of nn.LSTM, nn.GRU or nn.RNN
        x = x if self.batch_first else x.transpose(0, 1)
        states, found = _first_states(self, x, hx), list[States]()
        one_layer = getattr(torch._VF, self.mode.lower())
        for layer in range(self.num_layers):
            first = _of_layer(self, layer, states)
            x, *last = one_layer(
                self.drop(x, layer, self.draws.key),
                first if len(first) > 1 else first[0],
                [getattr(self, name) for name in _parameter_names(self, layer)],
                *(self.bias, 1, 0.0, True, self.bidirectional, True),
            )
            found.append(tuple(last))
        return x if self.batch_first else x.transpose(0, 1), _joined(found)

    def drop(self, x: Tensor, layer: int, keys: Tensor | None) -> Tensor:
        """Drop inputs (…, T, I) of a layer for the clients with these keys; the first layer gets all inputs."""
        if layer == 0:
            return x
        return x * factors(keys, self.number + layer - 1, self.dropout, tuple(x.shape), x.dtype)


class KeyedLSTM(KeyedRecurrent, nn.LSTM):
    """An LSTM whose dropout draws keyed masks."""


class KeyedGRU(KeyedRecurrent, nn.GRU):
    """A GRU whose dropout draws keyed masks."""


class KeyedRNN(KeyedRecurrent, nn.RNN):
    """An ``nn.RNN`` whose dropout draws keyed masks."""


KEYED: dict[type[nn.Module], type[KeyedRecurrent]] = {nn.LSTM: KeyedLSTM, nn.GRU: KeyedGRU, nn.RNN: KeyedRNN}
"""Class -> its form with keyed dropout."""


def _parameter_names(module: nn.RNNBase, layer: int) -> list[str]:
    """Return the names of a layer's parameters in PyTorch's order: those of one direction, then of the other."""
    directions = 1 + module.bidirectional
    groups: list[list[str]] = module._all_weights[layer * directions : (layer + 1) * directions]
    return [name for group in groups for name in group]


@stacked_layer(nn.LSTM, nn.GRU, nn.RNN, *KEYED.values())
def recurrent(module: nn.RNNBase, site: LayerSite) -> StackedLayer:
    """Stack the layers of a recurrent module."""
    if module.proj_size:
        raise StackingError(f"{site.name}: an LSTM with proj_size")
    names = [[f"{site.name}{name}" for name in _parameter_names(module, layer)] for layer in range(module.num_layers)]

    def run(context: StackedPass, x: Any, hx: HiddenState = None) -> tuple[Tensor, HiddenState]:
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise StackingError(f"{type(module).__name__} with packed sequences, or without a dimension for samples")
        weights = [[context.weights[name] for name in of_layer] for of_layer in names]
        if module.batch_first:
            return _run_layers(module, site.kernels, context, x, hx, weights)
        out, last = _run_layers(module, site.kernels, context, x.transpose(0, 1), hx, weights)
        return out.transpose(0, 1), last

    # PyTorch's sigmoid rounds the last few values of a tensor in another way than the others.
    return StackedLayer(run, batch_invariant=module.mode == "LSTM" and has_fast_lstm(next(module.parameters())))


def _run_layers(
    module: nn.RNNBase, kernels: LayerKernels, context: StackedPass, x: Tensor, hx: HiddenState,
    weights: Sequence[Sequence[Tensor]],
) -> tuple[Tensor, HiddenState]:  # fmt: skip
    """Return what the module returns for samples (C·B, T, I)."""
    first, found = _first_states(module, x, hx), list[States]()
    # From here on, samples have two dimensions, (C, B).
    states = tuple(state.reshape(len(state), context.clients, -1, module.hidden_size) for state in first)
    x = x.reshape(context.clients, -1, *x.shape[1:])
    for layer, of_layer in enumerate(weights):
        if context.training and isinstance(module, KeyedRecurrent):
            x = module.drop(x, layer, context.keys)
        x, last = _run_layer(module, kernels, x, of_layer, _of_layer(module, layer, states))
        found.append(tuple(state.flatten(1, 2) for state in last))
    return x.flatten(0, 1), _joined(found)


def _run_layer(
    module: nn.RNNBase, kernels: LayerKernels, x: Tensor, weights: Sequence[Tensor], states: States
) -> tuple[Tensor, States]:
    """Return the outputs of one layer, (C, B, T, directions · H), and its last states, (directions, C, B, H)."""
    if module.mode == "LSTM" and has_fast_lstm(x):
        return lstm_one_by_one(x, weights, states, module.bias, module.bidirectional)
    each, outs, lasts = 4 if module.bias else 2, [], []
    for direction in range(1 + module.bidirectional):
        of_input, of_hidden, *biases = weights[direction * each : (direction + 1) * each]
        input_bias, hidden_bias = biases or (None, None)
        inputs = projected(kernels, x.flatten(1, 2), of_input, input_bias).view(*x.shape[:3], -1)
        by_time = inputs.permute(2, 0, 1, 3).contiguous()
        first = tuple(state[direction] for state in states)
        out, last = recurrence(kernels, module.mode, by_time, of_hidden, hidden_bias, first, reverse=direction == 1)
        outs.append(out)
        lasts.append(last)
    return torch.cat(outs, dim=-1).permute(1, 2, 0, 3), tuple(map(torch.stack, zip(*lasts, strict=True)))
