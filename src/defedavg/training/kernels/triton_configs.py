"""Tiles of the Triton kernels, and what their launches share."""

from __future__ import annotations

from torch import Tensor

CONFIGS: dict[str, dict[str, int]] = {
    "conv": {"BM": 128, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3},
    "conv_few": {"BM": 128, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2},
    "conv_rows": {"BM": 128, "BN": 64, "BK": 16, "num_warps": 8, "num_stages": 3},
    "conv_step": {"BM": 64, "BN": 64, "BK": 16, "num_warps": 1, "num_stages": 3},
    "conv_step_few": {"BM": 64, "BN": 64, "BK": 32, "num_warps": 1, "num_stages": 2},
    "conv_step_rows": {"BM": 64, "BN": 64, "BK": 16, "num_warps": 1, "num_stages": 3},
    "half_conv": {"BM": 128, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 4},
    "half_conv_few": {"BM": 128, "BN": 64, "BK": 32, "num_warps": 8, "num_stages": 3},
    "half_conv_rows": {"BM": 128, "BN": 64, "BK": 32, "num_warps": 8, "num_stages": 1},
    "half_conv_edges": {"BM": 128, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3},
    "half_conv_step": {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3},
    "half_conv_step_few": {"BM": 64, "BN": 32, "BK": 64, "num_warps": 1, "num_stages": 2},
    "half_conv_step_rows": {"BM": 64, "BN": 128, "BK": 32, "num_warps": 2, "num_stages": 3},
    "linear": {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3},
    "linear_step": {"BM": 32, "BN": 128, "num_warps": 4, "num_stages": 2},
    "keep": {"BK": 64, "num_warps": 4, "num_stages": 4},
    "deferred_linear": {"BM": 64, "BK": 128, "num_warps": 2, "num_stages": 2},
    "deferred_grad_x": {"BM": 32, "BN": 256, "num_warps": 4, "num_stages": 3},
    "add_updates": {"BM": 32, "BN": 128, "num_warps": 2, "num_stages": 2},
}
"""The fastest tiles, warps and stages (benchmarks/kernels.py); BM and BN are upper limits."""


def launch_config(kernel: str, **sizes: int) -> dict[str, int]:
    """Return the configuration of a kernel, with tiles that are no larger than these sizes need."""
    limits = CONFIGS[kernel]
    return limits | {tile: tile_for(size, limits[tile]) for tile, size in sizes.items()}


def tile_for(size: int, limit: int) -> int:
    """Return a power of two that covers the size, at least 16 and at most the limit."""
    return max(16, min(limit, power_of_two(size)))


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below a size."""
    return 1 << (size - 1).bit_length()


def blocks(size: int, block: int) -> int:
    """Return how many blocks cover a size."""
    return -(-size // block)


def filled(placeholder: Tensor, *given: Tensor | None) -> list[Tensor]:
    """Replace None by a tensor: a kernel needs one for every argument, even if it does not read it."""
    return [placeholder if tensor is None else tensor for tensor in given]
