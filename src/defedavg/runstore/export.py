"""Metrics as one table: a row per evaluation, with the settings that distinguish runs; or a row per client of a run.

The ending of the file chooses Parquet, CSV or JSON. pyarrow writes Parquet; it is large, so it is an extra and imported
only here.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import UserError
from ..fileio import replacing, writing
from ..jsonio import is_whole, json_line
from . import client_results
from .layout import RunFiles
from .metrics import number
from .reader import RunFolder, read_run

TEXT = ("run", "algorithm", "label", "swept", "status", "data", "model", "split")
WHOLE = ("seed", "round", "updates", "num_clients", "updates_per_round", "local_steps", "batch_size")
REAL = ("seconds", "accuracy", "loss", "train_loss", "staleness", "wall_seconds", "global_lr", "local_lr")
SETTINGS = {
    "task": ("data", "model", "split"),
    "clients": ("num_clients",),
    "training": ("updates_per_round", "local_steps", "batch_size", "global_lr", "local_lr"),
}
PARQUET = ".parquet"
Rows: TypeAlias = list[dict[str, Any]]
WriteRows: TypeAlias = Callable[[Rows], None]
COLUMNS = (
    "run", "algorithm", "label", "swept", "seed", "status", "round", "seconds", "accuracy", "loss", "train_loss",
    "staleness", "updates", "wall_seconds", *(name for names in SETTINGS.values() for name in names),
)  # fmt: skip
CLIENT_COLUMNS = ("run", "algorithm", "label", "swept", "seed", "status", *client_results.COLUMNS)
"""The columns of a table with a row per client of every run."""


def available() -> bool:
    """Return whether Parquet can be written here."""
    return find_spec("pyarrow") is not None


def rows(run: RunFolder) -> tuple[Rows, int]:
    """Return the evaluations of a run as rows, and the number of lines that cannot be read."""
    measurements, lines = run.metrics()
    status = {(entry.label, entry.seed): entry.status for entry in run.entries}
    settings: dict[tuple[str, str], dict[str, Any]] = {}
    table = []
    for one in measurements:
        swept = json.dumps(dict(one.swept))
        if (one.algorithm, swept) not in settings:
            settings[one.algorithm, swept] = {
                name: _fit(name, run.setting(f"{group}.{name}", one.algorithm, one.swept))
                for group, names in SETTINGS.items()
                for name in names
            }
        names = {"run": run.name, "algorithm": one.algorithm, "label": one.label, "swept": swept, "seed": one.seed}
        known = {"status": status.get((one.label, one.seed)), **settings[one.algorithm, swept]}
        table.append({**names, **one.values, **known})
    return table, lines.damaged + lines.incomplete


def client_rows(run: RunFolder) -> tuple[Rows, int]:
    """Return a row per client of every run, and the number of files that cannot be read as a whole."""
    table, damaged = [], 0
    for entry in run.entries:
        found, notes = run.client_rows(entry)
        damaged += len(notes)
        swept = json.dumps(dict(entry.swept))
        names = {"run": run.name, "algorithm": entry.algorithm, "label": entry.label, "swept": swept}
        table += [{**names, "seed": entry.seed, "status": entry.status, **row} for row in found]
    return table, damaged


def _fit(name: str, value: Any) -> Any:
    """Return a setting in the type of its column; null if the file holds another type."""
    if name in TEXT:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if name in WHOLE:
        return value if is_whole(value) else None
    return number(value)


def export(
    runs: Iterable[RunFolder],
    path: Path,
    labels: Collection[tuple[str, str]] | None = None,
    *,
    clients: bool = False,
) -> Iterator[tuple[RunFolder, int, int]]:
    """Write the metrics of many runs into one file, or with ``clients`` the rows of their clients.

    Yield each run, its rows, and its unreadable lines, or files. The ending of the file chooses the format. With
    ``labels``, write only these (run, label). One run at a time is in memory; the file appears when the last run has
    been written.
    """
    with _writer(path, CLIENT_COLUMNS if clients else COLUMNS) as write:
        for run in runs:
            table, unreadable = client_rows(run) if clients else rows(run)
            if labels is not None and run.entries and not run.tuned:
                table = [row for row in table if (run.name, row["label"]) in labels]
            if table:
                write(list(map(_encodable, table)))
            yield run, len(table), unreadable


def _encodable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose texts are valid UTF-8; names of folders may not be."""
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in row.items()
    }


@contextmanager
def _writer(path: Path, columns: Sequence[str]) -> Iterator[WriteRows]:
    check_format(path)
    with writing(path), replacing(path) as scratch, _FORMATS[path.suffix.lower()](scratch, columns) as write:
        yield write


def check_format(path: Path) -> None:
    """Raise ``UserError`` unless the ending names a format that can be written here."""
    suffix = path.suffix.lower()
    if suffix not in _FORMATS:
        *others, last = _FORMATS
        raise UserError(f"{path} has no ending of a table; use {', '.join(others)} or {last}")
    if suffix == PARQUET and not available():
        raise UserError("Parquet is written by pyarrow, which is not installed; pip install 'defedavg[parquet]'")


@contextmanager
def _parquet(path: Path, columns: Sequence[str]) -> Iterator[WriteRows]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {
        **dict.fromkeys((*TEXT, "user"), pa.string()),
        **dict.fromkeys((*WHOLE, *client_results.WHOLE), pa.int64()),
        **dict.fromkeys((*REAL, *client_results.REAL), pa.float64()),
    }
    schema = pa.schema([(name, kinds[name]) for name in columns])
    # Given a name, pyarrow would refuse one that is not UTF-8.
    with path.open("wb") as stream, pq.ParquetWriter(stream, schema, compression="zstd") as file:
        yield lambda table: file.write_table(
            pa.Table.from_arrays([_arrow_column(table, field) for field in schema], schema=schema)
        )


def _arrow_column(table: Rows, field: Any) -> Any:
    """Return a column as an array of Arrow, made of buffers: from a list, pyarrow would first import pandas."""
    import pyarrow as pa

    values = [row[field.name] for row in table]
    known = np.array([value is not None for value in values], bool)
    valid = pa.py_buffer(np.packbits(known, bitorder="little").tobytes())
    if pa.types.is_string(field.type):
        texts = [b"" if value is None else value.encode() for value in values]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        if ends[-1] > np.iinfo(np.int32).max:
            raise UserError(f"the texts of the column {field.name} have over 2 GiB; export fewer runs, or as CSV")
        buffers = [ends.astype(np.int32).tobytes(), b"".join(texts)]
    else:
        kind: type = np.int64 if pa.types.is_int64(field.type) else np.float64
        buffers = [np.array([0 if value is None else value for value in values], kind).tobytes()]
    missing = int(len(known) - known.sum())
    return pa.Array.from_buffers(field.type, len(values), [valid, *map(pa.py_buffer, buffers)], missing)


@contextmanager
def _csv(path: Path, columns: Sequence[str]) -> Iterator[WriteRows]:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        yield writer.writerows


@contextmanager
def _json(path: Path, columns: Sequence[str]) -> Iterator[WriteRows]:
    with path.open("w", encoding="utf-8") as file:
        separator = "[\n"

        def write(table: Rows) -> None:
            nonlocal separator
            for row in table:
                file.write(separator + json_line({name: row[name] for name in columns}))
                separator = ",\n"

        yield write
        file.write("[]\n" if separator == "[\n" else "\n]\n")


_FORMATS: dict[str, Callable[[Path, Sequence[str]], AbstractContextManager[WriteRows]]] = {
    PARQUET: _parquet,
    ".csv": _csv,
    ".json": _json,
}


def write_parquets(folder: Path) -> None:
    """Write metrics.parquet of a run folder, and clients.parquet if clients have rows, if pyarrow is installed."""
    if not available():
        return
    run, files = read_run(folder), RunFiles(folder)
    for _ in export([run], files.parquet):
        pass
    if any(files.clients(entry.label, entry.seed).exists() for entry in run.entries):
        for _ in export([run], files.clients_parquet, clients=True):
            pass
