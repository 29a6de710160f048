"""Following a client's machine from what the client reports of it.

A client that trains in the background runs its own machine. What it says that the machine saw is fed to a copy of the
machine that the server keeps; where that is illegal, or does not lead to the update that came with it, the client is
not believed.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping

from ...algorithms.protocol import ClientAction, ClientMachine, Phase, ProtocolError, Start, Upload
from .events import ClientActed, Ended, Exchanged


def follow(
    before: ClientMachine, started: Mapping[int, int], handed: Collection[int], steps: int, event: Exchanged
) -> tuple[ClientMachine, dict[int, int], list[ClientActed | Ended]]:
    """The machine and its open jobs (index -> version) after what was reported; ``ProtocolError`` if it cannot be.

    ``handed`` are the versions that the client may have, ``steps`` those of a whole job.
    """
    machine, starts = copy.copy(before), dict(started)
    did: list[ClientActed | Ended] = []
    uploads: list[tuple[int, bool]] = []  # index, and whether it must be a whole job
    for report in event.reports:
        running = machine.phase is Phase.TRAINING
        if report.kind == "ended" and running:
            did.append(Ended(event.client, machine.jobs - 1, report.at))
        for action in _step(machine, handed, report.kind, report.version):
            if isinstance(action, Start):
                starts[action.index] = action.version
            elif isinstance(action, Upload):
                interrupted = report.kind == "go" or (running and action.index == machine.jobs - 1)
                uploads.append((action.index, report.kind == "ended" or not interrupted))
            done = event.update.steps if event.update and isinstance(action, Upload) else 0
            did.append(ClientActed(event.client, action, report.at, done))
    _compare(event, starts, uploads, steps)
    kept = {machine.send_buffer, machine.jobs - 1 if machine.phase is Phase.TRAINING else None}
    return machine, {index: version for index, version in starts.items() if index in kept}, did


def _step(machine: ClientMachine, handed: Collection[int], kind: str, version: int) -> tuple[ClientAction, ...]:
    if kind == "model":
        if version not in handed or not machine.model(version):
            raise ProtocolError(f"version {version} is of no use to it")
        return ()
    if kind == "go":
        actions = machine.go()
        if not actions:
            raise ProtocolError("it had nothing to start from")
        return actions
    if kind == "ended":
        return machine.ended()
    if kind == "request":
        return machine.request()
    raise ProtocolError(f"{kind[:20]!r} is no event of a client")


def _compare(event: Exchanged, starts: Mapping[int, int], uploads: list[tuple[int, bool]], steps: int) -> None:
    """What was handed over must be what the machine uploads."""
    update = event.update
    if update is None:
        if uploads:
            raise ProtocolError("it says that it sent an update, but there is none")
        return
    if [index for index, _ in uploads] != [update.index]:
        raise ProtocolError(f"it sent job {update.index}, but reports the upload of {[i for i, _ in uploads]}")
    if starts.get(update.index) != update.version:
        raise ProtocolError(f"job {update.index} did not start from version {update.version}")
    whole = uploads[0][1]
    if not 0 <= update.steps <= steps or (whole and update.steps != steps):
        raise ProtocolError(f"job {update.index} did {update.steps} steps of {steps}")
