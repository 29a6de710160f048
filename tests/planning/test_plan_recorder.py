"""A plan that is recorded while an executor reads ahead is the plan of the rounds that were computed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.planning.plan import Plan
from defedavg.planning.plan_recorder import PlanRecorder
from defedavg.planning.plan_writer import PlanWriter
from defedavg.planning.records import Record, Round
from helpers.strategies import Case, bounded, case, cases


def recorded(found: Case, rounds: int, ahead: int, steps: list[int]) -> Plan:
    """The plan of some rounds, committed in several steps, with an executor that has read further."""
    simulator = found.simulator()
    records: list[Record] = []
    recorder = PlanRecorder(simulator, records.append)
    reader = (record for record in recorder if isinstance(record, Round))
    for _ in itertools.islice(reader, rounds + ahead):
        pass
    for step in sorted(step for step in steps if step < rounds):
        recorder.commit(step)
    recorder.finish(rounds)
    return Plan(simulator.header, tuple(records))


@bounded(60)
@given(
    st.booleans().flatmap(lambda lossy: cases(lossy=lossy)),
    st.integers(0, 9),
    st.integers(0, 6),
    st.lists(st.integers(0, 9), max_size=3),
)
def test_reading_ahead_changes_no_plan(found: Case, rounds: int, ahead: int, steps: list[int]) -> None:
    whole = found.plan(rounds)
    if len(whole.rounds) == rounds:  # not every client is lost
        assert recorded(found, rounds, ahead, steps) == whole


def test_a_plan_that_no_executor_reads_is_recorded_too() -> None:
    found = case("defedavg-iid", 5, 2, seed=1)
    simulator = found.simulator()
    records: list[Record] = []
    recorder = PlanRecorder(simulator, records.append)
    recorder.finish(8)
    assert Plan(simulator.header, tuple(records)) == found.plan(8)


@pytest.mark.parametrize("rounds", [3, 400])
def test_a_plan_is_written_record_by_record(tmp_path: Path, rounds: int) -> None:
    plan = case("fedbuff", 12, 3, seed=2).plan(rounds)
    path = tmp_path / "plan.jsonl.gz"
    writer = PlanWriter(path, plan.header)
    for record in plan.records:
        writer.add(record)
        assert not path.exists()
    assert writer.close() == plan.hash()
    assert Plan.load(path) == plan
    again = PlanWriter(tmp_path / "again.jsonl.gz", plan.header)
    for record in plan.records:
        again.add(record)
    again.close()
    assert (tmp_path / "again.jsonl.gz").read_bytes() == path.read_bytes()


def test_an_incomplete_plan_is_discarded(tmp_path: Path) -> None:
    plan = case("fedavg", 4, 2).plan(2)
    writer = PlanWriter(tmp_path / "plan.jsonl.gz", plan.header)
    writer.add(plan.records[0])
    writer.discard()
    assert list(tmp_path.iterdir()) == []
