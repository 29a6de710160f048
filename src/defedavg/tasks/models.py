"""Models by name: each is built from the shape of one input and the number of classes.

A new model is a function and a line in ``MODELS``. Initial weights are a function of a key, never of the global
generator: build through ``seeded``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Final

import torch
from torch import nn

from ..errors import UserError, unknown

HIDDEN: Final = 64
SMALLEST: Final = 16  # the least side that leaves one pixel after two 5x5 convolutions and two poolings


def cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Two 5x5 convolutions (32, 64 channels) with pooling, then 512 hidden units; for images (C, H, W)."""
    if len(input_shape) != 3 or min(input_shape[1:]) < SMALLEST:
        raise UserError(
            f"the cnn needs inputs (channels, height, width) of at least {SMALLEST}x{SMALLEST} pixels, "
            f"not {tuple(input_shape)}; use 'mlp' or 'softmax'"
        )
    channels, height, width = input_shape
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * rows * columns, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def mlp(input_shape: Sequence[int], classes: int) -> nn.Module:
    """One hidden layer of 64 units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))


def softmax(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Multinomial logistic regression: convex under cross-entropy."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), classes))


MODELS: Final[dict[str, Callable[[Sequence[int], int], nn.Module]]] = {"cnn": cnn, "mlp": mlp, "softmax": softmax}


def build(name: str, input_shape: Sequence[int], classes: int) -> nn.Module:
    """A fresh model by name, for inputs of the given shape (without the batch dimension)."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    if classes < 1:
        raise UserError(f"the number of classes is {classes}; a classifier needs at least 1")
    return MODELS[name](input_shape, classes)


def seeded(model_fn: Callable[[], nn.Module], k: int) -> nn.Module:
    """The model that ``model_fn`` builds when its initial weights come from key ``k``; global state is restored."""
    with torch.random.fork_rng(devices=[]):
        # torch's initialisers read only the global CPU generator, so it is borrowed and given back.
        torch.default_generator.manual_seed(k & (2**63 - 1))
        model = model_fn()
    if not isinstance(model, nn.Module):
        raise UserError(f"the model function returned {type(model).__name__}; make it return a torch module")
    return model
