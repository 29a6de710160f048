"""Keyed augmentation: against a plain oracle, the same in every form, and refused for inputs that are not images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from defedavg.config.build import make_executor, make_plan
from defedavg.errors import UserError
from defedavg.rng import extend, key
from defedavg.tasks import make_task
from defedavg.training import LocalTraining, Reference
from defedavg.training.augmentation import Augmentation, augmentation_of
from defedavg.training.tensor_rng import signed
from helpers.settings_tables import settings
from helpers.small_runs import batched_run, final_versions, reference
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


@pytest.mark.parametrize("text", TEXTS)
def test_fifty_merges_of_augmented_least_squares_equal_the_oracle(text: str) -> None:
    """A step uses all four images of a client, in the order of the keyed mini-batch; the model is linear."""
    targets = np.random.default_rng(1).normal(size=(12, 1))
    task = make_task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 5 * 7, 1)).double(),
        train=(IMAGES, targets), test=(IMAGES, targets), classes=None, keep_dtype=True,
        loss=lambda outputs, wanted: 0.5 * (outputs - wanted).square().sum(1),
        clients=[np.arange(4 * i, 4 * i + 4) for i in range(3)],
    )  # fmt: skip
    given = {"updates_per_round": 2, "local_steps": 2, "batch_size": 4, "sampling": "shuffle", "augment": text}
    chosen = settings("fedavg", clients={"num_clients": 3}, training={**given, "global_lr": 0.5, "local_lr": 0.005})
    executor, augmentation, plan = make_executor(chosen, 0, task), augmentation_of(text), make_plan(chosen, 0, 55)
    assert augmentation is not None
    first = w = executor.versions[0].numpy().copy()
    for record in plan.rounds:
        total = np.zeros_like(w)
        for update, b in record.merge.updates:
            x = w
            for step, samples in enumerate(executor.local_training.samples(task, update)):
                step_key = extend(executor.local_training.layer_key(update), step)
                images = oracle(IMAGES[samples], step_key, augmentation.flip, augmentation.crop)
                inputs = np.c_[images.reshape(4, -1), np.ones(4)]
                x = x - 0.005 * inputs.T @ (inputs @ x - targets[samples, 0]) / 4
            total += b * (w - x)
        w = w + 0.5 * total
    assert np.abs(w - first).max() > 1e-2
    for found in (reference(chosen, task, 55), *final_versions([batched_run(chosen, task, 55)], task, 64)):
        np.testing.assert_allclose(found.numpy(), w, rtol=1e-10, atol=1e-10)
