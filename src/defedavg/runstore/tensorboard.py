"""Evaluations for TensorBoard, logged when they are made.

One log per run. Steps are rounds; the time of an event is the simulated time, so the axis "Relative" of TensorBoard
shows simulated seconds. tensorboardX writes the logs; it needs neither TensorFlow nor the TensorBoard server.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import UserError
from ..fileio import file_name, writing
from .layout import RunFiles

TAGS = {
    "test/loss": "loss",
    "train/loss": "train_loss",
    "run/staleness": "staleness",
    "run/updates": "updates",
    "run/simulated_seconds": "seconds",
    "run/wall_seconds": "wall_seconds",
}


class Evaluated(Protocol):
    """An evaluation, as far as the logs need it."""

    @property
    def round(self) -> int:
        """The round."""

    @property
    def seconds(self) -> float:
        """The simulated time."""


def summary_writer() -> Any:
    """Return the class that writes logs; raise ``UserError`` if tensorboardX is missing."""
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        raise UserError("--tensorboard needs tensorboardX: pip install 'defedavg[tensorboard]'") from None
    return SummaryWriter


class TensorBoardLogs:
    """The logs of the runs in a folder."""

    def __init__(self, files: RunFiles) -> None:
        self._make = summary_writer()
        self._folder = files.tensorboard
        self._logs: dict[str, Any] = {}

    def add(self, label: str, seed: int, evaluation: Evaluated, metric: str = "accuracy") -> None:
        """Log an evaluation of a run."""
        name = file_name(label, seed)
        with writing(self._folder):
            if name not in self._logs:
                self._logs[name] = self._make(str(self._folder / name), flush_secs=5)
            for tag, attribute in {f"test/{metric}": "accuracy", **TAGS}.items():
                value = getattr(evaluation, attribute)
                if value is not None:
                    self._logs[name].add_scalar(tag, value, evaluation.round, walltime=evaluation.seconds)

    def close(self) -> None:
        """Close all logs."""
        with writing(self._folder):
            for log in self._logs.values():
                log.close()
