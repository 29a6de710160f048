"""The runs of a sweep and the events that it reports."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..config.settings import Settings
from ..training import Evaluation, RunProgress, RunState
from .simulation import Simulation


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run of a sweep; ``name`` identifies its setting."""

    name: Hashable
    settings: Settings
    seed: int

    @property
    def label(self) -> str:
        """The name of the setting as text."""
        return str(getattr(self.name, "label", self.name))


def completed_share(settings: Settings, evaluation: Evaluation) -> float:
    """Return how much of its limit of rounds or simulated time a run has used."""
    return max(evaluation.round / settings.stop.max_rounds, evaluation.seconds / settings.stop.max_seconds)


class PausableRun(Protocol):
    """A run that can be paused, and dropped through the status of its progress."""

    held: bool

    @property
    def progress(self) -> RunProgress:
        """The progress of the run."""


@dataclass(frozen=True, slots=True, eq=False)
class RunEvaluated:
    """A version of a run was evaluated; ``pausable`` is set if the run shares batches with others."""

    spec: RunSpec
    run: Simulation
    evaluation: Evaluation
    pausable: PausableRun | None

    @property
    def metric(self) -> str:
        """The name of the task's metric."""
        return self.run.task.metric_name

    @property
    def completed_share(self) -> float:
        """How much of its limits the run has used."""
        return completed_share(self.spec.settings, self.evaluation)


@dataclass(frozen=True, slots=True, eq=False)
class RunFinished:
    """A run ended, for whatever reason."""

    spec: RunSpec
    run: Simulation
    wall_seconds: float


Event = RunEvaluated | RunFinished
Watch = Callable[[Event], None]
"""A callback for every event."""

ResumedRun = tuple[RunState, Sequence[Evaluation]]
"""The state of a run at the end of an earlier session, and its evaluations until then."""

OnResume = Callable[[RunSpec, PausableRun], int]
"""A callback for a resumed run: it pauses the run again if it was paused, and returns how many of its pauses ended."""
