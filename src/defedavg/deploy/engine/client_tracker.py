"""What the server knows about a client: the connection, the client's clock, and a copy of its machine.

A client that trains in the background runs its own machine. The server applies the events that the client reports to
its own copy. If an event is illegal, or the events do not lead to the update that the client delivered, the server
rejects the reply.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace

from ...algorithms.protocol import ClientAction, ClientMachine, Phase, ProtocolError, Start, Upload
from .events import ClientActed, Ended, Exchanged, Report

MAX_FAULTS = 3
"""A client with this many rejected replies in total, or this many failures in a row, is quarantined."""


@dataclass(slots=True)
class ClientLink:
    """The connection to one client, as the server knows it."""

    node: str | None = None  # None: not connected
    busy: bool = False  # a message is in flight
    next_version: int | None = None  # the version to send next
    wanted: bool = False  # the server has requested the update
    versions_sent: list[int] = field(default_factory=list)  # versions that a background client may still start from
    open_jobs: dict[int, int] = field(default_factory=dict)  # jobs not yet delivered: index -> version
    epoch: int = 0
    rejections: int = 0
    failures: int = 0
    quarantined: bool = False

    def disconnect(self) -> None:
        """Forget the node and everything that was in flight."""
        self.node, self.busy, self.next_version, self.wanted = None, False, None, False
        self.versions_sent.clear()


class ClockSync:
    """Translates clients' clocks to the server's clock.

    If a reply left the client at its time ``c`` and arrived at the server's time ``t``, the clocks differ by at most
    ``t − c``. The smallest bound seen so far is the offset. A translated time is therefore never before the event, and
    never after the reply that reported it. The times of one client never decrease, even where a later bound is smaller.
    """

    def __init__(self) -> None:
        self._offset: dict[tuple[int, int], float] = {}  # by client and epoch: a new client process has another clock
        self._last: dict[int, float] = {}

    def to_server_time(
        self, key: tuple[int, int], reports: tuple[Report, ...], clock: float, t: float
    ) -> tuple[Report, ...]:
        """Translate reports of a reply that left at ``clock`` (client's time) and arrived at ``t`` (server's time)."""
        offset = self._offset[key] = min(self._offset.get(key, math.inf), t - clock)
        translated = []
        for report in reports:
            at = max(0.0, self._last.get(key[0], 0.0), min(t, report.at + offset))
            self._last[key[0]] = at
            translated.append(replace(report, at=at))
        return tuple(translated)


class Tracker:
    """Applies the reports of one exchange to a copy of a machine; an impossible one raises ``ProtocolError``.

    ``steps`` are those of a complete job. ``open_jobs`` (index -> version) are those of the machine after the reports.
    """

    def __init__(self, before: ClientMachine, link: ClientLink, steps: int, event: Exchanged) -> None:
        self.machine = copy.copy(before)
        self.open_jobs = dict(link.open_jobs)
        self.commands: list[ClientActed | Ended] = []
        self._uploads: list[tuple[int, bool]] = []  # index, and whether the job must be complete
        self._versions_sent = link.versions_sent  # versions that the client may have
        self._event = event
        for report in event.reports:
            self._apply(report)
        self._check_update(steps)
        training = self.machine.jobs - 1 if self.machine.phase is Phase.TRAINING else None
        kept = {self.machine.send_buffer, training}
        self.open_jobs = {index: version for index, version in self.open_jobs.items() if index in kept}

    def _apply(self, report: Report) -> None:
        client, was_training = self._event.client, self.machine.phase is Phase.TRAINING
        if report.kind == "ended" and was_training:
            self.commands.append(Ended(client, self.machine.jobs - 1, report.at))
        for action in self._actions(report.kind, report.version):
            steps = 0
            if isinstance(action, Start):
                self.open_jobs[action.index] = action.version
            elif isinstance(action, Upload):
                interrupted = report.kind == "go" or (was_training and action.index == self.machine.jobs - 1)
                self._uploads.append((action.index, report.kind == "ended" or not interrupted))
                steps = self._event.update.steps if self._event.update else 0
            self.commands.append(ClientActed(client, action, report.at, steps))

    def _actions(self, kind: str, version: int) -> tuple[ClientAction, ...]:
        if kind == "model":
            if version not in self._versions_sent or not self.machine.model(version):
                raise ProtocolError(f"it cannot have received version {version} now")
            return ()
        handlers = {"go": self.machine.go, "ended": self.machine.ended, "request": self.machine.request}
        if kind not in handlers:
            raise ProtocolError(f"{kind[:20]!r} is not an event of a client")
        actions = handlers[kind]()
        if kind == "go" and not actions:
            raise ProtocolError("it had no version to start from")
        return actions

    def _check_update(self, steps: int) -> None:
        """Raise ``ProtocolError`` unless the update delivered is the one that the machine uploads."""
        update = self._event.update
        if update is None:
            if self._uploads:
                raise ProtocolError("it reports an upload, but delivered no update")
            return
        uploaded = [index for index, _ in self._uploads]
        if uploaded != [update.index]:
            raise ProtocolError(f"it sent job {update.index}, but reports the upload of {uploaded}")
        if self.open_jobs.get(update.index) != update.version:
            raise ProtocolError(f"job {update.index} did not start from version {update.version}")
        complete = self._uploads[0][1]
        if not 0 <= update.steps <= steps or (complete and update.steps != steps):
            raise ProtocolError(f"job {update.index} did {update.steps} steps of {steps}")
