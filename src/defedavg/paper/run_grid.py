"""What is run for the paper's tables and figures, with every choice that the paper leaves open."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..config import study as config
from ..config.study import Settings
from ..errors import UserError
from .published import BOUNDS, LIMITS, LOCAL_STEPS, Cell, Rates

FIRST_MINUTE = 60.0
ROUNDS = 400  # of figures 6 and 7


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of the paper's but for its seed: until the target is held, or for so many rounds."""

    cell: Cell
    rates: Rates
    local_steps: int = LOCAL_STEPS
    rounds: int | None = None

    @property
    def label(self) -> str:
        """Fit for a file name and a line of progress."""
        return self.cell.label if self.local_steps == LOCAL_STEPS else f"{self.cell.label} K={self.local_steps}"


@dataclass(frozen=True, slots=True)
class Choices:
    """What the paper leaves open, and how long a run may last."""

    measure_seconds: float = 0.5
    normalise: str = "standard"
    sampling: str = "replacement"
    train_samples: int = 2000
    time_limit_factor: float = 1.5
    max_seconds: float | None = None

    @classmethod
    def checked(cls, *given: Any) -> Choices:
        """From the command line."""
        made = cls(*given)
        for word, value in (("--time-limit-factor", made.time_limit_factor), ("--max-time", made.max_seconds)):
            if value is not None and not value > 0:
                raise UserError(f"{word} is {value:g}; it must be above zero")
        return made

    def open(self) -> dict[str, Any]:
        """What the paper leaves open, without how long a run may last."""
        return {name: value for name, value in asdict(self).items() if name not in ("time_limit_factor", "max_seconds")}

    def limit(self, piece: Piece) -> float:
        """Simulated seconds after which a run is given up: ``time_limit_factor`` times the paper's, but no sooner than the paper's
        FedAvg of the same n, so that it is known who comes first; at most LIMITS. Where the paper gave up, when it did.
        """
        cell = piece.cell
        if self.max_seconds is not None:
            return self.max_seconds
        if piece.rounds is not None:
            return math.inf
        if cell.seconds is None:
            return BOUNDS[cell.dataset]
        fedavg = replace(cell, algorithm="fedavg").seconds
        assert fedavg is not None
        return min(max(self.time_limit_factor * cell.seconds, fedavg, FIRST_MINUTE), LIMITS[cell.dataset, cell.setting])

    def settings(self, piece: Piece) -> Settings:
        """The run of a piece."""
        cell, (wide, near) = piece.cell, piece.rates
        training = {
            "updates_per_round": cell.updates_per_round,
            "local_steps": piece.local_steps,
            "sampling": self.sampling,
        }
        training |= {} if wide is None else {"global_lr": wide}
        training |= {} if near is None else {"local_lr": near}
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
            "stop": {"target_accuracy": cell.target, "train_samples": self.train_samples, **self._stop(piece)},
        }
        if cell.algorithm == "fedbuff":
            tables["fedbuff"] = {"concurrency": 100}
        (point,) = config.study(tables).points()
        return point.settings

    def _stop(self, piece: Piece) -> dict[str, Any]:
        limit = self.limit(piece)
        if piece.rounds is not None:
            every = max(1, piece.rounds // 100)
            return {
                "stop_at_target": False,
                "max_rounds": piece.rounds,
                "eval_every_rounds": every,
                "max_seconds": limit,
            }
        return {
            "consecutive_hits": 5,
            "max_rounds": 10**9,
            "max_seconds": limit,
            "eval_every_seconds": self.measure_seconds,
        }
