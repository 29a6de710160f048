"""Normalisation of pixel values 0..255 to float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

Scaling = Callable[[Tensor], Tensor]

CHUNK: Final = 256
"""Images at a time, so that large sets of bytes are never held whole in a wider type."""


def _standard(train: Tensor) -> Scaling:
    if train.dtype == torch.uint8:
        return partial(_look_up, _standard_table(train))
    others = [d for d in range(train.ndim) if d != 1]
    std, mean = torch.std_mean(train.double(), dim=others, correction=0, keepdim=True)
    return lambda values: ((values - mean) / torch.where(std > 0, std, 1.0)).float()


def _standard_table(train: Tensor) -> Tensor:
    """Return the normalised value of every byte, per channel; counting bytes gives exact mean and deviation."""
    counts = torch.zeros(train.shape[1], 256, dtype=torch.int64)
    for start in range(0, len(train), CHUNK):
        for channel, channel_counts in enumerate(counts):
            channel_counts += torch.bincount(train[start : start + CHUNK, channel].flatten(), minlength=256)
    values = torch.arange(256)
    number, total, squares = (int(counts[0].sum()), (counts * values).sum(1), (counts * values.square()).sum(1))
    mean = total.double() / number
    variance = [(number * int(q) - int(t) ** 2) / number**2 for t, q in zip(total, squares, strict=True)]
    std = torch.tensor(variance, dtype=torch.float64).sqrt()
    return ((values.double() - mean[:, None]) / torch.where(std > 0, std, 1.0)[:, None]).float()


def _look_up(table: Tensor, pixels: Tensor) -> Tensor:
    """Return ``table[channel, pixel]`` for every pixel."""
    scaled = np.empty(tuple(pixels.shape), np.float32)
    source, rows = pixels.numpy(), table.numpy()
    for start in range(0, len(source), CHUNK):
        chunk = slice(start, start + CHUNK)
        for channel, row in enumerate(rows):
            scaled[chunk, channel] = row.take(source[chunk, channel], mode="clip")  # unchecked: a byte is below 256
    return torch.from_numpy(scaled)


def _unit(train: Tensor) -> Scaling:  # noqa: ARG001 (every normaliser receives the training inputs)
    return lambda values: values / 255


NORMALISERS: Final[dict[str, Callable[[Tensor], Scaling]]] = {"standard": _standard, "unit": _unit}
"""By name: training inputs -> the function that scales any inputs."""
