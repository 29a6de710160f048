"""What a deployment is doing, from the lines of its event log.

The progress display, the live view, the page and ``/metrics`` show it. The log may be written at this moment, and may
come from elsewhere: a line that cannot be read is ignored.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config.settings import MAX_COUNT
from ..durations import duration
from ..fileio import open_regular
from ..jsonio import is_whole
from .forecast import seconds_to_rounds, seconds_to_target
from .layout import RunFiles
from .metrics import metric_of, number, text_of

RECENT_UPDATES = 50  # that the rate of updates counts
MAX_REASONS = 20  # kept of the newest refused replies
MAX_DISTINCT = 200  # reasons that are counted separately
MAX_CLIENTS = 100_000  # a log that names more is not a deployment's


class LogTail:
    """Reads the log of a run while the server writes it."""

    def __init__(self, folder: Path, *, from_end: bool = False) -> None:
        self._path = RunFiles(folder).event_log
        self._position = self._path.stat().st_size if from_end and self._path.exists() else 0

    def lines(self) -> list[dict[str, Any]]:
        """Return the complete lines added since the last call, without those that are not JSON objects."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        found: list[dict[str, Any]] = []
        for row in complete.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(row))
        return [line for line in found if isinstance(line, dict)]


@dataclass(slots=True)
class ClientStatus:
    """What one client does."""

    client: int
    state: str = "away"  # or idle, working, quarantined
    since: float = 0.0  # seconds of the run
    version: int | None = None  # that it works from
    updates: int = 0
    refused: int = 0


@dataclass(slots=True)
class Goals:
    """When the run stops; None: that does not end it."""

    max_rounds: int | None = None
    max_seconds: float | None = None
    target: float | None = None


@dataclass
class DeploymentStatus:
    """The state of a deployment after the lines that were added."""

    clients: dict[int, ClientStatus] = field(default_factory=dict)
    goals: Goals = field(default_factory=Goals)
    seconds: float = 0.0
    round: int = 0
    updates: int = 0
    failed: int = 0
    resumed: int = 0
    ended: str = ""  # the status with which the run ended, or stalled
    metric: str = "accuracy"
    staleness: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    newest_refused: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_REASONS))
    excluded: dict[str, str] = field(default_factory=dict)  # who cannot take part, and why
    evaluations: list[tuple[int, float, float | None, float | None]] = field(default_factory=list)
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_UPDATES))

    def add(self, line: Mapping[str, Any]) -> None:
        """Take account of a line of the log."""
        if "settings" in line:
            self._head(line["settings"])
            return
        self.seconds = max(self.seconds, number(line.get("t")) or 0.0)
        name = text_of(line.get("event") or line.get("note")).replace(" ", "_")
        if name in HANDLED:
            with contextlib.suppress(TypeError, ValueError, KeyError, IndexError):
                getattr(self, f"_{name}")(line)

    def _head(self, settings: Any) -> None:
        if not isinstance(settings, dict):
            return
        total, rounds = settings.get("clients.num_clients"), settings.get("stop.max_rounds")
        if isinstance(total, int) and 0 < total <= MAX_CLIENTS:
            self.clients = {client: ClientStatus(client) for client in range(total)}
        limit, target = number(settings.get("stop.max_seconds")), number(settings.get("stop.target_accuracy"))
        if not is_whole(rounds) or rounds == MAX_COUNT:  # an advised study has the largest number, which is no limit
            rounds = None
        self.goals = Goals(rounds, limit or None, target or None)

    def _client(self, line: Mapping[str, Any], state: str | None = None) -> ClientStatus:
        found = self.clients[line["client"]]
        if state is not None and found.state != "quarantined":
            found.state, found.since = state, self.seconds
            found.version = None
        return found

    def _joined(self, line: Mapping[str, Any]) -> None:
        self._client(line, "idle")
        self.excluded.pop(f"client {line['client']}", None)

    def _left(self, line: Mapping[str, Any]) -> None:
        self._client(line, "away")

    def _sent(self, line: Mapping[str, Any]) -> None:
        version = line.get("version")
        self._client(line, "working").version = version if isinstance(version, int) and version >= 0 else None

    def _trained(self, line: Mapping[str, Any]) -> None:
        self._client(line, "idle").updates += 1
        self.updates += 1
        self._times.append(self.seconds)

    def _exchanged(self, line: Mapping[str, Any]) -> None:
        if line.get("update"):
            self._trained(line)
        else:
            self._client(line, "idle")

    def _refused(self, line: Mapping[str, Any]) -> None:
        why = text_of(line.get("why"))[:200]
        self._client(line, "idle").refused += 1
        self.reasons[why if why in self.reasons or len(self.reasons) < MAX_DISTINCT else "other reasons"] += 1
        self.newest_refused.append({"t": self.seconds, "client": line["client"], "why": why})

    def _failed(self, line: Mapping[str, Any]) -> None:
        self._client(line, "idle")
        self.failed += 1

    def _quarantined(self, line: Mapping[str, Any]) -> None:
        self._client(line, "quarantined")

    def _resumed(self, _: Mapping[str, Any]) -> None:
        self.resumed, self.ended = self.resumed + 1, ""
        for found in self.clients.values():
            if found.state != "quarantined":
                found.state, found.since, found.version = "away", self.seconds, None
        self._times.clear()

    def _merge(self, line: Mapping[str, Any]) -> None:
        version = line["version"]
        self.staleness.update(version - 1 - update[2] for update in line["updates"])
        self.round = version

    def _measured(self, line: Mapping[str, Any]) -> None:
        seconds = number(line.get("seconds"))
        if seconds is not None and is_whole(line.get("round")):
            values = number(line.get("accuracy")), number(line.get("loss"))
            self.evaluations.append((line["round"], seconds, *values))
            self.metric = metric_of(line)

    def _stalled(self, _: Mapping[str, Any]) -> None:
        self.ended = "stalled"

    def _done(self, line: Mapping[str, Any]) -> None:
        self.ended = text_of(line.get("status")) or "done"

    def _turned_away(self, line: Mapping[str, Any]) -> None:
        self.excluded[text_of(line.get("who")) or f"node {text_of(line.get('node'))}"] = text_of(line.get("why"))[:300]

    @property
    def connected(self) -> int:
        """How many clients are connected."""
        return sum(found.state in ("idle", "working") for found in self.clients.values())

    @property
    def updates_per_second(self) -> float | None:
        """The rate of the newest updates, or None before the second one."""
        spent = self._times[-1] - self._times[0] if len(self._times) > 1 else 0.0
        return (len(self._times) - 1) / spent if spent > 0 else None

    @property
    def staleness_mean(self) -> float | None:
        """The mean staleness of all merged updates, or None before the first merge."""
        total = self.staleness.total()
        return sum(value * count for value, count in self.staleness.items()) / total if total else None

    @property
    def refused(self) -> int:
        """How many replies were refused."""
        return self.reasons.total()

    def seconds_left(self) -> tuple[float, str] | None:
        """Return a forecast of when the run ends, and by which goal; None: not known yet."""
        goals, found = self.goals, list[tuple[float | None, str]]()
        seconds, rounds = [e[1] for e in self.evaluations], [float(e[0]) for e in self.evaluations]
        if goals.max_rounds is not None:
            found.append((seconds_to_rounds(seconds, rounds, goals.max_rounds), "max_rounds"))
        if self.ended or not self.evaluations or (found and found[0][0] is None):
            return None
        if goals.max_seconds is not None:
            found.append((max(0.0, goals.max_seconds - self.seconds), "max_seconds"))
        if goals.target is not None:
            found.append((seconds_to_target(seconds, [e[2] for e in self.evaluations], goals.target), "target"))
        known = [(left, goal) for left, goal in found if left is not None]
        return min(known, default=None)

    def goal_text(self) -> str:
        """Return where the run goes and how long that takes: ``of 100 rounds, about 3 min left``."""
        goals = self.goals
        words = [f"target {goals.target:g}"] if goals.target is not None else []
        words += [f"at most {goals.max_rounds} rounds"] if goals.max_rounds is not None else []
        forecast = self.seconds_left()
        if forecast is not None:
            words.append(f"about {duration(float(f'{forecast[0]:.2g}'))} left ({forecast[1]})")
        return ", ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        forecast = self.seconds_left()
        return {
            **{name: getattr(self, name) for name in ("seconds", "round", "updates", "failed", "refused", "resumed")},
            **{name: getattr(self, name) for name in ("ended", "connected", "updates_per_second", "staleness_mean")},
            "clients": [asdict(found) for found in self.clients.values()],
            "goals": asdict(self.goals),
            "seconds_left": None if forecast is None else forecast[0],
            "left_until": None if forecast is None else forecast[1],
            "reasons": dict(self.reasons.most_common(MAX_REASONS)),
            "newest_refused": list(self.newest_refused),
            "excluded": dict(self.excluded),
        }


HANDLED = {
    *("joined", "left", "sent", "trained", "exchanged", "refused", "failed", "quarantined", "resumed", "merge"),
    *("measured", "stalled", "done", "turned_away"),
}


class DeploymentMonitor:
    """The status of a deployment whose log grows."""

    def __init__(self, folder: Path) -> None:
        self._tail = LogTail(folder)
        self.status = DeploymentStatus()

    def refresh(self) -> DeploymentStatus:
        """Take account of the lines added since the last call."""
        for line in self._tail.lines():
            self.status.add(line)
        return self.status
