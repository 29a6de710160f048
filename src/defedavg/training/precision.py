"""In which precision products are computed on a CUDA device. Weights and activations are float32 all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from ..errors import UserError, unknown

PRECISIONS: Final = ("float32", "tf32", "bf16")
DEFAULT: Final = {"cpu": "float32", "cuda": "tf32"}


def check_precision(precision: str, device: str) -> None:
    """Refuse a precision that is unknown, or that the device does not have."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if device == "cpu" and precision != "float32":
        raise UserError(f"--precision {precision} needs a CUDA device; use float32")


@contextmanager
def computing_in(precision: str) -> Iterator[None]:
    """PyTorch's own products in this precision: TF32 for all but float32. The caller's settings come back."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    kept = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32 = convolution.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = kept
