"""The runs behind the paper's tables and figures, and their settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config import study as config
from ..config.study import Settings
from ..errors import UserError
from .published import BOUNDS, LIMITS, LOCAL_STEPS, Cell, Rates
from .readings import Readings

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
    """How runs are evaluated, the readings of the paper, and the time limit of a run."""

    measure_seconds: float = 0.5
    train_samples: int = 2000
    time_limit_factor: float = 1.5
    max_seconds: float | None = None
    readings: Readings = field(default_factory=Readings)
    as_long_as_fedavg: bool = True  # no run is given up before the time of the paper's FedAvg with the same n

    @classmethod
    def checked(cls, *values: Any) -> Choices:
        """Return the choices given on the command line; raise a UserError that names the option of a wrong number."""
        choices = cls(*values)
        for option, value in (("--time-limit-factor", choices.time_limit_factor), ("--max-time", choices.max_seconds)):
            if value is not None and not value > 0:
                raise UserError(f"{option} is {value:g}; it must be above zero")
        for option, amount in (
            ("--measure-seconds", choices.measure_seconds),
            ("--train-samples", choices.train_samples),
        ):
            if not amount >= 0:  # NaN, too
                raise UserError(f"{option} is {amount:g}; it must be zero or more")
        return choices

    def stored(self) -> dict[str, Any]:
        """Return what results store: the choices without the time limit."""
        kept = {"measure_seconds": self.measure_seconds, "train_samples": self.train_samples}
        return {**kept, **asdict(self.readings)}

    def match(self, stored: Mapping[str, Any], cell: Cell) -> bool:
        """Return whether a stored result of a cell was made with these choices, as far as they affect the cell."""
        same = all(stored[name] == getattr(self, name) for name in ("measure_seconds", "train_samples"))
        return same and Readings.stored(stored).relevant(cell) == self.readings.relevant(cell)

    def limit(self, run: PaperRun) -> float:
        """Return the simulated seconds after which a run is given up: ``time_limit_factor`` times the paper's seconds.

        With ``as_long_as_fedavg`` it is at least the seconds of the paper's FedAvg with the same n, so that the fastest
        algorithm is known. It is at most LIMITS. Where the paper did not reach the target, it is the time that the
        paper states.
        """
        cell = run.cell
        if self.max_seconds is not None:
            return self.max_seconds
        if run.rounds is not None:
            return math.inf
        if cell.seconds is None:
            return BOUNDS[cell.dataset]
        fedavg = replace(cell, algorithm="fedavg").seconds or 0.0
        shortest = max(fedavg if self.as_long_as_fedavg else 0.0, SHORTEST_LIMIT)
        return min(max(self.time_limit_factor * cell.seconds, shortest), LIMITS[cell.dataset][cell.setting])

    def settings(self, run: PaperRun) -> Settings:
        """Return the settings of a run."""
        cell, (global_lr, local_lr) = run.cell, run.rates
        rates = {"global_lr": global_lr, "local_lr": local_lr}
        training = {
            "updates_per_round": cell.updates_per_round,
            "local_steps": run.local_steps,
            **{name: rate for name, rate in rates.items() if rate is not None},
        }
        read = self.readings.tables(cell)
        tables: dict[str, Any] = {
            **read,
            "algorithms": [cell.algorithm],
            "task": {"data": cell.dataset, "model": "cnn", **read["task"]},
            "clients": {"num_clients": 100, "profile": f"paper-{cell.dataset}", **read["clients"]},
            "training": training | read["training"],
            "stop": {
                "target_accuracy": cell.target,
                "train_samples": self.train_samples,
                "max_seconds": self.limit(run),
                **self._stop(run),
            },
        }
        (point,) = config.study(tables).points()
        return point.settings

    def _stop(self, run: PaperRun) -> dict[str, Any]:
        if run.rounds is not None:
            every = max(1, run.rounds // 100)
            return {"stop_at_target": False, "max_rounds": run.rounds, "eval_every_rounds": every}
        return {"consecutive_hits": 5, "max_rounds": 10**9, "eval_every_seconds": self.measure_seconds}
