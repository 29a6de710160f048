"""Layers from outside the package: a registered form is used and exact, and a wrong one is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from defedavg.algorithms.protocol import Update
from defedavg.errors import UserError
from defedavg.training import LayerSite, StackedLayer, StackedPass, StackingError, Trainer, samplewise, stacked_layer
from defedavg.training.kernels.plain import LayerKernels
from defedavg.training.stacking import layer_registry
from defedavg.training.stacking.stacked_model import stack
from helpers.modules import ENTER, X, task_of
from helpers.small_runs import batched_run, final_versions, how, reference


class Scale(nn.Module):
    """A factor for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


class Cube(nn.Module):
    """A layer without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3


class Inner(nn.Module):
    """A registered layer inside another module's ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.scale, self.leave = nn.Linear(ENTER, 8), Scale(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x.flatten(1))
        out: Tensor = self.leave(hidden + self.scale(hidden))
        return out


def chained(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(ENTER, 8), *layers, nn.Linear(8, 3))


def scale(_: Scale, site: LayerSite) -> StackedLayer:
    def run(context: StackedPass, x: Tensor) -> Tensor:
        factors = context.weights[f"{site.name}factors"]
        return (x.reshape(len(factors), -1, 8) * factors.unsqueeze(1)).flatten(0, 1)

    return StackedLayer(run)


def scale_by_first_client(_: Scale, site: LayerSite) -> StackedLayer:
    return StackedLayer(lambda context, x: x * context.weights[f"{site.name}factors"][0])


def scale_without_update(_: Scale, site: LayerSite) -> StackedLayer:
    return StackedLayer(scale(_, site).run, self_updating=(f"{site.name}factors",))


class FusedScale(torch.autograd.Function):
    """Multiplies by the factors; the backward pass subtracts their update from a target."""

    @staticmethod
    def forward(ctx, anchor, x, factors, rates, target):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, factors.clone())
        ctx.update = rates, target
        return x * factors.unsqueeze(1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x, factors), (rates, target) = ctx.saved_tensors, ctx.update
        if rates is not None:
            target.sub_((grad * x).sum(1) * rates.unsqueeze(1))
        return None, grad * factors.unsqueeze(1), None, None, None


def fused_scale(_: Scale, site: LayerSite, *, use_targets: bool) -> StackedLayer:
    name = f"{site.name}factors"

    def run(context: StackedPass, x: Tensor) -> Tensor:
        factors = context.weights[name]
        target = context.targets.get(name, factors) if use_targets else factors
        rows = x.reshape(len(factors), -1, 8)
        out: Tensor = FusedScale.apply(context.anchor, rows, factors, context.rates, target)  # type: ignore[no-untyped-call]
        return out.flatten(0, 1)

    return StackedLayer(run, self_updating=(name,))


def scale_that_fails(_: Scale, site: LayerSite) -> StackedLayer:
    return StackedLayer(lambda context, x: x * context.weights[f"{site.name}factors"])


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo registrations after each test."""
    monkeypatch.setattr(layer_registry, "_BUILDERS", dict(layer_registry._BUILDERS))


@pytest.mark.parametrize("model", [lambda: chained(Scale(), nn.ReLU()), Inner], ids=["chain", "inner"])
def test_a_registered_layer_agrees_with_the_reference(model: Callable[[], nn.Module]) -> None:
    stacked_layer(Scale)(scale)
    task = task_of(model)
    expected = reference(how("defedavg-niid"), task, 6)
    (found,) = final_versions([batched_run(how("defedavg-niid"), task, 6)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-10


def test_a_layer_that_updates_itself_yields_gradients() -> None:
    stacked_layer(Scale)(partial(fused_scale, use_targets=True))
    task = task_of(lambda: chained(Scale(), nn.ReLU()))
    for chosen in (how("fedavg"), how("fedavg", momentum=0.9, prox=0.1, local_lr=0.02)):
        expected = reference(chosen, task, 6)
        (found,) = final_versions([batched_run(chosen, task, 6)], task, 64)
        assert float((found - expected).norm() / expected.norm()) < 1e-10


def test_a_layer_that_ignores_targets_is_used_for_plain_sgd_only() -> None:
    """Other optimisers are refused in one line: the reference trains such a run, or the user corrects the layer."""
    stacked_layer(Scale)(partial(fused_scale, use_targets=False))
    task = task_of(lambda: chained(Scale(), nn.ReLU()))
    expected = reference(how("fedavg"), task, 6)
    (found,) = final_versions([batched_run(how("fedavg"), task, 6)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-10
    run = batched_run(how("fedavg", momentum=0.9), task, 1)
    module, training = run.reference.module, run.reference.local_training
    with pytest.raises(StackingError, match=r"^the registered form of Scale ignores context.targets"):
        Trainer(task, module, local_training=training)
    with pytest.raises(UserError, match=r"^the registered form of Scale ignores .* use --executor reference$"):
        Trainer(task, module).train([run.job(Update(0, 0, 0, 2))])


def test_a_registered_layer_is_used() -> None:
    names = []

    def counted(module: Scale, site: LayerSite) -> StackedLayer:
        names.append(site.name)
        return scale(module, site)

    stacked_layer(Scale)(counted)
    model = stack(chained(Scale(), nn.Tanh()).double(), LayerKernels(), torch.from_numpy(X[:3]))
    assert set(names) == {"2."}
    assert model.self_updating == {"1.weight", "1.bias", "4.weight", "4.bias"}


def test_a_layer_without_parameters_is_its_own_stacked_form() -> None:
    stacked_layer(Cube)(samplewise)
    model = stack(chained(Cube()).double(), LayerKernels(), torch.from_numpy(X[:3]))
    assert model.self_updating == {"1.weight", "1.bias", "3.weight", "3.bias"}
    with pytest.raises(StackingError, match="Scale with parameters"):
        samplewise(Scale(), LayerSite("2.", LayerKernels()))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (scale_by_first_client, "other results than single ones"),
        (scale_without_update, "other results than single ones"),
        (scale_that_fails, "size of tensor"),
    ],
)
@pytest.mark.parametrize("model", [lambda: chained(Scale()), Inner], ids=["chain", "inner"])
def test_a_wrong_layer_is_refused(
    model: Callable[[], nn.Module], wrong: layer_registry.LayerBuilder, words: str
) -> None:
    stacked_layer(Scale)(wrong)
    with pytest.raises(StackingError, match=f"^with the registered form of Scale: .*{words}") as caught:
        stack(model().double(), LayerKernels(), torch.from_numpy(X[:3]))
    assert "\n" not in str(caught.value)


def test_a_class_has_one_stacked_form() -> None:
    stacked_layer(Scale)(scale)
    stacked_layer(Scale)(scale)
    with pytest.raises(UserError, match="a stacked form of Scale already exists"):
        stacked_layer(Scale)(scale_by_first_client)
    with pytest.raises(UserError, match="a stacked form of Linear already exists"):
        stacked_layer(nn.Linear)(scale)
