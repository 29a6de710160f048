"""Plans with state vectors as data: files read back exactly, and damaged ones are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import Setup
from defedavg.algorithms.mifa import Mifa
from defedavg.algorithms.protocol import StateVector
from defedavg.errors import UserError
from defedavg.planning.devices import Fleet
from defedavg.planning.plan import Plan
from defedavg.planning.plan_checks import checked_for_use
from defedavg.planning.plan_io import read_extension
from defedavg.planning.plan_stats import summarise
from defedavg.planning.simulator import Simulator
from helpers.stateful_algorithms import Corrected
from helpers.strategies import bounded

SETUP, FLEET = Setup(10, 3, 2), Fleet(10)
PLANS = {kind.name: Plan.collect(Simulator(kind(SETUP), FLEET), 6) for kind in (Mifa, Corrected)}


@pytest.mark.parametrize("name", ["plan.jsonl", "plan.jsonl.gz"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_a_plan_with_state_reads_back_exactly(tmp_path: Path, name: str, plan: Plan) -> None:
    plan.save(tmp_path / name)
    again = Plan.load(tmp_path / name)
    assert again == plan
    assert again.hash() == plan.hash()
    assert summarise(again, FLEET) == summarise(plan, FLEET)
    again.check()


def test_a_header_has_what_jobs_start_from_and_what_corrects_them() -> None:
    mifa, corrected = (json.loads(next(PLANS[name].lines())) for name in ("mifa", "corrected"))
    assert (mifa["format_version"], corrected["format_version"]) == (2, 2)
    assert "correction" not in mifa  # so that the hashes of plans without one do not depend on the later key
    assert corrected["correction"] == [["drift", 0.3]]
    assert corrected["job_start"] == [["version", 0.5], ["model", 0.5]]
    assert corrected["state"] == [["model", 10, "model", True], ["drift", 10, "zero", True]]


def lines(plan: Plan) -> list[Any]:
    return [json.loads(line) for line in plan.lines()]


def load(folder: Path, found: list[Any]) -> list[Any]:
    """Load and check a plan from lines of JSON."""
    path = folder / "plan"
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    plan = Plan.load(path)
    return list(checked_for_use(plan.header, plan.records))


def refused(folder: Path, found: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(folder, found)
    assert "\n" not in str(caught.value)


HEADERS: list[tuple[dict[str, Any], str]] = [
    ({"state": 3}, "line 1: .*not an array"),
    ({"state": [3]}, "line 1: .*not an array"),
    ({"state": [["sum"]]}, "line 1: "),
    ({"state": [["sum", -1, "zero", False]]}, "line 1: .*below zero"),
    ({"state": [["sum", 1.5, "zero", False]]}, "line 1: .*not a whole number"),
    ({"state": [[1, 1, "zero", False]]}, "line 1: .*not text"),
    ({"state": [["sum", 1, None, False]]}, "line 1: .*not text"),
    ({"state": [["sum", 1, "zero", 0]]}, "line 1: .*not true or false"),
    ({"job_start": [["version", 10**400]]}, "line 1: "),
    ({"job_start": [["version", None]]}, "line 1: .*not a finite number"),
    ({"job_start": [["version"]]}, "line 1: "),
    ({"correction": "drift"}, "line 1: .*not an array"),
    ({"correction": [[0, 1.0]]}, "line 1: .*not text"),
    ({"more": []}, "line 1: .*wrong fields"),
    ({"state": []}, "names 'model'; declare it in state_vectors"),
    ({"state": [["model", 10**30, "model", True], ["drift", 10, "zero", True]]}, "correct the count"),
    ({"state": [["model", 10, "x" * 10_000, True], ["drift", 10, "zero", True]]}, "initial value of 'model' is 'xxx"),
    ({"state": [["Model x", 1, "zero", False]]}, "needs another name"),
    ({"job_start": [["nothing", 1.0]]}, "job_start names 'nothing'"),
    ({"correction": [["version", 1.0]]}, "correction names 'version'"),
]


@pytest.mark.parametrize(("change", "message"), HEADERS, ids=range(len(HEADERS)))
def test_a_damaged_header_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    found = lines(PLANS["corrected"])
    load(tmp_path, found)
    refused(tmp_path, [found[0] | change, *found[1:]], message)


UPDATE = [0, 0, 0, 2, 1.0]
DAMAGED: list[tuple[Any, str]] = [
    ([], "unknown fields"),
    (None, "unknown fields"),
    ({"during": []}, "unknown fields"),
    ({"states": None}, "not an array"),
    ({"states": [["sum", 0]]}, "line "),
    ({"states": [["sum", -1, 1.0]]}, "below zero"),
    ({"states": [["sum", 0, "x"]]}, "not a finite number"),
    ({"states": [["sum", 0, 10**400]]}, "line "),
    ({"states": [[None, 0, 1.0]]}, "not text"),
    ({"states": [["sum", 10**30, 1.0]]}, r"names the state vector sum\[10{30}\]; declare it"),
    ({"states": [["mean", 0, 1.0]]}, r"names the state vector mean\[0\]; declare it"),
    ({"after": [["sum", 0, [], [], []]]}, "line "),
    ({"after": [["sum", -1, [], [], [], ""]]}, "below zero"),
    ({"after": [["sum", 0, [], [], [], 8]]}, "not text"),
    ({"after": [["sum", 0, [], [], [], "quantise(99)"]]}, "write quantise"),
    ({"after": [["sum", 0, [], [], [], "x" * 10_000]]}, "the transform is 'x{40}'"),
    ({"after": [["sum", 0, [[99, 1.0]], [], [], ""]]}, "an assignment uses version 99"),
    ({"before": [["sum", 0, [], [UPDATE], [], ""]]}, "which the merge does not name"),
    ({"before": [["last", 10, [], [], [], ""]]}, r"names the state vector last\[10\]"),
    ({"before": {"sum": 1}}, "not an array"),
    ({"rate_scale": -1.0}, "its rate_scale is -1.0"),
    ({"rate_scale": True}, "not a finite number"),
]


@pytest.mark.parametrize(("extension", "message"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_extension_is_refused(tmp_path: Path, extension: Any, message: str) -> None:
    found = lines(PLANS["mifa"])
    number = max(number for number, line in enumerate(found) if number and line[0] == "round")
    found[number] = [*found[number][:6], extension]
    refused(tmp_path, found, message)


GARBAGE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["sum", "last"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["states", "after"]), inner),
    max_leaves=12,
)


@bounded(300)
@given(
    st.dictionaries(st.sampled_from(["states", "before", "after", "rate_scale", "other"]), GARBAGE, max_size=3)
    | st.builds(lambda row: {"after": [["sum", 0, *row]]}, st.lists(GARBAGE, min_size=3, max_size=5))
    | GARBAGE
)
def test_any_json_is_an_extension_or_is_refused(garbage: Any) -> None:
    try:
        found = read_extension(json.loads(json.dumps(garbage)))
    except (ValueError, TypeError, OverflowError):
        return
    assert found.keys() == {"states", "before", "after", "rate_scale"}
    assert type(found["rate_scale"]) is float
    for assignment in (*found["before"], *found["after"]):
        assert isinstance(assignment.target, StateVector)
        assert assignment.target.index >= 0
        assert type(assignment.transform) is str
