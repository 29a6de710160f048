"""Models by name: each is built from the shape of one input and the number of classes.

One from outside the package is registered by an entry point of the group ``defedavg.models`` or by calling
``register_model`` in a plugin file. Initial weights are a function of a key, never of the global generator: build a
model with ``seeded``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..registry import Registry

HIDDEN: Final = 64
MIN_SIDE: Final = 16  # the smallest side that leaves one pixel after two 5x5 convolutions and two poolings
GROUPS: Final = 4  # of channels, in group normalisation
PATCH: Final = 7  # the largest patch: 4x4 patches of 28x28 pixels
WIDTH: Final = 64  # dimension of the transformers' tokens
CHARACTER: Final = 8  # dimension of a character in the LSTM, as in LEAF's Shakespeare task, and in the char-mlp
CONTEXT: Final = 5  # characters from which the char-mlp predicts the next one
UNITS: Final = 128  # of the LSTM


def cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Build two 5x5 convolutions (32, 64 channels) with pooling, then 512 hidden units; for images (C, H, W)."""
    _require_images("cnn", input_shape, MIN_SIDE)
    pixels = prod(((side - 4) // 2 - 4) // 2 for side in input_shape[1:])
    return nn.Sequential(
        *(nn.Conv2d(input_shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * pixels, 512), nn.ReLU(), nn.Linear(512, classes)),
    )


def _require_images(model: str, input_shape: Sequence[int], side: int) -> None:
    if len(input_shape) != 3 or min(input_shape[1:]) < side:
        raise UserError(
            f"the {model} needs inputs (channels, height, width) of at least {side}x{side} pixels, "
            f"not {tuple(input_shape)}; use 'mlp' or 'softmax'"
        )


def mlp(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Build one hidden layer of 64 units."""
    return nn.Sequential(*_one_hidden_layer(prod(input_shape), classes))


def _one_hidden_layer(inputs: int, classes: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)]


def pooled_mlp(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Build 2x2 average pooling and one hidden layer of 64 units; for images (C, H, W)."""
    _require_images("pooled-mlp", input_shape, 2)
    channels, height, width = input_shape
    return nn.Sequential(nn.AvgPool2d(2), *_one_hidden_layer(channels * (height // 2) * (width // 2), classes))


def softmax(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Build multinomial logistic regression, which is convex under cross-entropy."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), classes))


class Residual(nn.Module):
    """Two 3x3 convolutions with a shortcut, each followed by group normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.GroupNorm(GROUPS, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.GroupNorm(GROUPS, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map images to images."""
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Build eight layers: a 3x3 convolution, blocks of 16, 32 and 64 channels, a linear layer; for images (C, H, W)."""
    _require_images("resnet", input_shape, MIN_SIDE // 2)
    return nn.Sequential(
        *(nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, 16), nn.ReLU()),
        *(Residual(16, 16, stride=1), Residual(16, 32, stride=2), Residual(32, 64, stride=2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)),
    )


class Patches(nn.Module):
    """Images (C, H, W) to one token per patch, with a learned position embedding."""

    def __init__(self, channels: int, height: int, width: int, patch: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(channels, WIDTH, patch, patch)
        self.place = nn.Parameter(0.02 * torch.randn(1, (height // patch) * (width // patch), WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map images to tokens."""
        tokens: Tensor = self.enter(x).flatten(2).transpose(1, 2)
        return tokens + self.place


class Mean(nn.Module):
    """The mean over the tokens of a sample."""

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to one vector."""
        return x.mean(dim=1)


def transformer(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Build two blocks with four heads over patches of at most 7x7 pixels; for images (C, H, W)."""
    sides = input_shape[1:]
    patch = max((size for size in range(2, PATCH + 1) if all(side % size == 0 for side in sides)), default=0)
    if len(input_shape) != 3 or not patch:
        raise UserError(
            f"the transformer needs inputs (channels, height, width) that squares of 2 to {PATCH} pixels can tile, "
            f"not {tuple(input_shape)}; pad the images, or use 'mlp' or 'softmax'"
        )
    channels, height, width = input_shape
    patches = Patches(channels, height, width, patch)
    return nn.Sequential(patches, *_blocks(), nn.LayerNorm(WIDTH), Mean(), nn.Linear(WIDTH, classes))


def _blocks() -> list[nn.Module]:
    block = partial(nn.TransformerEncoderLayer, WIDTH, 4, 2 * WIDTH, dropout=0.0, activation="gelu")
    return [block(batch_first=True, norm_first=True) for _ in range(2)]


class CharLSTM(nn.Module):
    """Texts (samples, length) to scores of the next character at every position, (samples, length, characters)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, CHARACTER)
        self.lstm = nn.LSTM(CHARACTER, UNITS, batch_first=True)
        self.leave = nn.Linear(UNITS, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Map texts to scores."""
        scores: Tensor = self.leave(self.lstm(self.characters(x))[0])
        return scores


class CharMLP(nn.Module):
    """Texts to scores, as ``CharLSTM``; a position sees its own character and the four before it."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, CHARACTER)
        self.hidden = nn.Linear(CONTEXT * CHARACTER, HIDDEN)
        self.leave = nn.Linear(HIDDEN, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Map texts to scores; before the first character, the context is zero."""
        known, length = self.characters(x), x.shape[1]
        padded = F.pad(known, (0, 0, CONTEXT - 1, 0))
        context = torch.cat([padded[:, start : start + length] for start in range(CONTEXT)], dim=2)
        scores: Tensor = self.leave(torch.relu(self.hidden(context)))
        return scores


def char_mlp(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Build one hidden layer of 64 units over five characters, with scores at every position; for texts (length,)."""
    _require_texts("char-mlp", input_shape)
    return CharMLP(classes)


def char_lstm(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Build an LSTM of 128 units over characters, with scores at every position; for texts (length,)."""
    _require_texts("char-lstm", input_shape)
    return CharLSTM(classes)


class CharTransformer(nn.Module):
    """Texts to scores, as ``CharLSTM``; a position attends to itself and to those before it."""

    mask: Tensor

    def __init__(self, length: int, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(1, length, WIDTH))
        self.blocks = nn.ModuleList(_blocks())
        self.norm, self.leave = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)
        forbidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        self.register_buffer("mask", forbidden, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map texts to scores."""
        hidden = self.characters(x) + self.place
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask)
        scores: Tensor = self.leave(self.norm(hidden))
        return scores


def char_transformer(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Build two causal blocks with four heads over characters, with scores at every position; for texts (length,)."""
    _require_texts("char-transformer", input_shape)
    return CharTransformer(input_shape[0], classes)


def _require_texts(model: str, input_shape: Sequence[int]) -> None:
    if len(input_shape) != 1:
        raise UserError(f"{model} needs inputs (length,) of character numbers, not {tuple(input_shape)}")


ModelBuilder = Callable[[Sequence[int], int], nn.Module]
"""(shape of one input, number of classes) -> a new model."""


def _check(name: str, builder: ModelBuilder) -> None:
    if not callable(builder):
        raise UserError(f"model {name!r} is {builder!r}; register a function of (input_shape, classes)")


MODELS: Registry[ModelBuilder] = Registry("model", "defedavg.models", _check)


def register_model(name: str, builder: ModelBuilder) -> ModelBuilder:
    """Register a function that builds a model, as a value of ``task.model`` in this process."""
    return MODELS.register(name, builder)


for _builder in (cnn, mlp, pooled_mlp, softmax, resnet, transformer, char_mlp, char_lstm, char_transformer):
    register_model(_builder.__name__.replace("_", "-"), _builder)

TEXT_MODELS: Final = ("char-mlp", "char-lstm", "char-transformer")
"""Their inputs are integers (length,); their outputs have one score per class at every position."""


def build(name: str, input_shape: Sequence[int], classes: int) -> nn.Module:
    """Return a new model by name, for inputs of the given shape (without the batch dimension)."""
    builder = MODELS.find(name)
    if classes < 1:
        raise UserError(f"the number of classes is {classes}; a classifier needs at least 1")
    return builder(input_shape, classes)


def seeded(model_fn: Callable[[], nn.Module], k: int) -> nn.Module:
    """Return the model that ``model_fn`` builds with initial weights from key ``k``; restore the global generator."""
    with torch.random.fork_rng(devices=[]):
        # torch's initialisers read only the global CPU generator; fork_rng restores it.
        torch.default_generator.manual_seed(k & (2**63 - 1))
        model = model_fn()
    if not isinstance(model, nn.Module):
        raise UserError(f"the model function returned {type(model).__name__}; make it return a torch module")
    return model
