"""A fingerprint of a model's structure: server and clients must have the same one."""

from __future__ import annotations

from hashlib import sha256

from torch import nn


def model_signature(module: nn.Module) -> str:
    """Return a hash of the names, shapes and number types of all parameters and buffers, in their order."""
    parts = [(name, tuple(value.shape), str(value.dtype)) for name, value in module.state_dict().items()]
    return sha256(repr(parts).encode()).hexdigest()[:16]
