"""Stacked LSTM, GRU and RNN layers agree with the modules themselves, for all options and over whole runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from defedavg.tasks import Task, make_task
from defedavg.tasks.models import seeded
from defedavg.training import StackedPass, StackingError
from defedavg.training.kernels.cpu_kernels import CpuLayerKernels
from defedavg.training.kernels.plain import LayerKernels
from defedavg.training.kernels.recurrence import GruCell, LstmCell
from defedavg.training.module_state import keyed_copy
from defedavg.training.stacking.layer_registry import LayerSite, build_layer
from defedavg.training.stacking.recurrent import KeyedRecurrent
from defedavg.training.stacking.stacked_model import stack
from helpers.modules import Recurrent, named
from helpers.small_runs import batched_run, final_versions, how, reference

KINDS = (nn.LSTM, nn.GRU, nn.RNN)


def flat(result: Any) -> list[Tensor]:
    out, states = result
    return [out, *(states if isinstance(states, tuple) else [states])]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    sizes=st.tuples(*[st.integers(1, 4)] * 5),
    layers=st.integers(1, 3),
    bias=st.booleans(),
    batch_first=st.booleans(),
    bidirectional=st.booleans(),
    with_states=st.booleans(),
    single=st.booleans(),
)
def test_a_stacked_layer_is_the_module_for_every_client(
    kind: Callable[..., nn.RNNBase], sizes: tuple[int, ...], layers: int, bias: bool, batch_first: bool,
    bidirectional: bool, with_states: bool, single: bool,
) -> None:  # fmt: skip
    """Outputs, last states and all gradients; in single precision, the LSTM of one client is oneDNN's."""
    clients, samples, steps, ins, outs = sizes
    dtype = torch.float32 if single else torch.float64
    tolerance: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5} if single else {"rtol": 1e-10, "atol": 1e-12}
    source = torch.Generator().manual_seed(sum(sizes))
    draw = partial(torch.randn, dtype=dtype, generator=source)
    options: dict[str, Any] = {"bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}
    build = partial(kind, ins, outs, num_layers=layers, dtype=dtype, **options)
    modules = [seeded(build, number) for number in range(clients)]
    layer = build_layer(modules[0], LayerSite("net.", CpuLayerKernels()))
    weights = {
        f"net.{name}": torch.stack([dict(m.named_parameters())[name].detach() for m in modules]).requires_grad_()
        for name, _ in modules[0].named_parameters()
    }
    x = draw(clients * samples, steps, ins, requires_grad=True)
    shape = (layers * (1 + bidirectional), clients * samples, outs)
    states = [draw(shape, requires_grad=True) for _ in range(1 + (kind is nn.LSTM))] if with_states else []
    seen = x if batch_first else x.transpose(0, 1)
    found = flat(layer.run(StackedPass(weights), seen, *_packed(states)))
    parts = []
    for number, module in enumerate(modules):
        own = slice(number * samples, (number + 1) * samples)
        one = seen[own] if batch_first else seen[:, own]
        parts.append(flat(module(one, *_packed([s[:, own] for s in states]))))
    axes = (0 if batch_first else 1, 1, 1)
    wanted = [torch.cat(group, dim=axis) for group, axis in zip(zip(*parts, strict=True), axes, strict=False)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    slopes = [draw(a.shape) for a in found]
    ours = _gradients(found, slopes, [x, *states, *weights.values()])
    params = [p for module in modules for p in module.parameters()]
    theirs = _gradients(wanted, slopes, [x, *states, *params])
    each, count = len(weights), 1 + len(states)
    stacked = [torch.stack(theirs[count + n :: each]) for n in range(each)]
    for a, b in zip(ours, [*theirs[:count], *stacked], strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def _packed(states: list[Tensor]) -> list[Any]:
    return [] if not states else [tuple(states)] if len(states) > 1 else states


def _gradients(outputs: list[Tensor], slopes: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    loss = torch.stack([(a * slope).sum() for a, slope in zip(outputs, slopes, strict=True)]).sum()
    return list(torch.autograd.grad(loss, leaves))


def task_of(seed: int, **options: Any) -> Task:
    """Return a float64 task with texts of five characters for six clients."""
    texts = np.random.default_rng(seed).integers(0, 7, (60, 5))
    data, parts = (texts, texts.sum(axis=1) % 3), [np.arange(i, 60, 6) for i in range(6)]
    return make_task(model=lambda: Recurrent(**options).double(), train=data, test=data, clients=parts, keep_dtype=True)


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    dropout=st.sampled_from([0.0, 0.3]),
    training=st.sampled_from([{}, {"momentum": 0.9}, {"optimizer": "adam", "local_lr": 0.01}, {"clip_norm": 0.5}]),
    algorithm=st.sampled_from(["defedavg-niid", "fedbuff", "fedavg"]),
)
def test_whole_runs_agree_with_the_reference(
    kind: Callable[..., nn.RNNBase], layers: int, bidirectional: bool, batch_first: bool, dropout: float,
    training: dict[str, Any], algorithm: str,
) -> None:  # fmt: skip
    task = task_of(
        layers, kind=kind, num_layers=layers, bidirectional=bidirectional, batch_first=batch_first,
        dropout=dropout if layers > 1 else 0.0,
    )  # fmt: skip
    chosen = how(algorithm, **training)
    expected = reference(chosen, task, 4)
    (found,) = final_versions([batched_run(chosen, task, 4)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-10


def test_an_lstm_in_single_precision_is_bit_identical_in_every_batch() -> None:
    double = task_of(0, kind=nn.LSTM, num_layers=2, dropout=0.3)
    parts: dict[str, Any] = {"train": double.train, "test": double.test, "clients": double.clients}
    task, chosen = make_task(model=lambda: double.model().float(), **parts), how("defedavg-niid")
    found = [final_versions([batched_run(chosen, task, 3)], task, jobs)[0] for jobs in (1, 2, 64)]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_only_an_lstm_in_single_precision_is_declared_batch_invariant(kind: Callable[..., nn.RNNBase]) -> None:
    task = task_of(0, kind=kind)
    for module, invariant in ((task.model(), False), (task.model().float(), kind is nn.LSTM)):
        assert stack(module, None, task.train.inputs[:3]).batch_invariant == invariant


def test_dropout_between_layers_is_keyed_and_changes_training_alone() -> None:
    module = nn.GRU(3, 4, num_layers=3, dropout=0.5, batch_first=True)
    copied, draws = keyed_copy(nn.ModuleList([module, nn.Dropout(0.2)]))
    layers: Any = copied
    keyed, dropout = layers
    assert isinstance(keyed, KeyedRecurrent)
    assert (keyed.number, dropout.number) == (0, 2)  # two masks in the GRU
    x = torch.linspace(-1, 1, 30).view(2, 5, 3)
    torch.testing.assert_close(keyed.eval()(x)[0], module.eval()(x)[0])
    keyed.train()
    draws.key = torch.tensor(5)
    first = keyed(x)[0]
    assert torch.equal(first, keyed(x)[0])
    draws.key = torch.tensor(6)
    assert not torch.allclose(first, keyed(x)[0])


def test_options_that_cannot_be_stacked_are_refused_with_the_reason() -> None:
    with pytest.raises(StackingError, match="an LSTM with proj_size"):
        build_layer(nn.LSTM(3, 4, proj_size=2), LayerSite("net.", LayerKernels()))
    layer = build_layer(nn.LSTM(3, 4), LayerSite("", LayerKernels()))
    weights = {name: p[None] for name, p in nn.LSTM(3, 4).named_parameters()}
    with pytest.raises(StackingError, match="without a dimension for samples"):
        layer.run(StackedPass(weights), torch.zeros(5, 3))


def test_a_frozen_layer_is_not_trained() -> None:
    def model() -> nn.Module:
        net = Recurrent(nn.LSTM, num_layers=2)
        net.net.weight_hh_l0.requires_grad_(False)
        net.net.bias_ih_l1.requires_grad_(False)
        return net.double()

    task = named("lstm")
    stacked = stack(model(), LayerKernels(), task.train.inputs[:3])
    weights = {name: torch.stack([p.detach()] * 2) for name, p in model().named_parameters()}
    before = {name: values.clone() for name, values in weights.items()}
    trainable = [name for name, p in model().named_parameters() if p.requires_grad]
    rates, keys = torch.tensor([0.1, 0.0], dtype=torch.float64), torch.arange(2)
    stacked.sgd_step(weights, trainable, rates, keys, task.train.inputs[:4], lambda out: out.square().sum())
    for name, values in weights.items():
        assert torch.equal(values[1], before[name][1])  # its rate is zero
        assert torch.equal(values[0], before[name][0]) == (name not in trainable)


@pytest.mark.parametrize("cell", [GruCell(), LstmCell()])
def test_the_gradients_of_a_cell_are_those_of_autograd(cell: GruCell | LstmCell) -> None:
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs, hidden = (draw(2, 3, 4 * cell.gates, requires_grad=True) for _ in range(2))
    states = tuple(draw(2, 3, 4, requires_grad=True) for _ in range(cell.states))
    out, saved = cell.forward(inputs, hidden, states)
    slopes = tuple(draw(state.shape) for state in out)
    wanted = torch.autograd.grad(out, [inputs, hidden, *states], slopes, allow_unused=True)
    by_input, by_hidden, by_states = cell.backward(slopes, tuple(s.detach() for s in saved))
    for a, b in zip((by_input, by_hidden, *by_states), wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
