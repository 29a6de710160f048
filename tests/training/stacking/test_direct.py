"""Steps without autograd do what steps with autograd do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from defedavg.tasks import Data, Task, build, cross_entropy
from defedavg.training.kernels.cpu_kernels import CpuLayerKernels
from defedavg.training.scoring import output_gradient, sample_losses
from defedavg.training.stacking.direct import DirectStep
from defedavg.training.stacking.layer_registry import CHANNELS_LAST, StackedModel, StackedPass
from defedavg.training.stacking.stacked_model import stack

CLIENTS, SIZE, CLASSES, IMAGE = 3, 4, 5, (2, 16, 16)


def mixed() -> nn.Module:
    """Return a chain with layers that have no backward pass of their own."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, affine=False, track_running_stats=False), nn.ReLU(inplace=True)),
        *(nn.AvgPool2d(2), nn.Tanh(), nn.Identity(), nn.Flatten(), nn.Linear(196, 8), nn.GELU(), nn.Linear(8, CLASSES)),
    )


def frozen() -> nn.Module:
    """Return a model whose first layer and one bias are not trained."""
    model = build("mlp", IMAGE, CLASSES)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in ("1.weight", "1.bias", "3.bias"))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: build("softmax", IMAGE, CLASSES),
    "mlp": lambda: build("mlp", IMAGE, CLASSES),
    "pooled-mlp": lambda: build("pooled-mlp", IMAGE, CLASSES),
    "cnn": lambda: build("cnn", IMAGE, CLASSES),
    "resnet": lambda: build("resnet", IMAGE, CLASSES),
    "frozen": frozen,
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(512, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    "in place": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2), nn.ReLU(inplace=True), nn.Flatten(),
                                      nn.Linear(196, CLASSES)),
}  # fmt: skip


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(model: str, dtype: torch.dtype) -> tuple[StackedModel, nn.Module, dict[str, Tensor], Tensor, Tensor]:
    """Return a stacked model, weights of three clients, inputs and slopes of a linear loss."""
    module = MODELS[model]().to(dtype)
    stacked = stack(module, CpuLayerKernels(), drawn(3, *IMAGE).to(dtype))
    weights = {}
    for number, (name, p) in enumerate(module.named_parameters()):
        each = (p.detach() + 0.05 * drawn(CLIENTS, *p.shape, seed=number).to(dtype)).contiguous()
        weights[name] = each.permute(CHANNELS_LAST).contiguous() if name in stacked.channels_last else each
    inputs, slopes = drawn(CLIENTS * SIZE, *IMAGE, seed=90), drawn(CLIENTS * SIZE, CLASSES, seed=91)
    return stacked, module, weights, inputs.to(dtype), slopes.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("model", MODELS)
def test_a_direct_step_has_the_bits_of_one_with_autograd(model: str, dtype: torch.dtype) -> None:
    stacked, module, before, inputs, slopes = made(model, dtype)
    assert stacked.direct
    rates, keys = torch.tensor([0.1, 0.2, 0.3], dtype=dtype), torch.arange(CLIENTS)
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    expected, found = ({name: w.clone() for name, w in before.items()} for _ in range(2))
    outputs = stacked.sgd_step(expected, trainable, rates, keys, inputs.clone(), lambda out: (out * slopes).sum())
    direct = DirectStep(stacked.direct, StackedPass(found, rates))(inputs.clone(), lambda _: slopes.clone())
    assert torch.equal(direct, outputs.detach())
    for name, weight in before.items():
        assert torch.equal(found[name], expected[name]), name
        assert torch.equal(found[name], weight) == (name not in trainable), name


@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet"])
def test_a_direct_step_yields_gradients_and_keeps_the_weights(model: str) -> None:
    stacked, _, weights, inputs, slopes = made(model, torch.float64)
    before = {name: w.clone() for name, w in weights.items()}
    expected, found = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    active, keys = torch.ones(CLIENTS, dtype=torch.bool), torch.arange(CLIENTS)
    stacked.gradients(weights, expected, active, keys, inputs, lambda out: (out * slopes).sum())
    context = StackedPass(weights, -torch.ones(CLIENTS, dtype=torch.float64), targets=found)
    DirectStep(stacked.direct, context)(inputs, lambda _: slopes)
    for name, gradient in expected.items():
        assert bool(gradient.any())
        assert torch.equal(found[name], gradient), name
        assert torch.equal(weights[name], before[name]), name


def test_a_client_with_rate_zero_keeps_its_weights() -> None:
    stacked, _, weights, inputs, slopes = made("cnn", torch.float32)
    before = {name: w.clone() for name, w in weights.items()}
    slopes[:SIZE] = torch.nan  # the gradients of the first client are not finite
    DirectStep(stacked.direct, StackedPass(weights, torch.tensor([0.0, 0.1, 0.1])))(inputs, lambda _: slopes)
    for name, weight in weights.items():
        assert torch.equal(weight[0], before[name][0]), name
        assert bool(weight[1:].isfinite().all())
        assert not torch.equal(weight[1:], before[name][1:]), name


@pytest.mark.parametrize("model", [nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(512, 5)), mixed()])
def test_other_models_use_autograd(model: nn.Module) -> None:
    assert not stack(model, CpuLayerKernels(), drawn(3, *IMAGE).float()).direct


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("loss", [cross_entropy, smooth])
def test_the_gradient_of_the_outputs_is_that_of_autograd(loss: object) -> None:
    outputs, targets = drawn(CLIENTS * SIZE, CLASSES), torch.arange(CLIENTS * SIZE) % CLASSES
    targets[2] = -100  # PyTorch ignores such a sample
    data = Data(outputs, targets)
    task = Task("t", nn.Identity, loss, data, data, (np.arange(len(data)),), None)  # type: ignore[arg-type]
    leaf = outputs.clone().requires_grad_()
    total = sample_losses(task, leaf, targets).view(CLIENTS, SIZE).mean(1).sum()
    (expected,) = torch.autograd.grad(total, leaf)
    with torch.no_grad():
        found = output_gradient(task, outputs, targets, SIZE)
    assert bool(expected.any())
    assert torch.equal(found, expected)
