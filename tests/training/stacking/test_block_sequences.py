"""Sequences of normalised convolutions and residual blocks: which layers are computed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from defedavg.tasks import build
from defedavg.tasks.models import Residual
from defedavg.training.kernels.plain import Block, Gradient, LayerKernels
from defedavg.training.stacking.direct import DirectStep
from defedavg.training.stacking.layer_registry import CHANNELS_LAST, StackedModel, StackedPass
from defedavg.training.stacking.stacked_model import stack

CLIENTS, SIZE, CLASSES, IMAGE = 2, 3, 5, (2, 16, 16)


class Recorded(LayerKernels):
    """Kernels that name the blocks they are asked for; ``fits`` is whether they compute them."""

    fuses_blocks = True

    def __init__(self, fits: bool = False) -> None:
        super().__init__()
        self.asked, self._fits = list[str](), fits

    def blocks(self, x: Tensor, blocks: Sequence[Block]) -> tuple[Tensor, list[Any]] | None:
        kinds = {(True, False): "plain", (False, False): "adds inputs", (False, True): "projects"}
        self.asked += [kinds[block.second is None, block.shortcut is not None] for block in blocks]
        return (torch.zeros(len(x), 1, 1, 64), [x.shape]) if self._fits else None

    def blocks_backward(self, grad: Tensor, saved: list[Any], blocks: Sequence[Block], needs_x: bool) -> Gradient:
        self.asked.append(f"backward {needs_x}")
        return None


def weights_of(module: nn.Module, stacked: StackedModel) -> dict[str, Tensor]:
    source, weights = torch.Generator().manual_seed(0), {}
    for name, p in module.named_parameters():
        each = p.detach() + 0.05 * torch.randn(CLIENTS, *p.shape, generator=source)
        each = each.permute(CHANNELS_LAST) if name in stacked.channels_last else each
        weights[name] = each.clone(memory_format=torch.contiguous_format)
    return weights


def trained(module: nn.Module, kernels: LayerKernels) -> dict[str, Tensor]:
    """Return the weights after one step."""
    stacked = stack(module, kernels)
    weights = weights_of(module, stacked)
    inputs = torch.randn(CLIENTS * SIZE, *IMAGE, generator=torch.Generator().manual_seed(1))
    step = DirectStep(stacked.direct, StackedPass(weights, torch.tensor([0.1, 0.2])))
    step(inputs, lambda out: torch.ones_like(out) * torch.arange(out.shape[1]))
    return weights


def test_the_resnet_is_one_sequence_of_blocks() -> None:
    kernels = Recorded(fits=True)
    trained(build("resnet", IMAGE, CLASSES), kernels)
    assert kernels.asked == ["plain", "adds inputs", "projects", "projects", "backward False"]


def test_blocks_that_kernels_do_not_support_are_computed_one_by_one() -> None:
    module, kernels = build("resnet", IMAGE, CLASSES), Recorded()
    found, expected = trained(module, kernels), trained(module, LayerKernels())
    assert kernels.asked[:1] == ["plain"]
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def conv(ins: int = 2, outs: int = 4, **options: Any) -> nn.Module:
    return nn.Conv2d(ins, outs, 3, **({"bias": False, "padding": 1} | options))


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def other_shortcut() -> nn.Module:
    block = Residual(2, 4, 2)
    block.shortcut = nn.Sequential(nn.Conv2d(2, 4, 3, 2, padding=1, bias=False), nn.GroupNorm(2, 4))
    return block


def other_body(second: nn.Module) -> nn.Module:
    block = Residual(4, 4, 1)
    block.body[3] = second
    return nn.Sequential(nn.Conv2d(2, 4, 1), block)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [conv(bias=True), nn.GroupNorm(2, 4), nn.ReLU()],
        lambda: [conv(), nn.GroupNorm(2, 4), nn.Tanh()],
        lambda: [conv(), nn.GroupNorm(2, 4)],
        lambda: [conv(), nn.ReLU()],
        lambda: [conv(stride=(1, 2)), nn.GroupNorm(2, 4), nn.ReLU()],
        lambda: [conv(padding="same"), nn.GroupNorm(2, 4), nn.ReLU()],
        lambda: [conv(padding=3), nn.GroupNorm(2, 4), nn.ReLU()],
        lambda: [other_shortcut()],
        lambda: [other_body(conv(4, 4, bias=True))],
    ],
)
def test_other_layers_are_no_blocks(layers: Callable[[], list[nn.Module]]) -> None:
    kernels = Recorded(fits=True)
    module = nn.Sequential(*layers(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))
    trained(module, kernels)
    assert kernels.asked == []


def test_a_layer_with_hooks_ends_a_sequence_of_blocks() -> None:
    module = nn.Sequential(conv(), nn.GroupNorm(2, 4), hooked(nn.ReLU()), nn.Flatten(), nn.Linear(1024, CLASSES))
    assert not stack(module, Recorded(fits=True)).direct
