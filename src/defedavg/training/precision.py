"""The precision of matrix products and convolutions: how many digits their operands have.

Weights, activations and sums are float32 in each of them. Operands of TF32 have eleven binary digits, those of bf16
eight.
"""

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
        raise unknown("precision", precision, ("auto", *PRECISIONS))
    if device == "cpu" and precision == "tf32":
        raise UserError("--precision tf32 needs a CUDA device; use float32")
    if device == "cpu" and precision == "bf16" and not cpu_has_bf16():
        raise UserError("--precision bf16 needs a processor with AVX512-BF16 or AMX, or a CUDA device; use float32")


def cpu_has_bf16() -> bool:
    """Return whether this processor multiplies bfloat16 numbers; PyTorch emulates it on others, which is slower."""
    # Processors with AMX have AVX512-BF16, too.
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return probe is not None and bool(probe())


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
