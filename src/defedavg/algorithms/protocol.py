"""The vocabulary of the protocol, and the one client machine that serves every algorithm.

The law of this file: a machine sees events (its methods) and answers with actions (the values they return). It has no
clock, no socket, no tensor and no randomness of its own. An event that is illegal in the present phase raises
``ProtocolError`` and changes nothing, so the same machine can be driven by a virtual clock, a network, or a log.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class ProtocolError(Exception):
    """An event that the machine cannot see in its present phase."""


@dataclass(frozen=True, slots=True)
class Update:
    """What a job yields: Δ = w[version] − (w after ``steps`` local steps), of the client's job number ``index``."""

    client: int
    index: int
    version: int
    steps: int


@dataclass(frozen=True, slots=True)
class Merge:
    """One global step: w[version] = Σ a·w[v] over ``past`` + global_lr · Σ b·Δ over ``updates``.

    The rates stay outside, so that one plan serves every learning rate.
    """

    version: int
    past: tuple[tuple[int, float], ...]
    updates: tuple[tuple[Update, float], ...]

    @property
    def staleness(self) -> tuple[int, ...]:
        """For every merged update, how many merges happened since its start version was made."""
        return tuple(self.version - 1 - update.version for update, _ in self.updates)


# What a server answers.


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send the newest version to every client."""

    version: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a version to one client."""

    client: int
    version: int


@dataclass(frozen=True, slots=True)
class Request:
    """Ask one client for its update; an interruptible client stops its job for it."""

    client: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call ``timer(token)`` after so many seconds."""

    token: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EndOfInstant:
    """Call ``settled()`` once everything that happens at this very moment has been seen."""


@dataclass(frozen=True, slots=True)
class Discard:
    """This update will never be merged."""

    update: Update


@dataclass(frozen=True, slots=True)
class Resample:
    """The wait for ``missing`` clients ran out; ``drawn`` take their place (none: the round goes on with fewer)."""

    missing: tuple[int, ...]
    drawn: tuple[int, ...]


ServerAction: TypeAlias = Merge | Broadcast | Send | Request | SetTimer | EndOfInstant | Discard | Resample


# What a client answers.


@dataclass(frozen=True, slots=True)
class Start:
    """Train job number ``index`` from ``version``."""

    index: int
    version: int


@dataclass(frozen=True, slots=True)
class Upload:
    """Send the update of job ``index``; a job still running stops where it is."""

    index: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The update of job ``index`` will never be sent: a newer one took its place, or it died with its client."""

    index: int


ClientAction: TypeAlias = Start | Upload | Drop


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """How clients behave under an algorithm.

    ``hold_until_requested``: a finished update waits in the send buffer for a request (otherwise it is sent at once, and the client
    is occupied until it is through). ``pause_when_full``: no new job while the send buffer is full. ``interruptible``: a request
    stops a running job. ``allow_same_version``: a client may train again from a version it has trained from.
    """

    hold_until_requested: bool = False
    pause_when_full: bool = False
    interruptible: bool = False
    allow_same_version: bool = False


class Phase(Enum):
    """What a client is doing."""

    IDLE = "idle"
    TRAINING = "training"
    SENDING = "sending"
    GONE = "gone"


_PRESENT = frozenset({Phase.IDLE, Phase.TRAINING, Phase.SENDING})
_LEGAL = {
    "model": _PRESENT,
    "go": _PRESENT,
    "ended": frozenset({Phase.TRAINING}),
    "sent": frozenset({Phase.SENDING}),
    "request": _PRESENT,
    "died": _PRESENT,
    "returned": frozenset({Phase.GONE}),
}


class ClientMachine:
    """The client machine: a receive buffer of one version, a send buffer of one update, at most one running job."""

    __slots__ = ("id", "inbox", "jobs", "outbox", "phase", "policy", "trained", "wanted")

    def __init__(self, client: int, policy: ClientPolicy) -> None:
        self.id = client
        self.policy = policy
        self.phase = Phase.IDLE
        self.inbox: int | None = None
        self.outbox: int | None = None
        self.wanted = False
        self.trained = -1
        self.jobs = 0

    def _check(self, event: str) -> None:
        if self.phase not in _LEGAL[event]:
            raise ProtocolError(f"client {self.id} cannot see {event!r} while {self.phase.value}")

    def model(self, version: int) -> bool:
        """A version reached the receive buffer; True if it was taken, False if it is of no use."""
        self._check("model")
        if version < 0:
            raise ProtocolError(f"client {self.id} was given version {version}; versions count from 0")
        useful = version >= self.trained if self.policy.allow_same_version else version > self.trained
        if not useful or (self.inbox is not None and version < self.inbox):
            return False
        self.inbox = version
        return True

    def go(self) -> tuple[ClientAction, ...]:
        """Start a job if the client is free and its receive buffer is full."""
        self._check("go")
        if (
            self.phase is not Phase.IDLE
            or self.inbox is None
            or (self.policy.pause_when_full and self.outbox is not None)
        ):
            return ()
        self.trained, self.inbox = self.inbox, None
        index, self.jobs = self.jobs, self.jobs + 1
        start = Start(index, self.trained)
        if self.policy.interruptible and self.wanted:  # asked before it had a model: answers with a job of no steps
            self.wanted = False
            return (start, Upload(index))
        self.phase = Phase.TRAINING
        return (start,)

    def ended(self) -> tuple[ClientAction, ...]:
        """The running job did all its steps."""
        self._check("ended")
        index = self.jobs - 1
        if not self.policy.hold_until_requested:
            self.phase = Phase.SENDING
            return (Upload(index),)
        self.phase = Phase.IDLE
        replaced: tuple[ClientAction, ...] = () if self.outbox is None else (Drop(self.outbox),)
        if self.wanted:
            self.wanted, self.outbox = False, None
            return (*replaced, Upload(index))
        self.outbox = index
        return replaced

    def sent(self) -> tuple[ClientAction, ...]:
        """An upload that occupied the client is through."""
        self._check("sent")
        self.phase = Phase.IDLE
        return ()

    def request(self) -> tuple[ClientAction, ...]:
        """The server asks for the update."""
        self._check("request")
        if not self.policy.hold_until_requested:
            raise ProtocolError(f"client {self.id} sends its updates unasked and cannot be asked for one")
        if self.outbox is not None:
            index, self.outbox = self.outbox, None
            return (Upload(index),)
        if self.policy.interruptible and self.phase is Phase.TRAINING:
            self.phase = Phase.IDLE
            return (Upload(self.jobs - 1),)
        self.wanted = True
        return ()

    def died(self) -> tuple[ClientAction, ...]:
        """The client is gone, and with it its buffers and its running job."""
        self._check("died")
        lost = [] if self.outbox is None else [self.outbox]
        if self.phase in (Phase.TRAINING, Phase.SENDING):
            lost.append(self.jobs - 1)
        if lost:
            self.trained -= 1  # the work is lost with the client, so it may be done again from the same version
        self.phase = Phase.GONE
        self.inbox, self.outbox, self.wanted = None, None, False
        return tuple(Drop(index) for index in lost)

    def returned(self) -> tuple[ClientAction, ...]:
        """The client is back, with empty buffers."""
        self._check("returned")
        self.phase = Phase.IDLE
        return ()
