"""Keyed augmentation of images (channels, height, width): a horizontal flip, and a shift by a crop after zero padding.

The draws of an image are a function of (seed, client, job, step, position in the mini-batch): a sample is first
flipped with probability one half, then padded with ``crop`` zeros on every side and cut to its size at a random
position. ``one_by_one`` is the plain form; ``stacked`` copies the same values for the images of many clients.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..rng import below, extend, key
from ..tasks.samples import Inputs
from . import tensor_rng

PURPOSE = key(0, "augment")
FLIP, DOWN, ACROSS = range(3)  # the parts that extend the key of an image
MOST = 10_000  # of the padding


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Which changes are drawn; ``crop`` is the width of the padding."""

    flip: bool = False
    crop: int = 0

    @classmethod
    def parse(cls, text: str, name: str = "training.augment") -> Augmentation | None:
        """Read ``none``, ``flip``, ``crop(4)`` or ``flip+crop(4)``; none is None."""
        words = text.replace(" ", "")
        if words == "none":
            return None
        match = re.fullmatch(r"(flip)|(flip\+)?crop\(([0-9]{1,9})\)", words)
        if not match or (match[3] and not 1 <= int(match[3]) <= MOST):
            raise UserError(f"{name} is {text[:80]!r}; write none, flip, crop(4) or flip+crop(4)")
        return cls(bool(match[1] or match[2]), int(match[3] or 0))

    def check(self, inputs: Inputs) -> None:
        """Raise ``UserError`` if the inputs are not images that can be augmented."""
        if not isinstance(inputs, Tensor) or inputs.ndim != 4:
            shown = f"shape {tuple(inputs.shape[1:])}" if isinstance(inputs, Tensor) else "names"
            raise UserError(
                f"training.augment needs images of shape (channels, height, width), but the inputs have {shown}; "
                "set training.augment to none"
            )
        if self.crop >= min(inputs.shape[2:]):
            size = "×".join(map(str, inputs.shape[2:]))
            raise UserError(f"training.augment pads by {self.crop}, but the images are {size}; give a smaller crop")

    def one_by_one(self, images: Tensor, step_key: int) -> Tensor:
        """Return one client's images (B, …), augmented with the key of the step."""
        changed = []
        for position, image in enumerate(images):
            image_key = extend(extend(step_key, PURPOSE), position)
            if self.flip and below(extend(image_key, FLIP), 2):
                image = image.flip(-1)
            if self.crop:
                down, across = (below(extend(image_key, part), 2 * self.crop + 1) for part in (DOWN, ACROSS))
                height, width = image.shape[-2:]
                image = F.pad(image, (self.crop,) * 4)[:, down : down + height, across : across + width]
            changed.append(image)
        return torch.stack(changed)

    def stacked(self, images: Tensor, step_keys: Tensor) -> Tensor:
        """Return the images (C·B, …) of clients with the keys (C,) of their steps, augmented without waiting."""
        each = torch.arange(len(images) // len(step_keys), device=images.device)
        starts = tensor_rng.extend_all(step_keys, torch.full_like(step_keys, tensor_rng.signed(PURPOSE)))
        keys = tensor_rng.extend_all(starts.unsqueeze(1), each).view(-1, 1)
        height, width = images.shape[2:]
        rows, columns = (torch.arange(size, device=images.device).unsqueeze(0) for size in (height, width))
        inside = None
        if self.crop:
            limit = torch.full_like(keys, 2 * self.crop + 1)
            rows = rows + tensor_rng.below(_extended(keys, DOWN), limit) - self.crop
            columns = columns + tensor_rng.below(_extended(keys, ACROSS), limit) - self.crop
            seen = [(place >= 0) & (place < size) for place, size in ((rows, height), (columns, width))]
            inside = seen[0].unsqueeze(2) & seen[1].unsqueeze(1)
            rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        if self.flip:
            flipped = tensor_rng.below(_extended(keys, FLIP), torch.full_like(keys, 2)) == 1
            columns = torch.where(flipped, width - 1 - columns, columns)
        places = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).expand(len(images), -1, -1).flatten(1)
        gathered = images.flatten(2).gather(2, places.unsqueeze(1).expand(-1, images.shape[1], -1)).view(images.shape)
        return gathered if inside is None else torch.where(inside.unsqueeze(1), gathered, torch.zeros_like(gathered))


augmentation_of = lru_cache(maxsize=64)(Augmentation.parse)
"""``Augmentation.parse``, with those read last."""


def _extended(keys: Tensor, part: int) -> Tensor:
    return tensor_rng.extend_all(keys, torch.full_like(keys, part))
