"""What is seen of a run while it runs: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .config import Point
from .execute import Evaluation

if TYPE_CHECKING:
    from .runs import Run, Watch

QUIET_SECONDS = 10.0


def _line(point: Point, seed: int, e: Evaluation) -> str:
    accuracy = "" if e.accuracy is None else f", accuracy {100 * e.accuracy:.1f} %"
    return f"{point.label} seed {seed}: round {e.round}, {e.seconds:.2f} s simulated{accuracy}, {e.updates} updates"


@contextmanager
def watch_run(console: Console, run: Run) -> Iterator[Watch]:
    """A function to be told of every measurement."""
    pending = len(run.points) * len(run.study.seeds)
    if not console.is_terminal:
        last = time.monotonic()

        def say(point: Point, seed: int, e: Evaluation) -> None:
            nonlocal last
            if time.monotonic() - last >= QUIET_SECONDS:
                last = time.monotonic()
                console.print(_line(point, seed, e), markup=False, soft_wrap=True)

        yield say
        return
    columns = (TextColumn("{task.completed:.0f}/{task.total:.0f}"), BarColumn(30), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task(run.study.name, total=pending)

        shares: dict[tuple[str, int], float] = {}

        def show(point: Point, seed: int, e: Evaluation) -> None:
            stop = point.settings.stop
            shares[point.label, seed] = max(e.round / stop.max_rounds, e.seconds / stop.max_seconds)
            shares.update({(entry["label"], entry["seed"]): 1.0 for entry in run.entries})
            bar.update(task, completed=sum(shares.values()), description=_line(point, seed, e))

        yield show
