"""Traces: measured clients from a file, what a fleet takes from them, and invalid files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from defedavg.errors import UserError
from defedavg.planning.devices import Fleet, Trace
from defedavg.planning.traces import read_trace

HEADER = "client,step_seconds,up_mbps,down_mbps"
ABSENT = HEADER + ",leaves_at,returns_at"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_trace_is_read(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, ABSENT, "0,0.5,1,inf,,", " 1 , 2e-3 ,7,8,3,", "", "2,1,1,1,3,4.5"))
    assert trace.step_seconds.tolist() == [0.5, 0.002, 1.0]
    assert trace.up_mbps.tolist() == [1.0, 7.0, 1.0]
    assert trace.down_mbps.tolist() == [math.inf, 8.0, 1.0]
    assert dict(trace.absences) == {1: (3.0, math.inf), 2: (3.0, 4.5)}


def test_columns_may_have_any_order_and_files_a_byte_order_mark(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffup_mbps, client ,down_mbps,step_seconds", "5,0,6,7")
    trace = read_trace(path)
    assert (trace.up_mbps[0], trace.down_mbps[0], trace.step_seconds[0]) == (5.0, 6.0, 7.0)


def test_shuffled_rows_are_equal(tmp_path: Path) -> None:
    rows = [f"{i},{1 + i},{10 + i},{20 + i},{i or ''},{2 * i or ''}" for i in range(9)]
    straight = read_trace(written(tmp_path, ABSENT, *rows))
    shuffled = read_trace(written(tmp_path, ABSENT, *(rows[i * 5 % 9] for i in range(9))))
    for name in ("step_seconds", "up_mbps", "down_mbps"):
        assert getattr(straight, name).tolist() == getattr(shuffled, name).tolist()
    assert dict(straight.absences) == dict(shuffled.absences)
    assert len(straight.absences) == 8


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "line 1"),
        (("client,step_seconds,up_mbps", "0,1,1"), "line 1"),
        ((HEADER + ",client", "0,1,1,1,0"), "line 1"),
        ((HEADER + ",leaves_at,leaves_at", "0,1,1,1,0,0"), "line 1"),
        ((HEADER,), "no clients"),
        ((HEADER, "0,1,1,1", "1,1,1"), "line 3"),
        ((HEADER, "0,1,1,1,1"), "line 2"),
        ((HEADER, "0,1,1,"), "line 2.*down_mbps"),
        ((HEADER, "0,1,fast,1"), "line 2.*up_mbps.*fast"),
        ((HEADER, "0,1,1,1", "", "1,nan,1,1"), "line 4.*step_seconds"),
        ((HEADER, "0,inf,1,1"), "line 2.*step_seconds"),
        ((HEADER, "0,1,1,1", "0,1,1,1"), "line 3.*client 0.*twice"),
        ((HEADER, "0,1,1,1", "2,1,1,1"), "1 is missing"),
        ((HEADER, "1,1,1,1"), "0 is missing"),
        ((HEADER, "-1,1,1,1"), "line 2"),
        ((HEADER, "0.5,1,1,1"), "line 2.*whole"),
        ((HEADER, "inf,1,1,1"), "line 2.*whole"),
        ((HEADER, " ,1,1,1"), "line 2.*client is empty"),
        ((HEADER, "1,1,1,1", "1.0,1,1,1"), "line 3.*client 1 appears twice"),
        ((HEADER, "0,0,1,1"), "line 2.*step_seconds.*above zero"),
        ((HEADER, "0,1,0,1"), "line 2.*up_mbps.*above zero"),
        ((HEADER, "0,1,1,-4"), "line 2.*down_mbps.*above zero"),
        ((ABSENT, "0,1,1,1,-1,"), "line 2.*leaves"),
        ((ABSENT, "0,1,1,1,5,4"), "line 2.*returns"),
        ((ABSENT, "0,1,1,1,5,nan"), "line 2.*returns_at"),
    ],
)
def test_an_invalid_trace_is_refused_by_line(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_trace(written(tmp_path, *lines))
    assert "trace.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.csv does not exist"):
        read_trace(tmp_path / "missing.csv")
    with pytest.raises(UserError, match="is not a regular file; give the path of a CSV file"):
        read_trace(tmp_path)
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match="is not text in UTF-8; give the path of a CSV file"):
        read_trace(path)


# Fleets.


def test_a_trace_replaces_speeds_and_links() -> None:
    trace = Trace(np.array([1.0, 2.0]), np.array([8.0, 16.0]), np.array([4.0, math.inf]), {1: (3.0, 4.0)})
    fleet = Fleet(2, step_seconds=9.0, uplink_mbps=1.0, downlink_mbps=1.0, model_megabytes=1.0, trace=trace)
    assert fleet.step_times.tolist() == [1.0, 2.0]
    assert fleet.up_times.tolist() == [1.0, 0.5]
    assert fleet.down_times.tolist() == [2.0, 0.0]
    assert dict(fleet.absences) == {1: (3.0, 4.0)}
    assert fleet.lossy
    assert fleet.round_trip(10) == 20.5


def test_a_trace_must_fit_its_fleet() -> None:
    ones = np.ones(3)
    with pytest.raises(UserError, match="3 clients but num_clients is 4"):
        Fleet(4, trace=Trace(ones, ones, ones))
