"""The server's copy of a client's machine, driven by the client's reports.

A client that trains in the background runs its own machine. The server applies the events that the client reports to
its own copy. If an event is illegal, or the events do not lead to the update that the client delivered, the server
rejects the reply.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping

from ...algorithms.protocol import ClientAction, ClientMachine, Phase, ProtocolError, Start, Upload
from .events import ClientActed, Ended, Exchanged, Report


class _Tracker:
    """Applies the reports of one exchange to a copy of the machine."""

    def __init__(self, before: ClientMachine, open_jobs: Mapping[int, int], event: Exchanged) -> None:
        self.machine = copy.copy(before)
        self.open_jobs = dict(open_jobs)
        self.uploads: list[tuple[int, bool]] = []  # index, and whether the job must be complete
        self.commands: list[ClientActed | Ended] = []
        self._event = event

    def apply(self, report: Report, versions_sent: Collection[int]) -> None:
        """Apply one report; raise ``ProtocolError`` if the machine cannot have handled it."""
        client, was_training = self._event.client, self.machine.phase is Phase.TRAINING
        if report.kind == "ended" and was_training:
            self.commands.append(Ended(client, self.machine.jobs - 1, report.at))
        for action in _step(self.machine, versions_sent, report.kind, report.version):
            steps = 0
            if isinstance(action, Start):
                self.open_jobs[action.index] = action.version
            elif isinstance(action, Upload):
                interrupted = report.kind == "go" or (was_training and action.index == self.machine.jobs - 1)
                self.uploads.append((action.index, report.kind == "ended" or not interrupted))
                steps = self._event.update.steps if self._event.update else 0
            self.commands.append(ClientActed(client, action, report.at, steps))


def apply_reports(
    before: ClientMachine, open_jobs: Mapping[int, int], versions_sent: Collection[int], steps: int, event: Exchanged
) -> tuple[ClientMachine, dict[int, int], list[ClientActed | Ended]]:
    """Return the machine and its open jobs (index -> version) after the reports; an impossible one is a ProtocolError.

    ``versions_sent`` are the versions that the client may have, ``steps`` those of a complete job.
    """
    tracker = _Tracker(before, open_jobs, event)
    for report in event.reports:
        tracker.apply(report, versions_sent)
    _check_update(event, tracker.open_jobs, tracker.uploads, steps)
    machine = tracker.machine
    kept = {machine.send_buffer, machine.jobs - 1 if machine.phase is Phase.TRAINING else None}
    still_open = {index: version for index, version in tracker.open_jobs.items() if index in kept}
    return machine, still_open, tracker.commands


def _step(machine: ClientMachine, versions_sent: Collection[int], kind: str, version: int) -> tuple[ClientAction, ...]:
    if kind == "model":
        if version not in versions_sent or not machine.model(version):
            raise ProtocolError(f"it cannot have received version {version} now")
        return ()
    if kind == "go":
        actions = machine.go()
        if not actions:
            raise ProtocolError("it had no version to start from")
        return actions
    if kind == "ended":
        return machine.ended()
    if kind == "request":
        return machine.request()
    raise ProtocolError(f"{kind[:20]!r} is not an event of a client")


def _check_update(event: Exchanged, open_jobs: Mapping[int, int], uploads: list[tuple[int, bool]], steps: int) -> None:
    """Raise ``ProtocolError`` unless the update delivered is the one that the machine uploads."""
    update = event.update
    if update is None:
        if uploads:
            raise ProtocolError("it reports an upload, but delivered no update")
        return
    if [index for index, _ in uploads] != [update.index]:
        raise ProtocolError(f"it sent job {update.index}, but reports the upload of {[i for i, _ in uploads]}")
    if open_jobs.get(update.index) != update.version:
        raise ProtocolError(f"job {update.index} did not start from version {update.version}")
    complete = uploads[0][1]
    if not 0 <= update.steps <= steps or (complete and update.steps != steps):
        raise ProtocolError(f"job {update.index} did {update.steps} steps of {steps}")
