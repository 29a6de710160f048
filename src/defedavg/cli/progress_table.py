"""What is seen of runs while they run: a table on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..experiments.sweep import Event, RunEvaluated, RunSpec, Watch

QUIET_SECONDS = 10.0
PER_SECOND = 4  # times that the table is drawn


@dataclass(slots=True)
class Row:
    """A run that is under way, as last measured."""

    event: RunEvaluated
    began: float  # real seconds, at its first measurement
    first_updates: int
    first_part: float
    now: float

    @property
    def speed(self) -> float | None:
        """Updates per real second."""
        spent = self.now - self.began
        return (self.event.evaluation.updates - self.first_updates) / spent if spent > 0 else None

    @property
    def left(self) -> float | None:
        """Real seconds to its limit of rounds or time; a target may end it sooner."""
        done = self.event.part - self.first_part
        return (self.now - self.began) * (1.0 - self.event.part) / done if done > 0 else None

    def cells(self) -> tuple[str, ...]:
        """What the table shows of it."""
        e = self.event.evaluation
        return (
            label_of(self.event.item),
            str(e.round),
            f"{e.seconds:.2f} s",
            "–" if e.accuracy is None else f"{100 * e.accuracy:.1f} %",
            "–" if self.speed is None else f"{self.speed:.3g}",
            f"{e.staleness:.1f}",
            duration(self.left),
        )


def label_of(item: RunSpec) -> str:
    """A run by its setting and its seed."""
    return f"{getattr(item.name, 'label', item.name)} seed {item.seed}"


def duration(seconds: float | None) -> str:
    """Real time, in the form of a clock."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ProgressTable:
    """Where all runs of a sweep stand."""

    def __init__(self, title: str, runs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.title = title
        self.runs = runs
        self.rows: dict[RunSpec, Row] = {}
        self.over = 0
        self._clock = clock
        self._began = clock()

    def take(self, event: Event) -> None:
        """Something happened."""
        if not isinstance(event, RunEvaluated):
            self.rows.pop(event.item, None)
            self.over += 1
            return
        now, row = self._clock(), self.rows.pop(event.item, None)  # the last measured stands last
        if row is None:
            row = Row(event, now, event.evaluation.updates, event.part, now)
        row.event, row.now = event, now
        self.rows[event.item] = row

    @property
    def done(self) -> float:
        """How many runs' worth is done."""
        return self.over + sum(min(1.0, row.event.part) for row in self.rows.values())

    @property
    def left(self) -> float | None:
        """Real seconds that all of it may still take, at the speed so far."""
        spent = self._clock() - self._began
        return spent * (self.runs - self.done) / self.done if self.done > 0 else None

    def table(self, most: int) -> Group:
        """The runs under way, at most so many, under a bar of the whole."""
        bar = Table.grid(padding=(0, 1))
        spent = duration(self._clock() - self._began)
        bar.add_row(
            Text(self.title, style="bold"),
            ProgressBar(total=max(self.runs, 1), completed=self.done, width=30),
            Text(f"{self.over} of {self.runs} runs, {spent}, at most {duration(self.left)} left"),
        )
        found = Table(box=None, pad_edge=False, header_style="dim")
        for place, name in enumerate(HEAD):
            found.add_column(name, justify="right" if place else "left", no_wrap=True, overflow="ellipsis")
        rows = list(self.rows.values())
        for row in rows[-most:]:
            found.add_row(*map(Text, row.cells()))
        more = [Text(f"and {len(rows) - most} more under way", style="dim")] if len(rows) > most else []
        return Group(bar, *([found] if rows else []), *more)

    def line(self) -> str:
        """The run measured last, in one line."""
        name, done, simulated, accuracy, speed, late, left = next(reversed(self.rows.values())).cells()
        return (
            f"{name}: round {done}, {simulated} simulated, accuracy {accuracy}, {speed} updates/s, staleness {late}, "
            f"at most {left} left; {self.over} of {self.runs} runs over"
        )


HEAD = ("run", "round", "simulated", "accuracy", "updates/s", "staleness", "left, at most")


@contextmanager
def watching(console: Console, title: str, runs: int) -> Iterator[Watch]:
    """A function to be told of everything that happens in a sweep of so many runs."""
    board = ProgressTable(title, runs)
    if not console.is_terminal:
        last = time.monotonic()

        def say(event: Event) -> None:
            nonlocal last
            board.take(event)
            if isinstance(event, RunEvaluated) and time.monotonic() - last >= QUIET_SECONDS:
                last = time.monotonic()
                console.print(board.line(), markup=False, soft_wrap=True)

        yield say
        return
    with Live(
        console=console,
        transient=True,
        refresh_per_second=PER_SECOND,
        get_renderable=lambda: board.table(max(1, console.height - 5)),
    ):
        yield board.take
