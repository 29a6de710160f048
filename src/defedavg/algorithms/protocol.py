"""Events and actions of the protocol, and the client machine that all algorithms share.

A machine receives events (its methods are called) and returns actions. It has no clock, no socket, no tensor and no
randomness of its own. An event that is illegal in the present phase raises ``ProtocolError`` and changes nothing, so a
virtual clock, a network or a log can drive the same machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

VERSION = "version"
"""In the start of jobs: the version that the client received."""
FROM_VERSION = ((VERSION, 1.0),)
WEIGHTINGS = ("uniform", "samples")
UPLOADS = ("auto", "background", "blocking")
"""How unrequested uploads affect clients: auto is the meaning of the algorithm, see ``ClientPolicy``."""
SERVER_OPTIMIZERS = {"sgd": 0, "momentum": 1, "nesterov": 1, "adagrad": 2, "adam": 2, "amsgrad": 3, "yogi": 2}
"""The names of the server optimisers, with the number of vectors that each keeps."""


class ProtocolError(Exception):
    """An event that is illegal in the present phase of a machine."""


@dataclass(frozen=True, slots=True)
class Update:
    """The result of a client's job number ``index``: Δ = w[version] − (w after ``steps`` local steps)."""

    client: int
    index: int
    version: int
    steps: int


@dataclass(frozen=True, slots=True)
class StateVector:
    """A vector that the server keeps from merge to merge, such as a sum, or the last update of client ``index``."""

    name: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What an algorithm declares of its state vectors of one name: indices 0 to ``count`` − 1, and their initial value.

    ``per_client``: the index is the number of a client. ``initial`` is "zero" or "model", which is version 0.
    """

    name: str
    count: int = 1
    initial: str = "zero"
    per_client: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """``target`` becomes Σ a·w[v] + Σ b·Δ + Σ c·s, without learning rates, and then its ``transform`` is applied.

    The transform is empty, or one that executors know, such as ``quantise(8)``. Without terms the target becomes zero,
    and takes no memory.
    """

    target: StateVector
    past: tuple[tuple[int, float], ...] = ()
    updates: tuple[tuple[Update, float], ...] = ()
    states: tuple[tuple[StateVector, float], ...] = ()
    transform: str = ""


@dataclass(frozen=True, slots=True)
class Merge:
    """One global step: w[version] = Σ a·w[v] over ``past`` + global_lr · rate_scale · (Σ b·Δ + Σ c·s).

    b·Δ is summed over ``updates`` and c·s over ``states``. Assignments to state vectors are carried out in order,
    ``before`` and ``after`` this step; they use the updates that the merge names, an update with b = 0 in assignments
    alone. Learning rates are not part of a merge, so one plan serves every rate.
    """

    version: int
    past: tuple[tuple[int, float], ...]
    updates: tuple[tuple[Update, float], ...]
    states: tuple[tuple[StateVector, float], ...] = ()
    before: tuple[Assignment, ...] = ()
    after: tuple[Assignment, ...] = ()
    rate_scale: float = 1.0

    @property
    def assignments(self) -> tuple[Assignment, ...]:
        """All assignments, in order."""
        return (*self.before, *self.after)

    @property
    def assigned(self) -> frozenset[Update]:
        """The updates that assignments use."""
        return frozenset(update for assignment in self.assignments for update, _ in assignment.updates)

    @property
    def staleness(self) -> tuple[int, ...]:
        """For every merged update, the number of merges since its start version."""
        return tuple(self.version - 1 - update.version for update, _ in self.updates)


# Actions of a server.


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
    """Request the update of one client; an interruptible client stops its job for it."""

    client: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call ``timer(token)`` after ``seconds``."""

    token: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EndOfInstant:
    """Call ``end_of_instant()`` after all other events of the present instant."""


@dataclass(frozen=True, slots=True)
class Discard:
    """An update that will never be merged."""

    update: Update


@dataclass(frozen=True, slots=True)
class Resample:
    """``missing`` clients timed out; ``drawn`` replace them (none: the round continues with fewer)."""

    missing: tuple[int, ...]
    drawn: tuple[int, ...]


ServerAction: TypeAlias = Merge | Broadcast | Send | Request | SetTimer | EndOfInstant | Discard | Resample


# Actions of a client.


@dataclass(frozen=True, slots=True)
class Start:
    """Train job number ``index`` from ``version``."""

    index: int
    version: int


@dataclass(frozen=True, slots=True)
class Upload:
    """Send the update of job ``index``; if the job is running, it stops."""

    index: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The update of job ``index`` is lost: a newer one replaced it, or its client failed."""

    index: int


ClientAction: TypeAlias = Start | Upload | Drop


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """How clients behave under an algorithm.

    ``hold_until_requested``: a finished update stays in the send buffer until the server requests it; otherwise it is
    sent at once, and the client is occupied until the upload ends. ``background_upload``: an update that is sent at
    once does not occupy the client, which may start its next job; several of its uploads may be in flight, and they
    arrive even if the client fails. ``pause_when_full``: no new job while the send buffer is full. ``interruptible``: a
    request stops a running job. ``allow_same_version``: a client may train again from a version it has already trained
    from. ``restart_on_model``: a newer version that arrives stops the running job, which is lost, and the client trains
    from that version.
    """

    hold_until_requested: bool = False
    pause_when_full: bool = False
    interruptible: bool = False
    allow_same_version: bool = False
    restart_on_model: bool = False
    background_upload: bool = False


class Phase(Enum):
    """What a client does at present."""

    IDLE = "idle"
    TRAINING = "training"
    SENDING = "sending"
    GONE = "gone"


_PRESENT = (Phase.IDLE, Phase.TRAINING, Phase.SENDING)
_LEGAL = {"ended": (Phase.TRAINING,), "sent": (Phase.SENDING,), "returned": (Phase.GONE,)}
"""Event -> the phases in which it may occur; any other event occurs while the client is present."""


class ClientMachine:
    """The client machine: a receive buffer of one version, a send buffer of one update, at most one running job."""

    __slots__ = ("id", "jobs", "phase", "policy", "receive_buffer", "send_buffer", "trained", "wanted")

    def __init__(self, client: int, policy: ClientPolicy) -> None:
        self.id = client
        self.policy = policy
        self.phase = Phase.IDLE
        self.receive_buffer: int | None = None
        self.send_buffer: int | None = None
        self.wanted = False
        self.trained = -1
        self.jobs = 0

    def _check(self, event: str) -> None:
        if self.phase not in _LEGAL.get(event, _PRESENT):
            raise ProtocolError(f"client {self.id} cannot handle {event!r} while {self.phase.value}")

    @property
    def restarts(self) -> bool:
        """Whether a version in the receive buffer is about to stop the running job."""
        return self.policy.restart_on_model and self.phase is Phase.TRAINING and self.receive_buffer is not None

    def model(self, version: int) -> bool:
        """Offer a version that arrived; return whether it entered the receive buffer."""
        self._check("model")
        if version < 0:
            raise ProtocolError(f"client {self.id} received version {version}; versions count from 0")
        useful = version >= self.trained if self.policy.allow_same_version else version > self.trained
        if not useful or (self.receive_buffer is not None and version < self.receive_buffer):
            return False
        self.receive_buffer = version
        return True

    def go(self) -> tuple[ClientAction, ...]:
        """Start a job if the client is idle and its receive buffer is full."""
        self._check("go")
        if (
            (self.phase is not Phase.IDLE and not self.restarts)
            or self.receive_buffer is None
            or (self.policy.pause_when_full and self.send_buffer is not None)
        ):
            return ()
        lost: tuple[ClientAction, ...] = (Drop(self.jobs - 1),) if self.restarts else ()
        self.trained, self.receive_buffer = self.receive_buffer, None
        index, self.jobs = self.jobs, self.jobs + 1
        start = Start(index, self.trained)
        if self.policy.interruptible and self.wanted:  # requested before it had a model: uploads a job without steps
            self.wanted = False
            return (start, Upload(index))
        self.phase = Phase.TRAINING
        return (*lost, start)

    def ended(self) -> tuple[ClientAction, ...]:
        """End the running job: it completed all its steps."""
        self._check("ended")
        index = self.jobs - 1
        if not self.policy.hold_until_requested:
            self.phase = Phase.IDLE if self.policy.background_upload else Phase.SENDING
            return (Upload(index),)
        self.phase = Phase.IDLE
        replaced: tuple[ClientAction, ...] = () if self.send_buffer is None else (Drop(self.send_buffer),)
        if self.wanted:
            self.wanted, self.send_buffer = False, None
            return (*replaced, Upload(index))
        self.send_buffer = index
        return replaced

    def sent(self) -> tuple[ClientAction, ...]:
        """End an upload that occupied the client."""
        self._check("sent")
        self.phase = Phase.IDLE
        return ()

    def request(self) -> tuple[ClientAction, ...]:
        """Handle a request for the update."""
        self._check("request")
        if not self.policy.hold_until_requested:
            raise ProtocolError(f"client {self.id} sends its updates unrequested and cannot receive a request")
        if self.send_buffer is not None:
            index, self.send_buffer = self.send_buffer, None
            return (Upload(index),)
        if self.policy.interruptible and self.phase is Phase.TRAINING:
            self.phase = Phase.IDLE
            return (Upload(self.jobs - 1),)
        self.wanted = True
        return ()

    def died(self) -> tuple[ClientAction, ...]:
        """Lose the buffers and the running job: the client failed."""
        self._check("died")
        lost = [] if self.send_buffer is None else [self.send_buffer]
        if self.phase in (Phase.TRAINING, Phase.SENDING):
            lost.append(self.jobs - 1)
        if lost:
            self.trained -= 1  # the work is lost, so the client may repeat it from the same version
        self.phase = Phase.GONE
        self.receive_buffer, self.send_buffer, self.wanted = None, None, False
        return tuple(Drop(index) for index in lost)

    def returned(self) -> tuple[ClientAction, ...]:
        """Make the client reachable again, with empty buffers."""
        self._check("returned")
        self.phase = Phase.IDLE
        return ()
