"""Keyed augmentation: against a plain oracle, the same in every form, and refused for inputs that are not images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from defedavg.errors import UserError
from defedavg.rng import extend, key
from defedavg.tasks import make_task
from defedavg.training import LocalTraining, Reference
from defedavg.training.augmentation import Augmentation, augmentation_of
from defedavg.training.tensor_rng import signed
from helpers.text_models import TextClassifier, text_task

TEXTS = ["flip", "crop(1)", "crop(3)", "flip+crop(2)"]
IMAGES = np.random.default_rng(0).normal(size=(12, 3, 5, 7))


def oracle(images: NDArray[np.float64], step_key: int, flip: bool, crop: int) -> NDArray[np.float64]:
    """Draw by the definition: half of the images are flipped; the crop is at one of (2·crop + 1)² positions."""
    changed = np.zeros_like(images)
    for position, image in enumerate(images):
        start = extend(extend(step_key, key(0, "augment")), position)
        mirrored, down, across = (
            (extend(start, part) >> 32) * limit >> 32 for part, limit in enumerate((2, 2 * crop + 1, 2 * crop + 1))
        )
        source = image[:, :, ::-1] if flip and mirrored else image
        for y in range(image.shape[1]):
            for x in range(image.shape[2]):
                row, column = y + down - crop, x + across - crop
                if 0 <= row < image.shape[1] and 0 <= column < image.shape[2]:
                    changed[position, :, y, x] = source[:, row, column]
    return changed


@pytest.mark.parametrize("text", TEXTS)
def test_augmentation_equals_its_oracle(text: str) -> None:
    """Three clients with four images each; both forms copy the same values."""
    augmentation = augmentation_of(text)
    assert augmentation is not None
    keys = [key(7, "test", client) for client in range(3)]
    parts = np.split(IMAGES, 3)
    expected = [oracle(p, k, augmentation.flip, augmentation.crop) for p, k in zip(parts, keys, strict=True)]
    for part, step_key, wanted in zip(parts, keys, expected, strict=True):
        assert np.array_equal(augmentation.one_by_one(torch.from_numpy(part), step_key).numpy(), wanted)
    together = augmentation.stacked(torch.from_numpy(IMAGES), torch.tensor(list(map(signed, keys))))
    assert np.array_equal(together.numpy(), np.concatenate(expected))


def test_draws_are_uniform() -> None:
    """Of 4,000 images about a half is flipped, and about a ninth has each shift by at most one pixel."""
    image = torch.arange(1.0, 26.0).view(1, 1, 5, 5).expand(4000, -1, -1, -1)
    keys = torch.tensor([signed(key(1, "test"))])
    flipped = Augmentation(flip=True).stacked(image, keys)[:, 0, 0, 0] == 5
    assert abs(int(flipped.sum()) - 2000) < 150
    corners = Augmentation(crop=1).stacked(image, keys)[:, 0, 2, 2]
    counts = torch.unique(corners, return_counts=True)[1]
    assert len(counts) == 9
    assert int((counts - 4000 / 9).abs().max()) < 90


@pytest.mark.parametrize("text", ["", "flip+", "crop", "crop()", "crop(0)", "crop(-1)", "crop(1.5)", "crop(99999)",
                                  "flipcrop(1)", "crop(1)+flip", "rotate", "crop(nan)", "none+flip"])  # fmt: skip
def test_a_text_that_is_no_augmentation_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"training.augment is .*; write none, flip, crop\(4\) or flip\+crop\(4\)$"):
        Augmentation.parse(text)


def image_task(shape: tuple[int, ...]) -> Any:
    data = np.zeros((6, *shape), np.float32), np.arange(6) % 2
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, *shape))
    return make_task(model=lambda: model, train=data, test=data, clients=[np.arange(6)])


@pytest.mark.parametrize(
    ("shape", "augment", "words"),
    [
        ((8,), "flip", r"shape \(8,\); set training.augment to none"),
        ((8, 8), "flip", r"shape \(8, 8\); set"),
        ((1, 8, 4), "crop(4)", "pads by 4, but the images are 8×4; give a smaller crop"),
    ],
)
def test_inputs_that_are_not_images_are_refused(shape: tuple[int, ...], augment: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Reference(image_task(shape), LocalTraining(0, 2, augment=augment))


def test_named_inputs_are_refused() -> None:
    with pytest.raises(UserError, match=r"needs images of shape .* but the inputs have names"):
        Reference(text_task(TextClassifier), LocalTraining(0, 2, augment="flip"))
