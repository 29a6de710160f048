"""The progress of a sweep: a table on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..experiments.run_events import Event, RunEvaluated, RunSpec, Watch
from ..report.palette import terminal_style
from ..report.tables import score_and_perplexity
from ..runstore.layout import RunFiles
from ..runstore.metrics import common_metric
from ..runstore.tensorboard import TensorBoardLogs
from .options import err
from .plain_lines import LineTimer

REFRESHES_PER_SECOND = 4
HEAD = ("run", "round", "simulated", "accuracy", "updates/s", "staleness", "left, at most")
"""The columns of the table; another metric replaces the accuracy."""


@dataclass(frozen=True, slots=True)
class Row:
    """A run in progress, as of its last evaluation."""

    first: RunEvaluated
    start: float  # real seconds, at its first evaluation
    event: RunEvaluated
    now: float

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table, in the order of ``HEAD``."""
        e, share, spent = self.event.evaluation, self.event.completed_share, self.now - self.start
        updates, done = e.updates - self.first.evaluation.updates, share - self.first.completed_share
        return (
            f"{self.event.spec.label} seed {self.event.spec.seed}",
            str(e.round),
            f"{e.seconds:.2f} s",
            score_and_perplexity(e.accuracy, e.loss, self.event.metric),
            f"{updates / spent:.3g}" if spent > 0 else "–",
            f"{e.staleness:.1f}",
            duration(spent * (1.0 - share) / done if done > 0 else None),  # a target may end the run earlier
        )


def duration(seconds: float | None) -> str:
    """Format real time as h:mm:ss or m:ss."""
    if seconds is None:
        return "–"
    minutes, second = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{second:02d}" if hours else f"{minutes}:{second:02d}"


class ProgressTable:
    """The progress of every run of a sweep.

    ``command`` says how long a command with several sweeps takes; it replaces the time left of a run and of this sweep.
    """

    def __init__(
        self,
        title: str,
        runs: int,
        clock: Callable[[], float] = time.monotonic,
        command: Callable[[], str] | None = None,
    ) -> None:
        self.title, self.runs, self.command = title, runs, command
        self.rows: dict[RunSpec, Row] = {}  # in the order of their last evaluation
        self.finished = 0
        self._clock, self._start = clock, clock()

    def add(self, event: Event) -> None:
        """Record an evaluation or the end of a run."""
        row = self.rows.pop(event.spec, None)
        if not isinstance(event, RunEvaluated):
            self.finished += 1
            return
        now = self._clock()
        self.rows[event.spec] = Row(row.first if row else event, row.start if row else now, event, now)

    @property
    def done(self) -> float:
        """The work done, in runs: finished ones and the parts of those in progress."""
        return self.finished + sum(min(1.0, row.event.completed_share) for row in self.rows.values())

    @property
    def left(self) -> float | None:
        """Real seconds to the end of the sweep at the speed so far, at most."""
        spent = self._clock() - self._start
        return spent * (self.runs - self.done) / self.done if self.done > 0 else None

    def table(self, max_rows: int) -> Group:
        """Return a progress bar of the sweep above a table of the runs that were evaluated last."""
        bar = Table.grid(padding=(0, 1))
        spent = duration(self._clock() - self._start)
        bar.add_row(
            Text(self.title, style="bold"),
            ProgressBar(total=max(self.runs, 1), completed=self.done, width=30),
            Text(f"{self.finished} of {self.runs} runs, {spent}" + ("" if self.command else f", {self._left()}")),
        )
        below = [Text(self._left())] if self.command else []
        table = Table(box=None, pad_edge=False, header_style="dim")
        metric = common_metric(row.event.metric for row in self.rows.values())
        head = HEAD if self.command is None else HEAD[:-1]
        for column, name in enumerate(head):
            name = metric if name == "accuracy" else name
            table.add_column(name, justify="right" if column else "left", no_wrap=True, overflow="ellipsis")
        rows = list(self.rows.values())
        for row in rows[-max_rows:]:
            name, *others = row.cells()[: len(head)]
            dot = Text("● ", style=terminal_style(row.event.spec.settings.algorithm))
            table.add_row(dot + Text(name), *map(Text, others))
        hidden = len(rows) - max_rows
        more = [Text(f"and {hidden} more in progress", style="dim")] if hidden > 0 else []
        return Group(bar, *below, *([table] if rows else []), *more)

    def line(self) -> str:
        """Return the run that was evaluated last, in one line."""
        row = next(reversed(self.rows.values()))
        name, round_, simulated, value, speed, staleness, left = row.cells()
        run = (
            f"{name}: round {round_}, {simulated} simulated, {row.event.metric} {value}, {speed} updates/s, "
            f"staleness {staleness}"
        )
        runs = f"{self.finished} of {self.runs} runs finished"
        if self.command is None:
            return f"{run}, at most {left} left; {runs}"
        return f"{self.title}: {runs}; {self._left()}; {run}"

    def _left(self) -> str:
        """Return the time left of this sweep, or of the whole command."""
        return f"at most {duration(self.left)} left" if self.command is None else f"whole command: {self.command()}"


@contextmanager
def watching(
    console: Console,
    title: str,
    runs: int,
    command: Callable[[], str] | None = None,
    timer: LineTimer | None = None,
) -> Iterator[Watch]:
    """Show the progress of a sweep of that many runs; yields the callback that receives its events.

    A command with several sweeps passes what is left of all of them, as ``command``, and one timer for all lines.
    """
    progress = ProgressTable(title, runs, command=command)
    if not console.is_terminal:
        timer = timer or LineTimer()

        def print_sometimes(event: Event) -> None:
            progress.add(event)
            if isinstance(event, RunEvaluated) and timer.due():
                console.print(progress.line(), markup=False, soft_wrap=True)

        yield print_sometimes
        return

    def draw() -> Group:
        return progress.table(max(1, console.height - 6))

    with Live(console=console, transient=True, refresh_per_second=REFRESHES_PER_SECOND, get_renderable=draw):
        yield progress.add


@contextmanager
def progress_and_logs(title: str, runs: int, folder: Path, with_tensorboard: bool) -> Iterator[Watch]:
    """Show the progress of a sweep and, if wanted, write its TensorBoard logs below a run folder."""
    closed: AbstractContextManager[TensorBoardLogs | None] = nullcontext()
    if with_tensorboard:
        closed = closing(TensorBoardLogs(RunFiles(folder)))
    with watching(err, title, runs) as watch, closed as logs:

        def callback(event: Event) -> None:
            if logs is not None and isinstance(event, RunEvaluated):
                logs.add(event.spec.label, event.spec.seed, event.evaluation, event.metric)
            watch(event)

        yield callback
