"""Traces from files of other projects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from defedavg.errors import UserError
from defedavg.planning.trace_conversion import Conversion, convert
from defedavg.planning.traces import read_trace

MEASURED = "phone,day_offset,seconds,ready_from,ready_to"


def file(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def spans(found: Conversion, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Read the trace that was made; return the intervals of every client."""
    trace = read_trace(file(folder, "made.csv", found.text))
    assert trace.intervals is not None
    pairs = list(zip(trace.intervals.starts.tolist(), trace.intervals.ends.tolist(), strict=True))
    offsets = trace.intervals.offsets
    names = trace.names or tuple(str(i) for i in range(len(offsets) - 1))
    return {name: pairs[offsets[i] : offsets[i + 1]] for i, name in enumerate(names)}


def test_fedscale(tmp_path: Path) -> None:
    behaviour = {
        "0": {"duration": 30, "active": [10, 50], "inactive": [20, 70.5], "finish_time": 100, "model": "x"},
        "1": {"duration": 0, "active": [5, 7, 30], "inactive": [7, 9, 30], "finish_time": 90},
    }
    found = convert(file(tmp_path, "behave.json", behaviour), "fedscale")
    assert spans(found, tmp_path) == {"0": [(10, 20), (50, 70.5)], "1": [(5, 9)]}
    assert (found.clients, found.intervals, found.notes) == (2, 3, ())
    trace = read_trace(tmp_path / "made.csv")
    assert trace.intervals is not None
    assert trace.intervals.periods.tolist() == [100.0, 90.0]


def test_flhetbench_json(tmp_path: Path) -> None:
    messages = (
        "2020-01-01 23:59:00\tbattery_charged_on\n2020-01-01 23:59:30\tScreen_off\n\n2020-01-02 00:00:00\twifi\n"
        "2020-01-02 00:00:10\t87.0%\n2020-01-02 00:01:00\t4G\n2020-01-02 00:02:00\tscreen_lock\n"
        "2020-01-02 00:03:00\twifi\n2020-01-02 00:03:30\tscreen_on\n2020-01-02 00:04:00\tbattery_charged_off"
    )
    timers = {
        "a": {"isSuccess": True, "trace_start": 0, "trace_end": 1000.0, "ready_time": [[1, 2], [900, 1000]]},
        "b": [[5, 6], [1, 3]],
        "c": {"messages": messages, "model": "x"},
        "d": {"isSuccess": False, "trace_start": None, "trace_end": None, "ready_time": []},
    }
    found = convert(file(tmp_path, "timers.json", timers), "flhetbench")
    assert spans(found, tmp_path) == {"a": [(1, 2), (900, 1000)], "b": [(1, 3), (5, 6)], "c": [(60, 120), (240, 300)]}
    assert found.notes == ("left out 1 clients that are never available",)


def test_measured_intervals_start_at_midnight(tmp_path: Path) -> None:
    rows = ("681,80000,86400,0,10", "681,80000,86400,6000,7000", "7,0,172800,5,5", "9,0,172800,1,2")
    found = convert(file(tmp_path, "availability.csv", "\n".join((MEASURED, *rows))), "flhetbench")
    assert spans(found, tmp_path) == {
        "phone-681": [(0, 600), (80000, 80010), (86000, 86400)],
        "phone-9": [(1, 2)],
    }


def test_latencies_and_links_are_drawn_by_key(tmp_path: Path) -> None:
    source = file(tmp_path, "intervals.json", {f"p{i}": [[0, 9]] for i in range(200)})
    latency = file(
        tmp_path, "latency.csv", "phone_model,vit,vit_sd,resnet,resnet_sd\nA,,,50,1\nB,1,1,100,1\nC,,,400,\nD,,,0,0\n"
    )
    links = file(tmp_path, "links.csv", "up_mbps,down_mbps\n1,10\n2,20\n")
    found = convert(source, "flhetbench", latency=latency, links=links, step_seconds=2.0, seed=3)
    trace = read_trace(file(tmp_path, "made.csv", found.text))
    assert set(trace.step_seconds.tolist()) == {1.0, 2.0, 8.0}
    assert set(zip(trace.up_mbps.tolist(), trace.down_mbps.tolist(), strict=True)) == {(1.0, 10.0), (2.0, 20.0)}
    assert found.notes == ("left out 1 latencies that are empty, infinite or not above zero",)
    again = convert(source, "flhetbench", latency=latency, links=links, step_seconds=2.0, seed=3)
    other = convert(source, "flhetbench", latency=latency, links=links, step_seconds=2.0, seed=4)
    assert again == found
    assert other.text != found.text
    assert len(set(read_trace(file(tmp_path, "drawn.csv", convert(source, "flhetbench").text)).up_mbps)) > 150


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    for name, content in (("behave.pkl", b"{}"), ("client_behave_trace", b"\x80\x04\x95cos\nsystem")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=r"is a pickle, which can execute code and is never read.*json\.dump"):
            convert(tmp_path / name, "fedscale")


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("fedscale", "a.json", "{", "a.json is not valid JSON"),
        ("fedscale", "a.json", "[" * 100_000, "a.json is not valid JSON"),
        ("fedscale", "a.json", [1], "expected one entry per client"),
        ("fedscale", "a.json", {}, "no client that is ever available"),
        ("fedscale", "a.json", {"x": 3}, "client x: expected active, inactive and finish_time"),
        ("fedscale", "a.json", {"x": {"active": [1], "inactive": [], "finish_time": 9}}, "of the same length"),
        (
            "fedscale",
            "a.json",
            {"x": {"active": [1], "inactive": ["2"], "finish_time": 9}},
            "is str; it must be a number",
        ),
        ("fedscale", "a.json", {"x": {"active": [3], "inactive": [2], "finish_time": 9}}, "from 3 to 2 is reversed"),
        ("fedscale", "a.json", '{"x": {"active": [1], "inactive": [2], "finish_time": NaN}}', "finish_time is nan"),
        ("flhetbench", "a.json", {"x": {"ready": 1}}, "client x: expected messages, ready_time or a list"),
        ("flhetbench", "a.json", {"x": [[1, 2, 3]]}, "must be a pair"),
        ("flhetbench", "a.json", {"x": {"messages": "yesterday\twifi"}}, "does not start with a date"),
        ("flhetbench", "a.csv", "phone,seconds\n1,2\n", "line 1: the columns must be phone,day_offset"),
        ("flhetbench", "a.csv", MEASURED + "\n1,0,86400,9,5\n", "line 2: the interval from 9 to 5 is reversed"),
        ("flhetbench", "a.csv", MEASURED + "\n1,0,9,1,2\n1,0,8,3,4\n", "line 3: seconds is 8"),
        ("flhetbench", "a.csv", MEASURED + "\n1,0,x,1,2\n", "line 2: seconds is 'x', not a number"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, kind: str, name: str, content: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        convert(file(tmp_path, name, content), kind)
    assert "\n" not in str(caught.value)


def test_invalid_latencies_and_links_are_refused(tmp_path: Path) -> None:
    source = file(tmp_path, "intervals.json", {"p": [[0, 9]]})
    with pytest.raises(UserError, match=r"latency.csv has no latency above zero"):
        convert(source, "flhetbench", latency=file(tmp_path, "latency.csv", "phone_model,resnet\nA,\n"))
    with pytest.raises(UserError, match="every up_mbps and down_mbps must be above zero"):
        convert(source, "flhetbench", links=file(tmp_path, "links.csv", "up_mbps,down_mbps\n1,0\n"))
    with pytest.raises(UserError, match="does not exist"):
        convert(tmp_path / "missing.json", "fedscale")
