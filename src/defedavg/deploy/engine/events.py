"""What an engine sees, and what it orders; events are what the log holds, so each has a form in JSON.

The law: everything an engine does is a function of the events it has seen. So a log of events is enough to resume a
run, to replay it as a plan, and to check it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...algorithms.protocol import ClientAction, Merge, Update

# Events.


@dataclass(frozen=True, slots=True)
class Joined:
    """A node answered for a client: it is here."""

    t: float
    client: int
    node: str


@dataclass(frozen=True, slots=True)
class Began:
    """Enough clients are here: version 0 goes out. Those that are not count as gone."""

    t: float


@dataclass(frozen=True, slots=True)
class Left:
    """A client cannot be reached any more; what it was doing is lost."""

    t: float
    client: int
    why: str


@dataclass(frozen=True, slots=True)
class Trained:
    """The update of a job was received and found good; ``seconds`` is what the client says the training took."""

    t: float
    client: int
    index: int
    version: int
    steps: int
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """An event that a client's own machine saw: model, go, ended or request; ``at`` is on the server's clock."""

    kind: str
    version: int
    at: float


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """The update that came with an exchange."""

    index: int
    version: int
    steps: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A client that trains in the background told what its machine saw, and perhaps handed over an update."""

    t: float
    client: int
    reports: tuple[Report, ...]
    update: UpdateInfo | None
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """What a client sent was found bad and thrown away."""

    t: float
    client: int
    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A client said that it could not do its job."""

    t: float
    client: int
    why: str


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """A timer of the server machine is due."""

    t: float
    token: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Everything of this moment was seen."""

    t: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """The server is back after a crash: no client is connected, and whatever was on its way is lost."""

    t: float


Event: TypeAlias = Joined | Began | Left | Trained | Exchanged | Refused | Failed | TimerExpired | Settled | Resumed


# Orders: what is to be done, in this order.


@dataclass(frozen=True, slots=True)
class Train:
    """Send a client a version to train a job from."""

    client: int
    index: int
    version: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send a background client a newer version, ask it for its update, or both.

    ``epoch`` counts how often the client has joined: a trainer that knows another one forgets all it has. ``jobs`` and
    ``trained`` are where its machine then begins.
    """

    client: int
    version: int | None
    wanted: bool
    epoch: int
    jobs: int
    trained: int


@dataclass(frozen=True, slots=True)
class Combine:
    """Compute a version; ``freed`` is needed no more once it is there."""

    merge: Merge
    freed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiscardUpdate:
    """This update will never be merged."""

    update: Update


# Orders that only want to be written down.


@dataclass(frozen=True, slots=True)
class ModelSent:
    """A version is there for one client, or (None) for all."""

    version: int
    client: int | None


@dataclass(frozen=True, slots=True)
class Replaced:
    """A wait ran out."""

    missing: tuple[int, ...]
    drawn: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClientActed:
    """What a client's machine answered, and when; ``steps`` of an upload."""

    client: int
    action: ClientAction
    at: float
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A background client's job did all its steps."""

    client: int
    index: int
    at: float


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A client's machine lost all it had; ``back`` is True when it is there again."""

    client: int
    back: bool


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A client gave too much that was bad; it is given nothing more."""

    client: int


Order: TypeAlias = (
    Train | Exchange | Combine | DiscardUpdate | ModelSent | Replaced | ClientActed | Ended | Disconnected | Quarantined
)
