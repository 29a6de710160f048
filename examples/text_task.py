"""Padded texts of named users: dict inputs, a dict as output, user ids as clients, and a metric.

The model learns which texts contain a rare word. Most do not, so F1 is the metric.

    python examples/text_task.py
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from defedavg import Task, make_task, simulate

WORDS, RARE, TOKENS = 50, 5, 8


class Classifier(nn.Module):
    """The sum of the words that the mask allows, and one hidden layer; names its logits as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LazyLinear(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head((self.words(input_ids) * attention_mask.unsqueeze(-1)).sum(1))}


def f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return F1 of class 1; a metric receives the outputs of the whole test set."""
    found = outputs.argmax(1)
    return 2 * (found * targets).sum() / (found.sum() + targets.sum())


def make(config: Mapping[str, Any], client: int | None = None) -> Task:  # noqa: ARG001 (all clients share this code)
    """Return the task; a study can name this function: `task.module = "text_task.py:make"`."""
    rng = np.random.Generator(np.random.Philox(key=int(config["seed"])))
    mask = (np.arange(TOKENS) < rng.integers(1, TOKENS + 1, (2000, 1))).astype("int64")
    ids = rng.integers(1, WORDS, (2000, TOKENS)) * mask  # 0 is the padding
    labels = (ids >= WORDS - RARE).any(axis=1)
    users = np.array(["anna", "bob", "carla", "dan", "eve", "finn"])[rng.integers(0, 6, 1600)]
    rows = slice(1600), slice(1600, 2000)
    train, test = (({"input_ids": ids[part], "attention_mask": mask[part]}, labels[part]) for part in rows)
    return make_task(model=Classifier, train=train, test=test, clients=users, metric=f1)


if __name__ == "__main__":
    options = {"training.updates_per_round": 3, "training.local_lr": 0.3, "stop.max_rounds": 30}
    for name in ("fedavg", "defedavg-niid"):
        result = simulate(name, task=make({"seed": 0}), settings=options)
        print(
            f"{name:14} {result.rounds} rounds, {result.seconds:5.1f} simulated s, best F1 {result.best_accuracy:.3f}"
        )
