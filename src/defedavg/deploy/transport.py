"""The transport between the coordinator and the clients: messages, replies, and the nodes that are connected.

``grpc.stream_transport`` implements it with gRPC, and ``flower.grid_transport`` with Flower. The tests implement it in
memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

if TYPE_CHECKING:
    from torch import nn

Scalar = str | int | float | bool
Vector = NDArray[Any]

TRAINING_FIELDS = (
    "seed", "batch_size", "local_lr", "sampling", "optimizer", "momentum", "nesterov", "beta1", "beta2", "epsilon",
    "weight_decay", "prox", "clip_norm", "augment",
)  # fmt: skip
"""Fields of a ``LocalTraining`` that train and exchange messages carry; ``rate`` is that of the schedule."""

NEEDED = {"flower": ("Flower", ("flwr", "cryptography")), "grpc": ("gRPC", ("grpc", "cryptography"))}
"""By transport: its name for users, and the modules that it needs."""

EXTRAS = {"flower": "flower", "grpc": "deploy"}
"""By transport: the extra of the package, and the target of make, that install it."""

POLICY_FIELDS = ("pause_when_full", "interruptible", "allow_same_version", "restart_on_model")
"""Fields of a ``ClientPolicy`` that an exchange message carries; all clients that exchange hold their updates."""


@dataclass(frozen=True, eq=False)
class Message:
    """A ``hello``, ``train`` or ``exchange`` message to one node; jobs from a version share one ``weights`` object."""

    node: int
    kind: str
    fields: dict[str, Scalar]
    weights: Vector | None = None
    seconds: float = 60.0  # the server ignores an answer that takes longer


@dataclass(frozen=True, eq=False)
class Reply:
    """The answer to the message ``to``: fields and perhaps an update, or an error.

    ``failed``: the client itself reported a failure; any other error means that the client cannot be reached.
    """

    to: str
    fields: dict[str, Any] = field(default_factory=dict)
    update: Vector | None = None
    bytes: int = 0
    error: str | None = None
    failed: bool = False


class Transport(Protocol):
    """Sends messages and collects replies without blocking."""

    def nodes(self) -> set[int]:
        """Return the nodes that are connected."""

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Send messages; return an id for each, or an empty string if its node is not connected."""

    def pull(self, ids: Collection[str]) -> list[Reply]:
        """Return the replies to these messages that have arrived, each of them once."""


@runtime_checkable
class WaitingTransport(Transport, Protocol):
    """A transport that reports when something has happened, so that it need not be polled."""

    @property
    def nodes_changed(self) -> bool:
        """Whether a node has connected or disconnected since the last call of ``nodes``."""

    def wait(self, seconds: float) -> None:
        """Return when a reply has arrived or the nodes have changed, or after that time."""


@runtime_checkable
class RejectingTransport(Transport, Protocol):
    """A transport that can tell a node why it cannot take part; over others, only the server's log says so."""

    def reject(self, node: int, reason: str) -> None:
        """End the connection of a node, and tell it why."""


def not_installed(transport: str) -> UserError:
    """Return the error for a machine without the packages of a transport."""
    what, extra = NEEDED[transport][0], EXTRAS[transport]
    command = f"pip install 'defedavg[{extra}]'"
    return UserError(f"{what} is not installed here; run: {command}, or in a checkout of the source: make {extra}")


def check_installed(transport: str) -> None:
    """Raise ``UserError`` if the packages of a transport are not installed."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED[transport][1]):
        raise not_installed(transport)


def size_of(vector: Vector | None) -> int:
    """Return the size of a vector in bytes."""
    return 0 if vector is None else int(np.asarray(vector).nbytes)


def model_signature(module: nn.Module, statistics: Collection[str] = ()) -> str:
    """Return a hash of the names, shapes and number types of a model's values; server and clients must agree on it.

    ``statistics`` names those whose final values, instead of differences, an update contains.
    """
    parts: list[object] = [(name, tuple(value.shape), str(value.dtype)) for name, value in module.state_dict().items()]
    if statistics:
        parts.append(sorted(statistics))
    return sha256(repr(parts).encode()).hexdigest()[:16]
