"""Padded texts, and models with the interface of the Hugging Face libraries: named inputs, outputs with ``logits``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from defedavg.tasks import Task, make_task

CLIENTS, SAMPLES, TOKENS, WORDS = 6, 60, 5, 9
RANDOM = np.random.Generator(np.random.Philox(key=3))
LENGTHS = RANDOM.integers(1, TOKENS + 1, SAMPLES)
MASK = (np.arange(TOKENS) < LENGTHS[:, None]).astype("int64")
IDS = RANDOM.integers(1, WORDS, (SAMPLES, TOKENS)) * MASK  # 0 is the padding
LABELS = (IDS.max(axis=1) % 3).astype("int64")
TOKEN_LABELS = np.where(MASK == 1, IDS % 2, -100)
TEXTS = {"input_ids": IDS, "attention_mask": MASK}


class NamedOutput(NamedTuple):
    """A named tuple."""

    hidden: Tensor
    logits: Tensor


@dataclass
class RecordOutput:
    """A dataclass."""

    logits: Tensor
    loss: Tensor | None = None


class ModelOutput(OrderedDict[str, Any]):
    """A mapping whose values are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def identity(logits: Tensor) -> Any:
    """Return the logits as they are."""
    return logits


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {
    "tensor": (identity, {}),
    "dict": (lambda z: {"hidden": 2 * z, "logits": z}, {}),
    "dict, named": (lambda z: {"scores": z, "logits": 2 * z}, {"logits": "scores"}),
    "dataclass": (lambda z: RecordOutput(z), {}),
    "model output": (lambda z: ModelOutput(loss=None, logits=z), {}),
    "model output, named": (lambda z: ModelOutput(scores=z), {"logits": "scores"}),
    "named tuple": (lambda z: NamedOutput(2 * z, z), {}),
    "tuple": (lambda z: (z, 2 * z), {"logits": 0}),
    "list, from the end": (lambda z: [2 * z, z], {"logits": np.int64(-1)}),
    "function": (lambda z: {"a": [z]}, {"logits": lambda out: out["a"][0]}),
}
"""What a model returns, and what ``make_task`` needs to know about it."""


class TextClassifier(nn.Module):
    """The mean of embeddings over the words that the mask allows."""

    def __init__(self, output: Callable[[Tensor], Any] = identity, classes: int = 3) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, 4), nn.Linear(4, 6)
        self.leave: nn.Module = nn.Linear(6, classes)
        self.output = output

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is None
        mask = attention_mask.unsqueeze(-1)
        mean = (self.words(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return self.output(self.leave(torch.tanh(self.inner(mean))))


class Tagger(nn.Module):
    """The classes of every word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.leave = nn.Embedding(WORDS, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> RecordOutput:
        return RecordOutput(self.leave(self.words(input_ids)) * attention_mask.unsqueeze(-1))


def text_task(model: Callable[[], nn.Module], **options: Any) -> Task:
    """Return a float64 task with padded texts for six clients."""
    data = (TEXTS, LABELS)
    parts = [np.arange(i, SAMPLES, CLIENTS) for i in range(CLIENTS)]
    given = {"train": data, "test": data, "clients": parts, "keep_dtype": True, **options}
    return make_task(model=lambda: model().double(), **given)
