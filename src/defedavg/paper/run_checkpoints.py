"""Checkpoints of the paper's runs: one file for every run in progress, beside the results.

A run that a killed or interrupted command has begun is continued by any later command that needs it, whatever other
runs that command selects. A checkpoint that does not fit, or is damaged, is not used, and a note says so.

    checkpoints/NAME.safetensors    as the checkpoints of a study; NAME is that of the result in runs/
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ..experiments.checkpointing import (
    CheckpointInterval,
    DamagedError,
    changed_hardware,
    environment,
    other_options,
    read_checkpoint,
    write_checkpoint,
)
from ..experiments.compute import ComputeConfig
from ..experiments.earlier_results import evaluation_of
from ..experiments.run_events import ResumedRun, RunSpec
from ..experiments.simulation import Simulation
from ..experiments.sweep import Sweep
from ..fileio import writing
from ..jsonio import finite
from ..training import RunState

FOLDER: Final = "checkpoints"


class RunCheckpoints:
    """Saves and loads the runs in progress; ``path_of`` returns the file of the run with a name and a seed."""

    def __init__(
        self, compute: ComputeConfig, path_of: Callable[[Hashable, int], Path], interval: float | None = None
    ) -> None:
        self.notes: list[str] = []
        self._environment = environment(compute)
        self._path_of = path_of
        self._interval = CheckpointInterval(interval)
        self._begun: dict[RunSpec, Simulation] = {}

    def begin(self, spec: RunSpec, run: Simulation) -> None:
        """Remember a run that begins, for its evaluations."""
        self._begun[spec] = run

    def save_if_due(self, sweep: Sweep, *, now: bool = False) -> None:
        """Save all runs in progress if the interval has passed, or ``now``; only within the hook of the sweep."""
        if not (now or self._interval.due):
            return
        with self._interval.saving():
            for spec, state in sweep.run_states().items():
                self._save(spec, state)

    def _save(self, spec: RunSpec, state: RunState) -> None:
        path = self._path_of(spec.name, spec.seed)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        stored = {
            "settings": _settings(spec),
            "environment": self._environment,
            "run": state.to_json(),
            "evaluations": [finite(asdict(each)) for each in self._begun[spec].progress.evaluations],
        }
        write_checkpoint(path, stored, dict(state.tensors()))

    def load(self, spec: RunSpec) -> ResumedRun | None:
        """Return the saved state of a run and its evaluations; None if it starts from the beginning."""
        path = self._path_of(spec.name, spec.seed)
        if not path.exists():
            return None
        try:
            stored, tensors = read_checkpoint(path)
            reason = self._mismatch(stored, spec)
            if not reason:
                evaluations = [evaluation_of({"seed": spec.seed, **each}) for each in stored["evaluations"]]
                resumed = RunState.from_json(stored["run"], tensors), evaluations
                self.notes += changed_hardware(stored["environment"], self._environment)
                return resumed
        except DamagedError as damage:
            reason = f"its checkpoint is damaged ({damage})"
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            reason = "its checkpoint is not valid"
        self.notes.append(f"{spec.label} seed {spec.seed} starts from the beginning: {reason}")
        return None

    def _mismatch(self, stored: Mapping[str, Any], spec: RunSpec) -> str:
        """Return why a checkpoint does not fit; empty if it does."""
        if options := other_options(stored["environment"], self._environment):
            return f"its checkpoint was made with {options}"
        return "" if stored["settings"] == _settings(spec) else "its checkpoint was made with other settings"

    def remove(self, spec: RunSpec) -> None:
        """Remove the checkpoint of a run that has ended, and the folder if it was the last one."""
        path = self._path_of(spec.name, spec.seed)
        self._begun.pop(spec, None)
        with suppress(OSError):  # a file that cannot be removed does no harm
            path.unlink(missing_ok=True)
            path.parent.rmdir()


def _settings(spec: RunSpec) -> Any:
    return json.loads(json.dumps(finite(asdict(spec.settings))))  # as it is read: JSON has no tuples
