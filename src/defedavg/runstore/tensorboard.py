"""Measurements for TensorBoard, as they are made.

One log per run, beside its other results. Steps are rounds; the time of an event is the simulated time, so that the
axis "Relative" of TensorBoard shows simulated seconds. Written by tensorboardX, which needs neither TensorFlow nor the
TensorBoard server: those who look at the logs have it, those who make them need not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..experiments.sweep import Event, RunEvaluated, RunSpec, Watch
from ..fileio import file_name, writing

FOLDER = "tensorboard"
TAGS = {
    "test/accuracy": "accuracy",
    "test/loss": "loss",
    "train/loss": "train_loss",
    "run/staleness": "staleness",
    "run/updates": "updates",
    "run/simulated_seconds": "seconds",
    "run/wall_seconds": "wall_seconds",
}


def check() -> None:
    """Refuse, before anything is computed, where the writer is missing."""
    _writer()


def _writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        raise UserError("--tensorboard needs tensorboardX: pip install 'defedavg[tensorboard]'") from None
    return SummaryWriter


@contextmanager
def logging(folder: Path, watch: Watch, wanted: bool) -> Iterator[Watch]:
    """Tell the logs below a run's folder, and then ``watch``, of everything; without ``wanted``, only ``watch``."""
    if not wanted:
        yield watch
        return
    make, open_logs = _writer(), dict[RunSpec, Any]()

    def take(event: Event) -> None:
        with writing(folder / FOLDER):
            if isinstance(event, RunEvaluated):
                if event.item not in open_logs:
                    name = file_name(getattr(event.item.name, "label", str(event.item.name)), event.item.seed)
                    open_logs[event.item] = make(str(folder / FOLDER / name), flush_secs=5)
                e = event.evaluation
                for tag, field in TAGS.items():
                    value = getattr(e, field)
                    if value is not None:
                        open_logs[event.item].add_scalar(tag, value, e.round, walltime=e.seconds)
            elif event.item in open_logs:
                open_logs.pop(event.item).close()
        watch(event)

    try:
        yield take
    finally:
        for log in open_logs.values():
            log.close()
