"""What the engine knows about the connection to a client, and the timers that wait for clients."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...algorithms.protocol import ClientPolicy

MAX_FAULTS = 3
"""A client with this many rejected replies in total, or this many failures in a row, is quarantined."""

MIN_WAIT_SECONDS = 1.0
"""A timer runs at least this long, even if no client can answer: a client that disconnected may return."""


def trains_in_background(policy: ClientPolicy) -> bool:
    """Return whether clients train between messages: a request can interrupt a job, or a new update replaces an old."""
    return policy.hold_until_requested and (policy.interruptible or not policy.pause_when_full)


@dataclass(slots=True)
class ClientLink:
    """The connection to one client, as the server knows it."""

    node: str | None = None  # None: not connected
    busy: bool = False  # a message is in flight
    next_version: int | None = None  # the version to send next
    wanted: bool = False  # the server has requested the update
    versions_sent: list[int] = field(default_factory=list)  # versions that a background client may still start from
    epoch: int = 0
    rejections: int = 0
    failures: int = 0
    quarantined: bool = False

    def disconnect(self) -> None:
        """Forget the node and everything that was in flight."""
        self.node, self.busy, self.next_version, self.wanted = None, False, None, False
        self.versions_sent.clear()


@dataclass(frozen=True, slots=True)
class PendingTimer:
    """A timer: when it was set, when it expires, and the clients whose answers it waits for (None: any client's)."""

    since: float
    expires: float
    waits_for: frozenset[int] | None

    def has_expired(self, now: float, in_vain: bool) -> bool:
        """Return whether the time is over, or no client can answer and the minimum wait is over."""
        return (in_vain and now >= self.since + MIN_WAIT_SECONDS) or now >= self.expires
