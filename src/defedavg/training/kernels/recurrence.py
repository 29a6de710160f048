"""Recurrent layers of many clients: one batched product for the inputs of all time steps, then one for every step.

Tensors of a sequence have the shape (T, C, B, …), so that those of one time step are contiguous: T steps, C clients,
B samples of each. A gate has H values. The gates are in the order of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``.
The backward pass sums the gradients of the weights over all time steps in one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .plain import LayerKernels, Saved

aten = torch.ops.aten

States = tuple[Tensor, ...]  # of one time step, each (C, B, H): the hidden state, and the cell state of an LSTM
StateGradients = tuple[Tensor | None, ...]  # None for zero


class RecurrentCell:
    """The elementwise part of one time step."""

    gates: ClassVar[int] = 1
    states: ClassVar[int] = 1

    def forward(self, inputs: Tensor, hidden: Tensor, states: States) -> tuple[States, Saved]:
        """Return the new states and the tensors for the backward pass.

        ``inputs`` and ``hidden``, (C, B, gates · H), are the products with the inputs and with the hidden state.
        """
        raise NotImplementedError

    def backward(self, grads: States, saved: Saved) -> tuple[Tensor, Tensor, StateGradients]:
        """Return the gradients of ``inputs``, of ``hidden``, and of the states, without the part through ``hidden``."""
        raise NotImplementedError


class TanhCell(RecurrentCell):
    """The cell of ``nn.RNN`` with ``nonlinearity="tanh"``."""

    def forward(self, inputs: Tensor, hidden: Tensor, states: States) -> tuple[States, Saved]:  # noqa: ARG002
        """Do what ``RecurrentCell.forward`` does."""
        out = torch.tanh(inputs + hidden)
        return (out,), (out,)

    def backward(self, grads: States, saved: Saved) -> tuple[Tensor, Tensor, StateGradients]:
        """Do what ``RecurrentCell.backward`` does."""
        grad = aten.tanh_backward(grads[0], saved[0])
        return grad, grad, (None,)


class ReluCell(RecurrentCell):
    """The cell of ``nn.RNN`` with ``nonlinearity="relu"``."""

    def forward(self, inputs: Tensor, hidden: Tensor, states: States) -> tuple[States, Saved]:  # noqa: ARG002
        """Do what ``RecurrentCell.forward`` does."""
        out = torch.relu(inputs + hidden)
        return (out,), (out,)

    def backward(self, grads: States, saved: Saved) -> tuple[Tensor, Tensor, StateGradients]:
        """Do what ``RecurrentCell.backward`` does."""
        grad = aten.threshold_backward(grads[0], saved[0], 0)
        return grad, grad, (None,)


class GruCell(RecurrentCell):
    """The cell of ``nn.GRU``: gates r, z and n."""

    gates = 3

    def forward(self, inputs: Tensor, hidden: Tensor, states: States) -> tuple[States, Saved]:
        """Do what ``RecurrentCell.forward`` does."""
        size = states[0].shape[-1]
        r, z = torch.sigmoid(inputs[..., : 2 * size] + hidden[..., : 2 * size]).chunk(2, dim=-1)
        hidden_n = hidden[..., 2 * size :]
        n = torch.addcmul(inputs[..., 2 * size :], r, hidden_n).tanh_()
        return (torch.lerp(n, states[0], z),), (r, z, n, hidden_n, states[0])

    def backward(self, grads: States, saved: Saved) -> tuple[Tensor, Tensor, StateGradients]:
        """Do what ``RecurrentCell.backward`` does."""
        (grad,), (r, z, n, hidden_n, before) = grads, saved
        through_state = grad * z
        grad_n = aten.tanh_backward(grad - through_state, n)
        grad_r = aten.sigmoid_backward(grad_n * hidden_n, r)
        grad_z = aten.sigmoid_backward(grad * (before - n), z)
        return torch.cat((grad_r, grad_z, grad_n), -1), torch.cat((grad_r, grad_z, grad_n * r), -1), (through_state,)


class LstmCell(RecurrentCell):
    """The cell of ``nn.LSTM``: gates i, f, g and o."""

    gates, states = 4, 2

    def forward(self, inputs: Tensor, hidden: Tensor, states: States) -> tuple[States, Saved]:
        """Do what ``RecurrentCell.forward`` does."""
        i, f, g, o = (inputs + hidden).chunk(4, dim=-1)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        content = torch.addcmul(f * states[1], i, g)
        squashed = torch.tanh(content)
        return (o * squashed, content), (i, f, g, o, states[1], squashed)

    def backward(self, grads: States, saved: Saved) -> tuple[Tensor, Tensor, StateGradients]:
        """Do what ``RecurrentCell.backward`` does."""
        i, f, g, o, before, squashed = saved
        grad_content = grads[1] + aten.tanh_backward(grads[0] * o, squashed)
        gates = (
            aten.sigmoid_backward(grad_content * g, i),
            aten.sigmoid_backward(grad_content * before, f),
            aten.tanh_backward(grad_content * i, g),
            aten.sigmoid_backward(grads[0] * squashed, o),
        )
        grad = torch.cat(gates, -1)
        return grad, grad, (None, grad_content * f)


class CudaGruCell(GruCell):
    """One kernel for a time step, one for its backward pass."""

    def forward(self, inputs: Tensor, hidden: Tensor, states: States) -> tuple[States, Saved]:
        """Do what ``RecurrentCell.forward`` does."""
        out, workspace = aten._thnn_fused_gru_cell(*(values.flatten(0, 1) for values in (inputs, hidden, states[0])))
        return (out.view_as(states[0]),), (workspace,)

    def backward(self, grads: States, saved: Saved) -> tuple[Tensor, Tensor, StateGradients]:
        """Do what ``RecurrentCell.backward`` does."""
        grad = grads[0]
        found = aten._thnn_fused_gru_cell_backward(grad.flatten(0, 1), saved[0], False)[:3]
        by_input, by_hidden, by_state = (values.view(*grad.shape[:2], -1) for values in found)
        return by_input, by_hidden, (by_state,)


class CudaLstmCell(LstmCell):
    """One kernel for a time step, one for its backward pass."""

    def forward(self, inputs: Tensor, hidden: Tensor, states: States) -> tuple[States, Saved]:
        """Do what ``RecurrentCell.forward`` does."""
        before = states[1].flatten(0, 1)
        out, content, workspace = aten._thnn_fused_lstm_cell(inputs.flatten(0, 1), hidden.flatten(0, 1), before)
        return (out.view_as(states[0]), content.view_as(states[0])), (before, content, workspace)

    def backward(self, grads: States, saved: Saved) -> tuple[Tensor, Tensor, StateGradients]:
        """Do what ``RecurrentCell.backward`` does."""
        flat = (grad.flatten(0, 1) for grad in grads)
        gates, content, _ = aten._thnn_fused_lstm_cell_backward_impl(*flat, *saved, False)
        shape = grads[0].shape[:2]
        by_gates = gates.view(*shape, -1)
        return by_gates, by_gates, (None, content.view(*shape, -1))


CELLS: dict[str, tuple[RecurrentCell, RecurrentCell]] = {
    "RNN_TANH": (TanhCell(), TanhCell()),
    "RNN_RELU": (ReluCell(), ReluCell()),
    "GRU": (GruCell(), CudaGruCell()),
    "LSTM": (LstmCell(), CudaLstmCell()),
}
"""``nn.RNNBase.mode`` -> the cell in plain operations, and the one for CUDA devices."""

STATES = {mode: cell.states for mode, (cell, _) in CELLS.items()}
"""``nn.RNNBase.mode`` -> the number of states."""


class _Projection(torch.autograd.Function):
    """The product of inputs (C, R, I) with weights (C, O, I), and a bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, kernels):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.kernels = kernels
        return kernels.product(x, weight.transpose(1, 2), bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x, weight), needs, product = ctx.saved_tensors, ctx.needs_input_grad, ctx.kernels.product
        grad_x = product(grad, weight) if needs[0] else None
        grad_weight = product(grad.transpose(1, 2), x) if needs[1] else None
        return grad_x, grad_weight, grad.sum(1) if needs[2] else None, None


class _Recurrence(torch.autograd.Function):
    """The time steps of one direction of a layer."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, kernels, cell, reverse, *states):  # type: ignore[no-untyped-def]
        weight = kernels.operand(weight)
        transposed, first = weight.transpose(1, 2), states
        order = range(len(inputs))[:: -1 if reverse else 1]
        hidden, saved = [inputs] * len(inputs), []
        for t in order:
            states, kept = cell.forward(inputs[t], kernels.product(states[0], transposed, bias), states)
            hidden[t] = states[0]
            saved += kept
        out = torch.stack(hidden)
        ctx.save_for_backward(weight, first[0], out, *saved)
        ctx.kernels, ctx.cell, ctx.order = kernels, cell, order
        return out, *states

    @staticmethod
    def backward(ctx, grad_out, *grad_states):  # type: ignore[no-untyped-def]
        weight, first, out, *saved = ctx.saved_tensors
        kernels, cell, steps = ctx.kernels, ctx.cell, len(grad_out)
        each = len(saved) // steps
        by_input, by_hidden = [grad_out] * steps, [grad_out] * steps
        for number in reversed(range(steps)):
            t = ctx.order[number]
            kept = saved[number * each : (number + 1) * each]
            grads = (grad_out[t] + grad_states[0], *grad_states[1:])
            by_input[t], by_hidden[t], grad_states = cell.backward(grads, kept)
            by_state = kernels.product(by_hidden[t], weight)
            direct, *others = grad_states
            grad_states = (by_state if direct is None else by_state.add_(direct), *others)
        grad_inputs = torch.stack(by_input) if ctx.needs_input_grad[0] else None
        rows = torch.cat(by_hidden, dim=1)  # (C, T·B, gates · H)
        before = (*out[1:], first) if ctx.order[0] else (first, *out[:-1])
        grad_weight = (
            kernels.product(rows.transpose(1, 2), torch.cat(before, dim=1)) if ctx.needs_input_grad[1] else None
        )
        grad_bias = rows.sum(1) if ctx.needs_input_grad[2] else None
        return grad_inputs, grad_weight, grad_bias, None, None, None, *grad_states


def projected(kernels: LayerKernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the products of inputs (C, R, I) with the weights (C, O, I) of their clients, with a bias (C, O)."""
    out: Tensor = _Projection.apply(x, weight, bias, kernels)  # type: ignore[no-untyped-call]
    return out


def recurrence(
    kernels: LayerKernels, mode: str, inputs: Tensor, weight: Tensor, bias: Tensor | None, states: States, reverse: bool
) -> tuple[Tensor, States]:
    """Return the hidden states of all time steps, (T, C, B, H), and the last states.

    ``inputs``, (T, C, B, gates · H), are the products with the inputs; the hidden state has ``weight`` and ``bias``.
    """
    cell = CELLS[mode][inputs.is_cuda]
    found = _Recurrence.apply(inputs, weight, bias, kernels, cell, reverse, *states)  # type: ignore[no-untyped-call]
    return found[0], found[1:]


def has_fast_lstm(x: Tensor) -> bool:
    """Return whether oneDNN computes the LSTM of one client faster than plain operations that of many."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and x.device.type == "cpu" and x.dtype == torch.float32


def lstm_one_by_one(
    x: Tensor, weights: Sequence[Tensor], states: States, bias: bool, bidirectional: bool
) -> tuple[Tensor, States]:
    """Return the outputs of an LSTM layer, (C, B, T, directions · H), and the last states, (directions, C, B, H).

    x is (C, B, T, I), the states are (directions, C, B, H), and the weights of all clients are in PyTorch's order.
    """
    by_client = zip(
        x, zip(*(weight.unbind() for weight in weights), strict=True), *(s.unbind(1) for s in states), strict=True
    )
    found = [
        torch._VF.lstm(inputs, (h, c), params, bias, 1, 0.0, x.requires_grad, bidirectional, True)
        for inputs, params, h, c in by_client
    ]
    out, h, c = zip(*found, strict=True)
    return torch.stack(out), (torch.stack(h, 1), torch.stack(c, 1))
