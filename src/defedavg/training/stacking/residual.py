"""The stacked form of the residual blocks of the built-in ResNet: both branches as sequences of stacked layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...tasks.models import Residual
from ..kernels.plain import Gradient, aten
from .direct import backward_pass, forward_pass, is_direct
from .layer_registry import LayerSite, Passes, StackedLayer, StackedPass, stacked_layer
from .sequences import joined, run_sequence, stack_sequence


@stacked_layer(Residual)
def residual(module: Residual, site: LayerSite) -> StackedLayer:
    """Stack a residual block."""
    branches = [
        stack_sequence(branch, f"{site.name}{name}.", site.kernels)
        for name, branch in (("body", module.body), ("shortcut", module.shortcut))
    ]
    layers = [layer for branch in branches for layer in branch]

    def run(context: StackedPass, x: Tensor) -> Tensor:
        body, shortcut = (run_sequence(branch, context, x) for branch in branches)
        return torch.relu(body + shortcut)

    return replace(joined(layers, run), passes=partial(_passes, branches) if is_direct(layers) else None)


def _passes(branches: Sequence[Sequence[StackedLayer]], context: StackedPass) -> Passes:
    bound = [[layer.passes(context) for layer in branch if layer.passes is not None] for branch in branches]

    def forward(x: Tensor) -> tuple[Tensor, Any]:
        (body, first), (shortcut, second) = (forward_pass(branch, x) for branch in bound)
        out = (body + shortcut).relu_()
        return out, (out, first, second)

    def backward(grad: Tensor, saved: Any, needs_x: bool) -> Gradient:
        out, *of_branches = saved
        grad = aten.threshold_backward.default(grad, out, 0)
        body, shortcut = (
            backward_pass(branch, grad, kept, 0, needs_x) for branch, kept in zip(bound, of_branches, strict=True)
        )
        return None if body is None or shortcut is None else body + shortcut

    return forward, backward
