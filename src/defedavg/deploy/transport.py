"""The way to the clients, as the coordinator sees it: messages out, replies in, and who is there.

Flower is one such way (``flower.FlowerPort``); the tests have one in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Scalar = str | int | float | bool
Vector = NDArray[Any]

POLICY_FIELDS = ("pause_when_full", "interruptible", "allow_same_version")
"""Fields of a ``ClientPolicy`` that an exchange message carries; all clients that exchange hold their updates."""


@dataclass(frozen=True, eq=False)
class Message:
    """To one node: ``hello``, ``train`` or ``exchange``; the same ``weights`` object for the same version."""

    node: int
    kind: str
    fields: dict[str, Scalar]
    weights: Vector | None = None
    seconds: float = 60.0  # for so long the answer is of use


@dataclass(frozen=True, eq=False)
class Reply:
    """The answer to the message ``to``: fields and perhaps an update, or an error.

    ``failed``: the client itself said that it could not; otherwise an error means that it cannot be reached.
    """

    to: str
    fields: dict[str, Any] = field(default_factory=dict)
    update: Vector | None = None
    bytes: int = 0
    error: str | None = None
    failed: bool = False


class Transport(Protocol):
    """Never waits."""

    def nodes(self) -> set[int]:
        """The nodes that are connected."""

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Send; gives an id for each, or an empty one for a node that is not there."""

    def pull(self, ids: Collection[str]) -> list[Reply]:
        """The replies to these that have come; each is given once."""


def size_of(vector: Vector | None) -> int:
    """The bytes of a vector."""
    return 0 if vector is None else int(np.asarray(vector).nbytes)
