"""Results in a folder, one file per run: what is there is not done again, so that anything can be made in parts."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..experiments.compute import ComputeConfig
from ..experiments.run_events import RunFinished, RunSpec, Watch
from ..experiments.sweep import Sweep
from ..fileio import file_name, write_whole, writing
from ..jsonio import finite
from ..training import Status
from .run_grid import Choices, Piece

Result = Mapping[str, Any]
"""What is kept of a run; see ``record``."""

Job = tuple[Piece, int]
"""A piece and a seed."""


class ResultFiles:
    """The runs of an experiment: those that are there, and those still to be done."""

    def __init__(self, folder: Path, choices: Choices) -> None:
        self.folder = folder
        self.choices = choices

    def path(self, piece: Piece, seed: int) -> Path:
        """Where a run's result is."""
        return self.folder / "runs" / f"{file_name(piece.label, seed)}.json.gz"

    def missing(self, pieces: Iterable[Piece], seeds: Sequence[int]) -> list[Job]:
        """Runs without a result, or given up sooner than they would be now; all of the first seed come first."""
        pieces = list(pieces)
        return [(piece, seed) for seed in seeds for piece in pieces if not self._done(piece, seed)]

    def _done(self, piece: Piece, seed: int) -> bool:
        found = self.results([piece], [seed])
        return bool(found) and (found[0]["status"] != Status.SECONDS or self.choices.limit(piece) <= found[0]["limit"])

    def keep(self, result: Result, piece: Piece) -> None:
        """Save what is known of a run."""
        text = json.dumps(result, allow_nan=False, separators=(",", ":")) + "\n"
        path = self.path(piece, result["seed"])
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, gzip.compress(text.encode(), mtime=0))

    def adopt(self, other: ResultFiles, pieces: Sequence[Piece], seeds: Sequence[int]) -> None:
        """Take over what another folder knows and this one lacks: the same piece and seed, the same run."""
        for piece, seed in self.missing(pieces, seeds):
            if not self.path(piece, seed).exists() or other._done(piece, seed):
                for found in other.results([piece], [seed]):
                    self.keep(found, piece)

    def results(self, pieces: Iterable[Piece], seeds: Sequence[int]) -> list[Result]:
        """What is known of these pieces."""
        return [
            self._read(path, piece) for piece in pieces for seed in seeds if (path := self.path(piece, seed)).exists()
        ]

    def _read(self, path: Path, piece: Piece) -> Result:
        try:
            found = json.loads(gzip.decompress(path.read_bytes()))
            ours = _key(found) == _key(finite({"choices": self.choices.open(), "piece": asdict(piece)}))
            times = found["first_hit_seconds"], found["sustained_seconds"], found["seconds"]
            sound = all(time is None or isinstance(time, int | float) for time in times) and found["curve"]["rounds"]
        except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
            raise UserError(f"{path} cannot be read; delete it, and the run is done again") from None
        if not ours or not sound:
            raise UserError(f"{path} is of another choice of rates or settings; use another --out")
        return dict(found)


def _key(found: Result) -> Any:
    return [found["choices"], found["piece"]]


def record(event: RunFinished, piece: Piece, choices: Choices) -> Result:
    """All that is kept of a run: how it ended, and what was measured on the way."""
    progress = event.run.progress
    seen = progress.evaluations
    return dict(
        finite(
            {
                "piece": asdict(piece),
                "seed": event.item.seed,
                "choices": choices.open(),
                "limit": choices.limit(piece),
                "status": str(progress.status),
                "first_hit_seconds": progress.first_hit_seconds,
                "sustained_seconds": progress.sustained_seconds,
                "diverged_at": progress.diverged_at,
                "rounds": progress.rounds,
                "seconds": progress.seconds,
                "best_accuracy": progress.best_accuracy,
                "updates_trained": event.run.executor.updates_trained,
                "wall_seconds": round(event.wall_seconds, 1),
                "curve": {
                    "seconds": [round(e.seconds, 4) for e in seen],
                    "rounds": [e.round for e in seen],
                    "accuracy": [None if e.accuracy is None else round(e.accuracy, 6) for e in seen],
                    "loss": [_short(e.loss) for e in seen],
                    "train_loss": [_short(e.train_loss) for e in seen],
                },
            }
        )
    )


def _short(loss: float | None) -> float | None:
    return round(loss, 5) if loss is not None and math.isfinite(loss) else None


def carry_out(store: ResultFiles, jobs: Sequence[Job], means: ComputeConfig, watch: Watch) -> bool:
    """Do these runs; False if Ctrl-C ended it: what had finished is kept, what had not is begun again next time."""
    sweep = Sweep(means)
    items = [RunSpec(piece, store.choices.settings(piece), seed) for piece, seed in jobs]
    try:
        for event in sweep.events(items):
            if isinstance(event, RunFinished):
                piece = event.item.name
                assert isinstance(piece, Piece)
                store.keep(record(event, piece, store.choices), piece)
            watch(event)
    except KeyboardInterrupt:
        sweep.interrupt()
        return False
    return True
