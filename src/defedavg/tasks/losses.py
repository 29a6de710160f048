"""Losses, which return one value per sample, and metrics, for which higher is better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one value per sample, of shape (batch,)."""

Metric = Callable[[Tensor, Tensor], Any]
"""(outputs, targets) of the whole test set -> one value per sample, or one number."""

IGNORED = -100  # the target of a token that does not count; PyTorch's ``ignore_index``


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of every sample."""
    return F.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared distance between output and target, for every sample."""
    # Without this check, (n, 1) and (n,) would broadcast to (n, n).
    if outputs.shape != targets.shape:
        shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        raise UserError(f"squared_error needs equal shapes, not {shapes}; reshape the targets")
    return 0.5 * (outputs - targets).square().unsqueeze(-1).flatten(1).sum(1)


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of every sample's tokens: outputs (n, tokens, classes), targets (n, tokens).

    Tokens with target -100 do not count.
    """
    _check_tokens(outputs, targets)
    # Over transposed outputs, PyTorch's CPU kernels take twice as long.
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(targets.shape).sum(1) / (targets != IGNORED).sum(1).clamp(min=1)


def token_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of all tokens whose class is predicted; tokens with target -100 do not count."""
    _check_tokens(outputs, targets)
    counted = targets != IGNORED
    return ((outputs.argmax(2) == targets) & counted).sum() / counted.sum()


def _check_tokens(outputs: Tensor, targets: Tensor) -> None:
    if outputs.ndim != 3 or outputs.shape[:2] != targets.shape:
        shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        raise UserError(f"tokens need outputs (samples, tokens, classes) and targets (samples, tokens), not {shapes}")
