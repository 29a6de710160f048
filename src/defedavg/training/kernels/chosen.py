"""The choice of the kernels for a device, a dtype and a precision."""

from __future__ import annotations

import torch

from ..precision import DEFAULT, check_precision
from ..threads import keep_freed_memory
from .cpu_kernels import CpuLayerKernels
from .plain import LayerKernels


def kernels_for(device: torch.device, dtype: torch.dtype, precision: str | None) -> LayerKernels:
    """Return the fastest kernels; an unknown precision raises a ``UserError``."""
    precision = precision or DEFAULT[device.type]
    check_precision(precision, device.type)
    if device.type == "cpu":
        keep_freed_memory()
        return CpuLayerKernels(half=precision == "bf16")
    if dtype == torch.float32:
        try:
            from .triton_layers import TritonLayerKernels

            return TritonLayerKernels(precision)
        except ImportError:  # without Triton, plain operations give the same results up to rounding
            pass
    return LayerKernels(half=precision == "bf16")
