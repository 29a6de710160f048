"""The precision of matrix products on a CUDA device. Weights and activations are float32 in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from ..errors import UserError, unknown

PRECISIONS: Final = ("float32", "tf32", "bf16")
DEFAULT: Final = {"cpu": "float32", "cuda": "tf32"}


def check_precision(precision: str, device: str) -> None:
    """Refuse a precision that is unknown or that the device does not support."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if device == "cpu" and precision != "float32":
        raise UserError(f"--precision {precision} needs a CUDA device; use float32")


@contextmanager
def computing_in(precision: str) -> Iterator[None]:
    """Let PyTorch's own products use TF32 unless the precision is float32; restore its settings afterwards."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    previous = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32 = convolution.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = previous
