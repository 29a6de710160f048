"""Table 1 again: seconds to the target for every dataset, setting, algorithm and n, beside what the paper reports.

Every finished run is a file of its own: the table can be made in parts, on several machines, and on another day.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .. import config
from ..config import Settings
from ..errors import UserError
from ..files import write_whole, writing
from ..report.jsons import finite
from ..runs import file_name
from ..sweep import Finished, Item, Means, Sweep, Watch
from .facts import BOUNDS, LIMITS, Cell

Rates = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the paper leaves open, and how much of it is run."""

    measure_seconds: float = 0.25
    normalise: str = "standard"
    sampling: str = "replacement"
    max_seconds: float | None = None  # None: as long as LIMITS says

    def settings(self, cell: Cell, rates: Rates) -> Settings:
        """A run of a cell."""
        wide, near = rates
        training = {"updates_per_round": cell.updates_per_round, "sampling": self.sampling}
        training |= {} if wide is None else {"global_lr": wide}
        training |= {} if near is None else {"local_lr": near}
        limit = LIMITS[cell.dataset, cell.setting] if self.max_seconds is None else self.max_seconds
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
                "hits": 5,
                "max_rounds": 10**9,
                "max_seconds": limit,
                "measure_seconds": self.measure_seconds,
            },
        }
        if cell.algorithm == "fedbuff":
            tables["fedbuff"] = {"concurrency": 100}
        (point,) = config.study(tables).points()
        return point.settings


class Table1:
    """The runs of some cells in a folder: those that are there already, and those still to be done."""

    def __init__(self, folder: Path, choices: Choices, means: Means) -> None:
        self.folder = folder
        self.choices = choices
        self.sweep = Sweep(means)

    def path(self, cell: Cell, seed: int) -> Path:
        """Where a run's result is."""
        return self.folder / "cells" / f"{file_name(cell.label, seed)}.json"

    def missing(self, cells: Sequence[Cell], seeds: Sequence[int]) -> list[tuple[Cell, int]]:
        """Runs without a result."""
        return [(cell, seed) for cell in cells for seed in seeds if not self.path(cell, seed).exists()]

    def carry_out(self, runs: Sequence[tuple[Cell, int]], rates: Mapping[Cell, Rates], watch: Watch) -> bool:
        """Do these runs; False if Ctrl-C ended it: what had finished is kept, what had not is begun again next time."""
        with writing(self.folder):
            (self.folder / "cells").mkdir(parents=True, exist_ok=True)
        items = [Item(cell, self.choices.settings(cell, rates[cell]), seed) for cell, seed in runs]
        try:
            for event in self.sweep.events(items):
                if isinstance(event, Finished):
                    self._keep(event, rates)
                watch(event)
        except KeyboardInterrupt:
            self.sweep.interrupt()
            return False
        return True

    def _keep(self, event: Finished, rates: Mapping[Cell, Rates]) -> None:
        cell, progress = event.item.name, event.run.progress
        assert isinstance(cell, Cell)
        found = {
            **asdict(cell),
            "seed": event.item.seed,
            "rates": rates[cell],
            "choices": asdict(self.choices),
            "status": str(progress.status),
            "first_hit_seconds": progress.first_hit_seconds,
            "sustained_seconds": progress.sustained_seconds,
            "diverged_at": progress.diverged_at,
            "rounds": progress.rounds,
            "seconds": progress.seconds,
            "best_accuracy": progress.best_accuracy,
            "updates_trained": event.run.executor.updates_trained,
            "wall_seconds": event.wall_seconds,
            "curve": {
                "seconds": [round(e.seconds, 4) for e in progress.evaluations],
                "rounds": [e.round for e in progress.evaluations],
                "accuracy": [e.accuracy for e in progress.evaluations],
                "loss": [round(e.loss, 5) if math.isfinite(e.loss) else None for e in progress.evaluations],
            },
        }
        text = json.dumps(finite(found), allow_nan=False, separators=(",", ":")) + "\n"
        write_whole(self.path(cell, event.item.seed), text.encode())

    def results(self, cells: Sequence[Cell], seeds: Sequence[int], rates: Mapping[Cell, Rates]) -> list[dict[str, Any]]:
        """What is known of these cells, one entry per run."""
        found = []
        for cell in cells:
            for seed in seeds:
                path = self.path(cell, seed)
                if path.exists():
                    found.append(self._read(path, rates[cell]))
        return found

    def _read(self, path: Path, rates: Rates) -> dict[str, Any]:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            ours = found["choices"] == asdict(self.choices) and tuple(found["rates"]) == rates
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{path} cannot be read; delete it, and the run is done again") from None
        if not ours:
            raise UserError(f"{path} is of another choice of rates or settings; use another --out")
        return dict(found)


def rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per cell: means over seeds of first and sustained hits, and the paper's figure beside them."""
    groups: dict[Cell, list[Mapping[str, Any]]] = {}
    for one in results:
        cell = Cell(one["dataset"], one["setting"], one["algorithm"], one["updates_per_round"])
        groups.setdefault(cell, []).append(one)
    found = []
    for cell, own in groups.items():
        first = _times(own, "first_hit_seconds")
        paper = cell.seconds
        found.append(
            {
                **asdict(cell),
                "target": cell.target,
                "global_lr": own[0]["rates"][0],
                "local_lr": own[0]["rates"][1],
                "seeds": len(own),
                "reached": len(first),
                "first_hit": fmean(first) if first else None,
                "first_hit_sd": stdev(first) if len(first) > 1 else None,
                "sustained": fmean(held) if (held := _times(own, "sustained_seconds")) else None,
                "sustained_reached": len(held),
                "paper": paper,
                "ratio": fmean(first) / paper if first and paper and len(first) == len(own) else None,
                "note": _note(own),
            }
        )
    return found


def _times(own: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [one[name] for one in own if one[name] is not None]


def _note(own: Sequence[Mapping[str, Any]]) -> str:
    """What happened where the target was not reached; never blank there."""
    said = []
    for one in own:
        if one["diverged_at"] is not None:
            said.append(f"diverged at round {one['diverged_at']}")
        elif one["first_hit_seconds"] is None:
            said.append(f"not reached by {one['seconds']:.0f} s (best {100 * (one['best_accuracy'] or 0):.1f} %)")
    return "; ".join(dict.fromkeys(said))


def to_csv(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


def to_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown, the paper's figures beside ours."""
    lines = [
        "| setting | data | algorithm | n | η / η̄ | first hit, s | sustained, s | paper, s | ratio | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        spread = f" ± {row['first_hit_sd']:.2g}" if row["first_hit_sd"] is not None else ""
        first = "–" if row["first_hit"] is None else f"{row['first_hit']:.4g}{spread} ({row['reached']}/{row['seeds']})"
        held = (
            "–" if row["sustained"] is None else f"{row['sustained']:.4g} ({row['sustained_reached']}/{row['seeds']})"
        )
        paper = f">{BOUNDS[row['dataset']]:.0f}" if row["paper"] is None else f"{row['paper']:g}"
        rates = " / ".join("–" if rate is None else f"{rate:g}" for rate in (row["global_lr"], row["local_lr"]))
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(
            f"| {row['setting']} | {row['dataset']} | {row['algorithm']} | {row['updates_per_round']} | {rates} "
            f"| {first} | {held} | {paper} | {ratio} | {row['note']} |"
        )
    return "\n".join(lines) + "\n"
