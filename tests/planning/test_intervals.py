"""Availability in several intervals: look-up, traces, both simulators, and the check of plans."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS
from defedavg.config.build import make_plan
from defedavg.config.study import study
from defedavg.errors import IgnoredWarning, UserError
from defedavg.planning.availability_checks import available
from defedavg.planning.devices import Fleet, Trace, Windows
from defedavg.planning.intervals import Intervals
from defedavg.planning.plan import Plan
from defedavg.planning.plan_checks import PlanError
from defedavg.planning.records import Job, Stall, Uploaded
from defedavg.planning.sparse_simulator import make_simulator_for
from defedavg.planning.traces import read_trace
from helpers.naive_simulator import agrees_with_naive
from helpers.strategies import Case, bounded, case, cases, intervals, traces

ROUNDS = 10
HEADER = "client,step_seconds,up_mbps,down_mbps,available_from,available_to"
REPEATED = HEADER + ",repeat_every"


@st.composite
def cases_with_intervals(draw: st.DrawFn, *, end: bool = False) -> Case:
    """Draw any algorithm on clients with several intervals."""
    found = draw(cases(windows=False))
    size = found.fleet.num_clients
    trace = dataclasses.replace(draw(traces(size)), intervals=draw(intervals(size, end=end)))
    fleet = dataclasses.replace(found.fleet, trace=trace)
    steps = ALGORITHMS[found.algorithm].steps_per_job(found.setup.local_steps)
    timeout = 10.0 * fleet.round_trip(steps) if fleet.lossy else None
    return dataclasses.replace(found, fleet=fleet, setup=dataclasses.replace(found.setup, timeout_seconds=timeout))


def is_open(found: Intervals, client: int, time: float) -> bool:
    """Return whether a client is reachable, by looking at every interval of every cycle."""
    first, stop = found.offsets[client : client + 2]
    period = found.periods[client]
    cycles = range(int(time / period) + 2) if math.isfinite(period) else (None,)
    return any(
        found.starts[i] + shift <= time < found.ends[i] + shift
        for cycle in cycles
        for shift in [0.0 if cycle is None else cycle * period]
        for i in range(first, stop)
    )


# Look-up.


@bounded(200)
@given(st.integers(1, 5).flatmap(lambda size: intervals(size, end=True)), st.lists(st.floats(0, 50), max_size=8))
def test_an_opening_is_the_first_time_at_which_the_client_is_reachable(found: Intervals, times: list[float]) -> None:
    for client, time in itertools.product(range(len(found.periods)), [*times, 0.0, 0.25, 0.5, 2.0, 2.25]):
        opens = found.opens(client, time)
        assert opens >= time
        if math.isinf(opens):
            assert time >= found.ends_at[client]
            continue
        # At an edge, the sum of a period and a time may be rounded.
        near = {is_open(found, client, moment) for moment in (time, time + 1e-9, max(0.0, time - 1e-9))}
        assert (opens == time) in near
        assert found.opens(client, opens) == opens
        assert found.opens(client, 0.5 * (time + opens)) == (time if opens == time else opens)
        assert opens - time <= found.longest_closed + 1e-12
        assert opens == time or is_open(found, client, opens + 1e-6)


@bounded(200)
@given(st.integers(1, 6).flatmap(lambda size: intervals(size, end=True)), st.data())
def test_openings_of_many_clients_equal_those_of_each(found: Intervals, data: st.DataObject) -> None:
    moments = st.floats(0, 1e6) | st.sampled_from([0.0, 0.5, 2.0, 4.0, 2.5])
    pairs = data.draw(st.lists(st.tuples(st.integers(0, len(found.periods) - 1), moments), min_size=1, max_size=20))
    clients, times = np.array([client for client, _ in pairs]), np.array([time for _, time in pairs])
    assert found.opens_all(clients, times).tolist() == [found.opens(client, time) for client, time in pairs]
    assert found.opens_all(clients, np.full(len(pairs), np.inf)).tolist() == [math.inf] * len(pairs)


def test_what_is_beyond_a_period_is_at_its_start() -> None:
    night = Intervals.of([([(79200.0, 108000.0)], 86400.0)])
    hours = [night.opens(0, hour * 3600.0) / 3600.0 for hour in (0, 5, 6, 12, 22, 23, 24, 30, 31)]
    assert hours == [0, 5, 22, 22, 22, 23, 24, 46, 46]
    assert night.longest_closed == 16 * 3600.0


# Simulators.


@bounded(150)
@given(cases_with_intervals())
def test_the_simulator_agrees_with_the_naive_one(found: Case) -> None:
    agrees_with_naive(found, ROUNDS).check(found.fleet)


@bounded(250)
@given(cases_with_intervals(end=True))
def test_omitting_unused_jobs_changes_no_round(found: Case) -> None:
    kind = ALGORITHMS[found.algorithm]
    policy = kind.client_policy(found.settings)
    assume(kind.broadcasts or policy.pause_when_full or not policy.hold_until_requested)
    eager = policy.hold_until_requested and not policy.pause_when_full
    assume(not (eager and found.fleet.jitter))  # NumPy's cosine and C's may differ in the last bit
    whole = found.plan(ROUNDS)
    part = Plan.collect(make_simulator_for(found.server(), found.fleet, "used"), ROUNDS)

    def order(record: Job | Uploaded) -> tuple[int, int]:
        return record.client, record.index

    assert [(r.time, r.merge) for r in part.rounds] == [(r.time, r.merge) for r in whole.rounds]
    assert sorted(part.uploads, key=order) == sorted(whole.uploads, key=order)
    sent = {order(upload) for upload in whole.uploads}
    assert sorted(part.jobs, key=order) == sorted((j for j in whole.jobs if order(j) in sent), key=order)
    for plan in (whole, part):
        plan.check(found.fleet)


def fleet_of(*clients: tuple[list[tuple[float, float]], float]) -> dict[str, Any]:
    ones = np.ones(len(clients))
    return {"trace": Trace(0.01 * ones, math.inf * ones, math.inf * ones, intervals=Intervals.of(clients))}


def test_a_plan_ends_when_the_intervals_of_all_clients_have_ended() -> None:
    for name in ("fedavg", "defedavg-iid", "defedavg-niid", "fedbuff"):
        fleet = fleet_of(*[([(0.0, 0.2), (0.5, 0.6)], math.inf)] * 3)
        found = case(name, 3, 2, timeout=2.0, **fleet)
        plan = found.plan(1000)
        assert isinstance([record for record in plan.records if not isinstance(record, Job)][-1], Stall)
        starts = [job.start for job in plan.jobs]
        assert starts
        assert all(start < 0.2 or 0.5 <= start < 0.6 for start in starts)
        assert max(starts) >= 0.5


def test_a_client_whose_intervals_end_is_replaced() -> None:
    found = case("fedavg", 3, 2, timeout=0.5, **fleet_of(([(0.0, 0.1)], math.inf), *[([(0.0, 0.6)], 1.0)] * 2))
    assert found.fleet.lossy
    assert len(found.plan(50).rounds) == 50


# The check.


def test_a_plan_that_does_not_obey_availability_is_refused() -> None:
    found = case("defedavg-niid", 4, 2, **fleet_of(*[([(0.0, 0.12), (0.3, 0.41)], 0.7)] * 4))
    plan = found.plan(20)
    plan.check(found.fleet)
    narrow = dataclasses.replace(found.fleet, **fleet_of(*[([(0.0, 0.12), (0.3, 0.35)], 0.7)] * 4))
    with pytest.raises(PlanError, match=r"client \d starts at .* s, but the client is not available until"):
        plan.check(narrow)
    jobs = {(job.client, job.index): job for job in plan.jobs}
    held = next(r for r in plan.uploads if jobs[r.client, r.index].end < r.start)
    late = [held._replace(start=0.6) if record is held else record for record in plan.records]
    with pytest.raises(PlanError, match=r"the upload of job .* starts at 0.6 s"):
        list(available(found.fleet, late))
    with pytest.raises(PlanError, match="not available"):
        plan.check(dataclasses.replace(found.fleet, trace=None, availability=Windows(0.01, 9.0)))


# Traces.


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_several_rows_per_client_are_read(tmp_path: Path) -> None:
    rows = ("1;2;3;inf;10;20;86400", "0;1;1;1;50;;", "1;2;3;inf;0;5;86400")
    trace = read_trace(written(tmp_path, REPEATED.replace(",", ";"), *rows))
    assert trace.step_seconds.tolist() == [1.0, 2.0]
    assert trace.intervals is not None
    assert trace.intervals.offsets.tolist() == [0, 1, 3]
    assert trace.intervals.starts.tolist() == [50.0, 0.0, 10.0]
    assert trace.intervals.ends.tolist() == [math.inf, 5.0, 20.0]
    assert trace.intervals.periods.tolist() == [math.inf, 86400.0]
    assert (dict(trace.absences), trace.names) == ({}, ())


def test_names_are_numbered_as_they_appear(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HEADER, "pixel,3,1,1,0,1", "7,1,1,1,0,", "pixel,3,1,1,5,6", "a;b,2,1,1,0,"))
    assert trace.names == ("pixel", "7", "a;b")
    assert trace.step_seconds.tolist() == [3.0, 1.0, 2.0]


def test_unknown_columns_are_ignored_with_a_note(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + ",os,model", "0,1,1,1,0,9,x,y")
    with pytest.warns(IgnoredWarning, match=r"trace.csv: ignored the columns 'os', 'model'; known: client,"):
        assert read_trace(path).intervals is not None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((HEADER.rpartition(",")[0], "0,1,1,1,0"), "line 1: the columns must be"),
        ((HEADER, "0,1,1,1,0,5", "0,1,1,1,4,9"), "line 3: an interval of client 0 overlaps that of line 2; join"),
        ((REPEATED, "0,1,1,1,1,2,10", "0,1,1,1,9,12,10"), "line 2: an interval of client 0 overlaps that of line 3"),
        ((HEADER, "0,1,1,1,5,4"), "line 2: available_to is 4; it must be after available_from, which is 5"),
        ((HEADER, "0,1,1,1,5,5"), "line 2: available_to is 5; it must be after"),
        ((HEADER, "0,1,1,1,,"), "line 2: client 0 has no interval, so it is never available"),
        ((HEADER, "x,1,1,1,0,1", "x,1,1,1,,"), "line 3: client x has no interval"),
        ((HEADER, "0,1,1,1,-1,5"), "line 2: available_from and available_to must be from 0"),
        ((HEADER, "0,1,1,1,0,2e12"), "line 2: available_from and available_to must be from 0"),
        ((HEADER, "0,1,1,1,inf,"), "line 2: available_from"),
        ((HEADER, "0,1,1,1,soon,5"), "line 2: available_from is 'soon', not a number"),
        ((HEADER, "0,1,1,1,0,nan"), "line 2: available_to is not a number"),
        ((HEADER, "0,1,1,1,0,1", "0,2,1,1,2,3"), "line 3: step_seconds of client 0 is 2, but 1 in line 2"),
        ((REPEATED, "0,1,1,1,0,1,9", "0,1,1,1,2,3,"), "line 3: repeat_every of client 0 is inf, but 9 in line 2"),
        ((REPEATED, "0,1,1,1,0,1,0"), "line 2: repeat_every must be above zero"),
        ((REPEATED, "0,1,1,1,0,1,2e12"), "line 2: repeat_every must be above zero and at most"),
        ((REPEATED, "0,1,1,1,10,11,10"), "line 2: the interval from 10 to 11 does not fit into repeat_every"),
        ((REPEATED, "0,1,1,1,0,11,10"), "line 2: the interval from 0 to 11 does not fit into repeat_every"),
        ((REPEATED, "0,1,1,1,3,,10"), "line 2: the interval from 3 to inf does not fit into repeat_every"),
    ],
)
def test_invalid_intervals_are_refused_by_line(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_trace(written(tmp_path, *lines))
    assert str(caught.value).startswith(str(tmp_path / "trace.csv"))
    assert "\n" not in str(caught.value)


def test_a_study_uses_the_intervals_of_its_trace(tmp_path: Path) -> None:
    rows = [f"p{i},0.01,inf,inf,{start},{start + 0.2 + 0.1 * i},3" for i in range(3) for start in (0.5, 1.5)]
    path = written(tmp_path, REPEATED, *rows)
    settings = study({"clients": {"trace": str(path)}, "training": {"updates_per_round": 2, "local_steps": 5}})
    plan = make_plan(settings.points()[0].settings, 0, 30)
    starts = [job.start % 3 for job in plan.jobs]
    assert min(starts) >= 0.5
    assert not any(0.9 < start < 1.5 for start in starts)
    with pytest.raises(UserError, match="the trace says when clients are available"):
        Fleet(3, trace=read_trace(path), availability=Windows(1, 1))
