"""What a run, its resumption and its replay share: the engine for a configuration, and the notes for commands."""

from __future__ import annotations

from typing import Any

from ...config.build import make_server
from ...errors import UserError
from ..deploy_config import DeployConfig, read_deploy_config
from .engine import Engine
from .event_log import EventLog, LogNote
from .events import Combine, Command, DiscardUpdate, Quarantined, Replaced


def make_engine(config: DeployConfig) -> Engine:
    """Return the engine of a run before its first event."""
    settings = config.settings
    timeout = settings.training.timeout_seconds or config.deploy.job_seconds
    return Engine(make_server(settings, config.seed, timeout), settings.stop.max_rounds)


def logged_config(log: EventLog) -> DeployConfig:
    """Return the configuration with which the run of a log was started."""
    settings = log.head.get("settings")
    if not isinstance(settings, dict):
        raise UserError("the log does not contain the settings of its run; it cannot be used")
    return read_deploy_config(settings)


def notes_for(t: float, commands: list[Command]) -> list[LogNote]:
    """Return the notes that the log keeps of these commands."""
    notes = []
    for command in commands:
        if isinstance(command, Combine):
            merge = command.merge
            updates = [[u.client, u.index, u.version, u.steps, b] for u, b in merge.updates]
            fields: dict[str, Any] = {"version": merge.version, "past": [list(pair) for pair in merge.past]}
            notes.append(LogNote("merge", t, {**fields, "updates": updates, "freed": list(command.freed)}))
        elif isinstance(command, DiscardUpdate):
            notes.append(LogNote("dropped", t, {"client": command.update.client, "index": command.update.index}))
        elif isinstance(command, Replaced):
            notes.append(LogNote("redrawn", t, {"missing": list(command.missing), "drawn": list(command.drawn)}))
        elif isinstance(command, Quarantined):
            notes.append(LogNote("quarantined", t, {"client": command.client}))
    return notes
