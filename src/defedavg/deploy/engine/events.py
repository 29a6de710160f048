"""The events that an engine handles, and the commands that it returns.

The engine is deterministic: everything it does is a function of the events it has handled. A log of events is therefore
enough to resume a run, to replay it as a plan, and to check it. The fields of an event are its fields in the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...algorithms.protocol import ClientAction, Discard
from ...planning.records import Round, Sent, Timeout


@dataclass(frozen=True, slots=True)
class Joined:
    """A node answered for a client: the client is connected."""

    t: float
    client: int
    node: str


@dataclass(frozen=True, slots=True)
class Began:
    """Enough clients are connected: the server sends version 0. The other clients count as disconnected."""

    t: float


@dataclass(frozen=True, slots=True)
class ClientTrouble:
    """A client did not do its work; ``why`` is one line for readers of the log."""

    t: float
    client: int
    why: str


class Left(ClientTrouble):
    """A client cannot be reached any more; its running job is lost."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The update of a job arrived and passed all checks; ``seconds`` is the training time that the client states."""

    t: float
    client: int
    index: int
    version: int
    steps: int
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """An event that a client's own machine handled: model, go, ended or request; ``at`` is on the server's clock."""

    kind: str
    version: int
    at: float


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """The update that an exchange delivered."""

    index: int
    version: int
    steps: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A client that trains in the background reported its machine's events, and perhaps delivered an update."""

    t: float
    client: int
    reports: tuple[Report, ...]
    update: UpdateInfo | None
    seconds: float
    bytes: int


class Refused(ClientTrouble):
    """A reply of a client did not pass the checks and was discarded."""


class Failed(ClientTrouble):
    """A client reported that its job failed."""


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """A timer of the server machine expired."""

    t: float
    token: int


@dataclass(frozen=True, slots=True)
class InstantEnded:
    """All events of this instant have been handled."""

    t: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """The server restarted after a crash: no client is connected, and all messages in flight are lost."""

    t: float


Event: TypeAlias = (
    Joined | Began | Left | Trained | Exchanged | Refused | Failed | TimerExpired | InstantEnded | Resumed
)


# Commands, beside the records of a plan and ``Discard``: a ``Round`` tells the server to merge.
# The session and the coordinator carry out the first two; the others are for the log and the replay.


@dataclass(frozen=True, slots=True)
class Train:
    """Send a client a version and the job to train from it."""

    client: int
    index: int
    version: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send a background client a newer version, request its update, or both.

    ``epoch`` counts how often the client has joined: a background client that knows another epoch discards its state.
    Its machine then starts with ``jobs`` and ``trained``.
    """

    client: int
    version: int | None
    wanted: bool
    epoch: int
    jobs: int
    trained: int


@dataclass(frozen=True, slots=True)
class ClientActed:
    """A client's machine returned an action; ``steps`` are those of an upload."""

    client: int
    action: ClientAction
    at: float
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """The job of a background client completed all its steps."""

    client: int
    index: int
    at: float


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A client's machine lost its state; ``back`` is True when the client is reachable again."""

    client: int
    back: bool


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A client was at fault too often; it receives no more work."""

    client: int


Command: TypeAlias = (
    Train | Exchange | Round | Discard | Sent | Timeout | ClientActed | Ended | Disconnected | Quarantined
)
