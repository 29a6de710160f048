"""The progress of ``defedavg suite``: the time left is that of the whole command, over all of its studies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from ..experiments.run_events import Event, RunEvaluated, RunSpec, Watch
from ..suite.benchmark import SuiteCell
from ..suite.suite_run import BatchStudy, SuiteBatch
from .plain_lines import LineTimer
from .progress_table import duration, watching

ENOUGH = 0.05
"""The share of the work from which on the speed so far says how long the rest takes."""


@dataclass(slots=True)
class StudyLeft:
    """The runs of a study that are left, and the work of one of them."""

    left: float
    work: float


class SuiteProgress:
    """What is left of a command, in seconds that it takes at most or, without an estimate, in runs.

    A run that ends at its target counts as a whole one, so the speed includes that some runs end early. What an earlier
    session computed, or another process computes, is neither left nor done.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._studies: dict[BatchStudy, StudyLeft] = {}  # in their order
        self._current: StudyLeft | None = None
        self._shares: dict[RunSpec, float] = {}  # of the runs in progress
        self._done = 0.0  # work of this session
        self._in_seconds = False
        self._start = 0.0
        self._timer = LineTimer()

    def expect(self, batches: Sequence[SuiteBatch], seconds: Mapping[SuiteCell, float] | None = None) -> None:
        """Note what will be computed; ``seconds`` are those of each cell, at most."""
        self._in_seconds = seconds is not None
        for batch in batches:
            studies = batch.studies()
            relative = sum(study.runs * study.length for study in studies)
            work = relative if seconds is None else sum(seconds.get(cell, 0.0) for cell in batch.cells)
            for study in studies:
                self._studies[study] = StudyLeft(study.runs, work * study.length / relative)

    @contextmanager
    def watching(self, study: BatchStudy, runs: int) -> Iterator[Watch]:
        """Show the progress of a study with so many runs left; yields the callback that receives its events."""
        self.begin(study, runs)
        with watching(self._console, study.title, runs, self.text, self._timer) as show:

            def follow(event: Event) -> None:
                self.add(event)
                show(event)

            yield follow

    def begin(self, begun: BatchStudy, runs: int) -> None:
        """Begin a study; nothing is left of those before it, which are finished or left to another process."""
        self._start = self._start or self._clock()
        self._shares.clear()
        for study, rest in self._studies.items():
            if study == begun:
                rest.left, self._current = runs, rest
                return
            rest.left = 0.0

    def add(self, event: Event) -> None:
        """Count what was computed since the last event of a run."""
        study = self._current
        if study is None:
            return
        new = event.spec not in self._shares
        before = self._shares.pop(event.spec, 0.0)
        after = min(1.0, event.completed_share) if isinstance(event, RunEvaluated) else 1.0
        if isinstance(event, RunEvaluated):
            self._shares[event.spec] = after
        study.left -= after - before
        if not (new and isinstance(event, RunEvaluated)):  # at its first evaluation, a run is where it was left before
            self._done += (after - before) * study.work

    @property
    def left(self) -> float:
        """The work that is left."""
        return sum(max(0.0, study.left) * study.work for study in self._studies.values())

    def text(self) -> str:
        """Return how long the rest of the command takes: an estimate from the speed so far, or the limit before."""
        left = self.left
        if self._done > ENOUGH * (self._done + left):
            return f"about {duration((self._clock() - self._start) * left / self._done)} left"
        return f"at most {duration(left)} left" if self._in_seconds else "time left not known yet"
