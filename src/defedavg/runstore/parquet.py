"""Metrics as Parquet: a row per measurement, with the settings that runs are told apart by; one schema for every run.

pyarrow writes it, the reference implementation that pandas and Polars read with or agree with. It is large, so it is an
extra and imported only here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..fileio import writing
from .catalogue import Stored, read

TEXT = ("run", "algorithm", "label", "swept", "status", "data", "model", "split")
WHOLE = ("seed", "round", "updates", "num_clients", "updates_per_round", "local_steps", "batch_size")
REAL = ("seconds", "accuracy", "loss", "train_loss", "staleness", "wall_seconds", "global_lr", "local_lr")
SETTINGS = {
    "task": ("data", "model", "split"),
    "clients": ("num_clients",),
    "training": ("updates_per_round", "local_steps", "batch_size", "global_lr", "local_lr"),
}
COLUMNS = (
    "run", "algorithm", "label", "swept", "seed", "status", "round", "seconds", "accuracy", "loss", "train_loss",
    "staleness", "updates", "wall_seconds", *(name for names in SETTINGS.values() for name in names),
)  # fmt: skip


def available() -> bool:
    """Whether Parquet can be written here."""
    return find_spec("pyarrow") is not None


def rows(run: Stored) -> tuple[list[dict[str, Any]], int]:
    """The measurements of a run as rows, and how many lines could not be read."""
    measured, bad = run.metrics()
    status = {(entry["label"], entry["seed"]): entry["status"] for entry in run.entries}
    found = []
    for one in measured:
        swept = one.pop("swept")
        label = " ".join([one["algorithm"], *(f"{name.split('.')[-1]}={value}" for name, value in swept.items())])
        row = {
            **one,
            "run": run.name,
            "label": label,
            "swept": json.dumps(swept),
            "status": status.get((label, one["seed"])),
        }
        for table, names in SETTINGS.items():
            for name in names:
                value = run.setting(f"{table}.{name}", {"algorithm": one["algorithm"], "swept": swept})
                row[name] = _fit(name, value)
        found.append(row)
    return found, bad


def _fit(name: str, value: Any) -> Any:
    """A setting as its column wants it; null where the file holds something else."""
    if name in TEXT:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if name in WHOLE:
        return value if isinstance(value, int) and abs(value) < 2**63 else None
    return float(value)


def export(
    runs: Iterable[Stored], path: Path, labels: Collection[tuple[str, str]] | None = None
) -> Iterator[tuple[Stored, int, int]]:
    """Write the metrics of many runs into one file; yields each run, its rows, and its lines that cannot be read.

    ``labels``: only these (run, label). The file is in its place when the last run has been written; one run is held at
    a time.
    """
    with _writer(path) as write:
        for run in runs:
            found, bad = rows(run)
            if labels is not None and run.entries:
                found = [row for row in found if (run.name, row["label"]) in labels]
            if found:
                write(found)
            yield run, len(found), bad


@contextmanager
def _writer(path: Path) -> Iterator[Any]:
    if not available():
        raise UserError("Parquet is written by pyarrow, which is not installed; pip install 'defedavg[parquet]'")
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {
        **dict.fromkeys(TEXT, pa.string()),
        **dict.fromkeys(WHOLE, pa.int64()),
        **dict.fromkeys(REAL, pa.float64()),
    }
    schema = pa.schema([(name, kinds[name]) for name in COLUMNS])
    scratch = path.with_name(path.name + ".part")
    try:
        with writing(path), pq.ParquetWriter(scratch, schema, compression="zstd") as file:
            yield lambda found: file.write_table(pa.Table.from_pylist(found, schema=schema))
        with writing(path):
            scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_beside(folder: Path) -> None:
    """Write the metrics of a finished run as metrics.parquet into its folder, where pyarrow is installed."""
    if available():
        for _ in export([read(folder, folder.parent)], folder / "metrics.parquet"):
            pass
