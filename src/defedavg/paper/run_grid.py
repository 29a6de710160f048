"""The runs behind the paper's tables and figures, and the choices that the paper leaves open."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..config import study as config
from ..config.study import Settings
from ..errors import UserError
from .published import BOUNDS, LIMITS, LOCAL_STEPS, Cell, Rates

SHORTEST_LIMIT = 60.0  # simulated seconds
ROUNDS = 400  # of figures 6 and 7


@dataclass(frozen=True, slots=True)
class PaperRun:
    """One run of the paper without its seed: until the target is held or, where ``rounds`` is set, for that many."""

    cell: Cell
    rates: Rates
    local_steps: int = LOCAL_STEPS
    rounds: int | None = None

    @property
    def label(self) -> str:
        """The run in one line, for file names and progress lines."""
        return self.cell.label if self.local_steps == LOCAL_STEPS else f"{self.cell.label} K={self.local_steps}"


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices that the paper leaves open, and the time limit of a run."""

    measure_seconds: float = 0.5
    normalise: str = "standard"
    sampling: str = "replacement"
    train_samples: int = 2000
    time_limit_factor: float = 1.5
    max_seconds: float | None = None

    @classmethod
    def checked(cls, *values: Any) -> Choices:
        """Return the choices given on the command line; raise a UserError for a time limit that is not positive."""
        choices = cls(*values)
        for option, value in (("--time-limit-factor", choices.time_limit_factor), ("--max-time", choices.max_seconds)):
            if value is not None and not value > 0:
                raise UserError(f"{option} is {value:g}; it must be above zero")
        return choices

    def without_time_limit(self) -> dict[str, Any]:
        """Return the choices that the paper leaves open, as results store them."""
        return {name: value for name, value in asdict(self).items() if name not in ("time_limit_factor", "max_seconds")}

    def limit(self, run: PaperRun) -> float:
        """Return the simulated seconds after which a run is given up: ``time_limit_factor`` times the paper's seconds.

        It is at least the seconds of the paper's FedAvg with the same n, so that the fastest algorithm is known, and at
        most LIMITS; where the paper did not reach the target, it is the time that the paper states.
        """
        cell = run.cell
        if self.max_seconds is not None:
            return self.max_seconds
        if run.rounds is not None:
            return math.inf
        if cell.seconds is None:
            return BOUNDS[cell.dataset]
        shortest = max(replace(cell, algorithm="fedavg").seconds or 0.0, SHORTEST_LIMIT)
        return min(max(self.time_limit_factor * cell.seconds, shortest), LIMITS[cell.dataset][cell.setting])

    def settings(self, run: PaperRun) -> Settings:
        """Return the settings of a run."""
        cell, (global_lr, local_lr) = run.cell, run.rates
        rates = {"global_lr": global_lr, "local_lr": local_lr}
        training = {
            "updates_per_round": cell.updates_per_round,
            "local_steps": run.local_steps,
            "sampling": self.sampling,
            **{name: rate for name, rate in rates.items() if rate is not None},
        }
        tables: dict[str, Any] = {
            "algorithms": [cell.algorithm],
            "task": {
                "data": cell.dataset,
                "model": "cnn",
                "split": "iid" if cell.setting == "iid" else "classes",
                "normalise": self.normalise,
            },
            "clients": {"num_clients": 100, "profile": f"paper-{cell.dataset}"},
            "training": training,
            "stop": {
                "target_accuracy": cell.target,
                "train_samples": self.train_samples,
                "max_seconds": self.limit(run),
                **self._stop(run),
            },
        }
        if cell.algorithm == "fedbuff":
            tables["fedbuff"] = {"concurrency": 100}
        (point,) = config.study(tables).points()
        return point.settings

    def _stop(self, run: PaperRun) -> dict[str, Any]:
        if run.rounds is not None:
            every = max(1, run.rounds // 100)
            return {"stop_at_target": False, "max_rounds": run.rounds, "eval_every_rounds": every}
        return {"consecutive_hits": 5, "max_rounds": 10**9, "eval_every_seconds": self.measure_seconds}
