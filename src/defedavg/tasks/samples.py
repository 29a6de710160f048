"""Samples: inputs and targets with the same first dimension; the inputs are one tensor, or several by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

Inputs = Tensor | dict[str, Tensor]
"""The inputs of a model: one tensor, or tensors that its ``forward`` receives as keyword arguments."""


def each(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Apply a function to every tensor of the inputs."""
    return {name: change(part) for name, part in inputs.items()} if isinstance(inputs, dict) else change(inputs)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return the tensors of the inputs; all have the same length and device."""
    return list(inputs.values()) if isinstance(inputs, dict) else [inputs]


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Samples: inputs and targets of the same length."""

    inputs: Any  # Inputs: most code knows which of the two it has
    targets: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.inputs, dict) and not self.inputs:
            raise UserError("the inputs are an empty dict; give it at least one array")
        if any(part.ndim == 0 for part in self.tensors):
            raise UserError("inputs and targets need a first dimension that counts samples; pass at least 1-d tensors")
        if isinstance(self.inputs, dict) and len({len(part) for part in self.inputs.values()}) > 1:
            lengths = ", ".join(f"{name!r} has {len(part)}" for name, part in self.inputs.items())
            raise UserError(f"the inputs differ in their number of samples: {lengths}; give arrays of equal length")
        if len(self) != len(self.targets):
            raise UserError(f"{len(self)} inputs but {len(self.targets)} targets; give one target per input")

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, samples: Tensor | slice) -> Data:
        return self.map(lambda part: part[samples])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the inputs, then the targets."""
        return [*tensors_of(self.inputs), self.targets]

    @property
    def device(self) -> torch.device:
        """The device that holds the samples."""
        return self.targets.device

    def map(self, change: Callable[[Tensor], Tensor]) -> Data:
        """Apply a function to every tensor."""
        return Data(each(change, self.inputs), change(self.targets))

    def chunks(self, size: int) -> Iterator[Data]:
        """Yield parts of ``size`` samples, in order; a last sample is not alone, since it has no batch statistics."""
        starts = list(range(0, len(self), size))
        if len(starts) > 1 and len(self) - starts[-1] == 1 < size:
            starts.pop()
        return (self[start:end] for start, end in zip(starts, [*starts[1:], len(self)], strict=True))

    def to(self, device: str | torch.device) -> Data:
        """Return the same samples on a device."""
        return self.map(lambda part: part.to(device))


def channels_last(data: Data, for_layers: Collection[str]) -> Data | None:
    """Return images of several channels with the channels last, in memory and in shape.

    This returns None for other samples, and where no layer reads them so.
    """
    images = data.inputs
    if not for_layers or not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] == 1:
        return None
    return Data(images.permute(0, 2, 3, 1).contiguous(), data.targets)


def channels_first(part: Tensor) -> Tensor:
    """Return images in the usual shape without a copy, and other tensors as they are."""
    return part.permute(0, 3, 1, 2) if part.ndim == 4 else part
