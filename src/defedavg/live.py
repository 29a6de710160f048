"""What is seen of runs while they run: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .sweep import Event, Item, Measured, Watch

QUIET_SECONDS = 10.0


def _line(event: Measured) -> str:
    e, name = event.evaluation, event.item.name
    accuracy = "" if e.accuracy is None else f", accuracy {100 * e.accuracy:.1f} %"
    label = getattr(name, "label", name)
    return (
        f"{label} seed {event.item.seed}: round {e.round}, {e.seconds:.2f} s simulated{accuracy}, {e.updates} updates"
    )


@contextmanager
def watching(console: Console, title: str, runs: int) -> Iterator[Watch]:
    """A function to be told of everything that happens in a sweep of so many runs."""
    if not console.is_terminal:
        last = time.monotonic()

        def say(event: Event) -> None:
            nonlocal last
            if isinstance(event, Measured) and time.monotonic() - last >= QUIET_SECONDS:
                last = time.monotonic()
                console.print(_line(event), markup=False, soft_wrap=True)

        yield say
        return
    columns = (TextColumn("{task.completed:.0f}/{task.total:.0f}"), BarColumn(30), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task(title, total=runs)
        parts: dict[Item, float] = {}

        def show(event: Event) -> None:
            shown: dict[str, Any] = {}
            if isinstance(event, Measured):
                parts[event.item] = event.part
                shown["description"] = _line(event)
            else:
                parts[event.item] = 1.0
            bar.update(task, completed=sum(parts.values()), **shown)

        yield show
