"""What a model is, in a few letters: both sides must mean the same one."""

from __future__ import annotations

from hashlib import sha256

from torch import nn


def signature(module: nn.Module) -> str:
    """Equal for models with the same parameters and buffers: names, shapes and number types, in their order."""
    parts = [(name, tuple(value.shape), str(value.dtype)) for name, value in module.state_dict().items()]
    return sha256(repr(parts).encode()).hexdigest()[:16]
