"""Uploads that are sent unrequested: in the background, or occupying the client until they end."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS
from defedavg.algorithms.protocol import UPLOADS
from defedavg.errors import UserError
from defedavg.planning.devices import Fleet, Trace
from defedavg.planning.plan import Plan
from defedavg.planning.records import Absence, Stall
from defedavg.planning.sparse_simulator import make_simulator_for
from helpers.naive_simulator import agrees_with_naive
from helpers.strategies import Case, bounded, case, cases, equal_speeds, variants

ROUNDS = 20
BROADCASTING = ("defedavg-iid", "asysg")


def with_upload(found: Case, upload: str) -> Case:
    return dataclasses.replace(found, fleet=dataclasses.replace(found.fleet, upload=upload))


def in_background(**options: Any) -> st.SearchStrategy[Case]:
    """Draw cases with background uploads."""
    return cases(BROADCASTING, **options).map(lambda found: with_upload(found, "background"))


# Closed forms.


@bounded(100)
@given(
    job=st.sampled_from([0.5, 0.75, 2.0]),
    up=st.sampled_from([0.25, 1.0, 4.0]),
    down=st.sampled_from([0.125, 2.0]),
    upload=st.sampled_from(["background", "blocking"]),
    until=st.integers(1, 4000).map(lambda number: number / 64),
)
def test_the_number_of_rounds_has_a_closed_form(job: float, up: float, down: float, upload: str, until: float) -> None:
    """One client makes a version every 1/4 s without transfers; the other always finds a newer one.

    So the first client merges floor(4·t) updates until t. The other merges one every ``job`` seconds if its uploads
    are in the background, and one every ``job + up`` seconds if they occupy it. All times are binary fractions.
    """
    trace = Trace(np.array([0.25, job]), np.array([math.inf, 8.0 / up]), np.array([math.inf, 8.0 / down]))
    found = case("defedavg-iid", 2, 1, steps=1, trace=trace, model_megabytes=1.0, upload=upload)
    rounds = found.plan(math.floor(until * 4) + math.floor(until * 2) + 1).rounds
    slow = (until - down - up) / job if upload == "background" else (until - down) / (job + up)
    assert sum(record.time <= until for record in rounds) == math.floor(until * 4) + max(0, math.floor(slow))
    merged = [record.merge.updates[0][0] for record in rounds if record.time <= until]
    assert sum(update.client for update in merged) == max(0, math.floor(slow))


def test_several_uploads_of_one_client_are_in_flight() -> None:
    trace = Trace(np.array([0.25, 0.5]), np.array([math.inf, 2.0]), np.array([math.inf, math.inf]))
    plan = case("defedavg-iid", 2, 1, steps=1, trace=trace, model_megabytes=1.0).plan(80)
    uploads = [upload for upload in plan.uploads if upload.client == 1]
    assert {upload.end - upload.start for upload in uploads} == {4.0}
    middle = [upload.start for upload in uploads if 8.0 < upload.start < 12.0]
    assert middle == [8.5 + 0.5 * number for number in range(7)]
    # An upload that starts now joins the seven that started in the last four seconds.
    assert all(sum(other.start <= now < other.end for other in uploads) == 8 for now in middle)


@pytest.mark.parametrize("upload", UPLOADS)
def test_a_single_client_waits_for_its_own_merge(upload: str) -> None:
    """It never trains twice from one version, so a round is a download, a job and an upload, whatever the setting."""
    plan = case("defedavg-iid", 1, 1, steps=4, upload=upload, **equal_speeds()).plan(25)
    assert [record.time for record in plan.rounds] == pytest.approx([2.0 * (number + 1) for number in range(25)])


# Meaning.


@bounded(100)
@given(cases(BROADCASTING), st.sampled_from(UPLOADS))
def test_a_job_and_uploads_overlap_only_in_the_background(found: Case, upload: str) -> None:
    plan = with_upload(found, upload).plan(ROUNDS)
    plan.check()
    ends = {(record.client, record.index): record.end for record in plan.uploads}
    overlaps = blocked = 0
    jobs = sorted(plan.jobs, key=lambda job: (job.client, job.index))
    for before, after in itertools.pairwise(jobs):
        if before.client == after.client:
            arrival = ends[before.client, before.index]
            overlaps += after.start < arrival
            blocked += before.end < arrival
    if upload == "blocking" or not ALGORITHMS[found.algorithm].overlaps_uploads(found.settings):
        assert overlaps == 0
    assert overlaps <= blocked


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("upload", ["background", "blocking"])
def test_the_setting_changes_plans_of_algorithms_that_overlap_uploads_alone(name: str, upload: str) -> None:
    kind = ALGORITHMS[name]
    for settings in variants(kind):
        arguments: dict[str, Any] = {"settings": settings, "steps": 4, "step_seconds": 0.02, "timeout": 1.0}
        own, other = (case(name, 6, 2, upload=word, jitter=1.0, **arguments).plan(30) for word in ("auto", upload))
        is_own = (upload == "background") == kind.client_policy(settings).background_upload
        assert (own.records != other.records) == (kind.overlaps_uploads(settings) and not is_own)
        assert own.header == other.header


def test_an_unknown_upload_is_refused() -> None:
    with pytest.raises(UserError, match="upload is sometimes; it must be one of auto, background, blocking"):
        Fleet(3, upload="sometimes")


# Failures.


def test_an_upload_in_flight_arrives_after_its_client_failed() -> None:
    """The client fails at 2.25 s with two uploads in flight and a running job: only the job is lost."""
    absences = {1: (2.25, math.inf)}
    trace = Trace(np.array([0.25, 0.5]), np.array([math.inf, 4.0]), np.array([math.inf, math.inf]), absences)
    arguments: dict[str, Any] = {"steps": 1, "timeout": 60.0, "trace": trace, "model_megabytes": 0.5}
    plan = case("defedavg-iid", 2, 1, **arguments).plan(40)
    plan.check()
    of_client = [job for job in plan.jobs if job.client == 1]
    assert [(job.end, job.outcome) for job in of_client] == [
        (0.5, "ended"),
        (1.0, "ended"),
        (1.5, "ended"),
        (2.0, "ended"),
        (2.25, "lost"),
    ]
    merged = {u.index: r.time for r in plan.rounds for u, _ in r.merge.updates if u.client == 1}
    assert merged == {0: 1.5, 1: 2.0, 2: 2.5, 3: 3.0}
    blocked = case("defedavg-iid", 2, 1, **arguments, upload="blocking").plan(40)
    # Jobs end at 0.5 and 2.0 s; the second upload is lost with its client.
    merged = {u.index: r.time for r in blocked.rounds for u, _ in r.merge.updates if u.client == 1}
    assert merged == {0: 1.5}


def last_leaves(name: str, updates: int, timeout: float | None = None, **trace: Any) -> Plan:
    """Plan two clients that leave for good, one at once and one at 10 s, during an upload from 4.02 to 21.62 s."""
    absences = {0: (10.0, math.inf), 1: (0.0, math.inf)}
    fleet = Trace(np.full(2, 0.01), np.full(2, 1.0), np.full(2, 5.0), absences)
    plan = case(name, 2, updates, steps=50, timeout=timeout, trace=fleet, model_megabytes=2.2, **trace).plan(3)
    plan.check()
    return plan


@pytest.mark.parametrize("name", ["defedavg-iid", "defedavg-niid", "asysg"])
def test_an_upload_in_flight_arrives_after_the_last_client_left_for_good(name: str) -> None:
    plan = last_leaves(name, 1, timeout=60.0)
    (upload,) = plan.uploads
    assert upload.start < 10.0 < upload.end
    (merged,) = plan.rounds
    assert merged.time == upload.end
    assert [(u.client, u.index) for u, _ in merged.merge.updates] == [(0, 0)]
    assert plan.records[-1] == Stall(upload.end)
    if name == "defedavg-iid":
        assert upload.end == pytest.approx(21.62)


def test_the_plan_ends_with_the_last_arrival_and_not_with_a_timer() -> None:
    """A round of two updates receives one: timeouts that would expire later are not handled."""
    for timeout in (60.0, 0.1):
        plan = last_leaves("defedavg-iid", 2, timeout=timeout)
        (upload,) = plan.uploads
        assert not plan.rounds
        assert plan.records[-1] == Stall(upload.end)
    blocked = last_leaves("defedavg-iid", 1, timeout=1.0, upload="blocking")
    assert not blocked.rounds
    assert blocked.records[-1] == Stall(10.0)


@pytest.mark.parametrize("name", ["favano", "quafl"])
def test_intervals_of_the_server_end_when_nothing_is_in_flight(name: str) -> None:
    plan = last_leaves(name, 1, timeout=5.0)
    (stall,) = (record for record in plan.records if isinstance(record, Stall))
    assert stall.time == max(10.0, *(upload.end for upload in plan.uploads))


@bounded(100)
@given(in_background(lossy=True, windows=False))
def test_every_background_upload_arrives(found: Case) -> None:
    """An update that was sent is merged, or is in a buffer or in flight when the plan ends."""
    plan = found.plan(ROUNDS)
    assume(len(plan.rounds) == ROUNDS)
    assume(ALGORITHMS[found.algorithm].overlaps_uploads(found.settings))
    merged = {(u.client, u.index) for record in plan.rounds for u, _ in record.merge.updates}
    arrived = {(u.client, u.index) for u in plan.uploads if u.end < plan.seconds}
    assert arrived <= merged
    lost = {(job.client, job.index) for job in plan.jobs if job.outcome == "lost"}
    assert not lost & merged
    assert len(lost) <= sum(isinstance(record, Absence) for record in plan.records)


# The same plans from other simulators.


@bounded(150)
@given(in_background())
def test_the_naive_simulator_agrees(found: Case) -> None:
    agrees_with_naive(found, ROUNDS)


@bounded(150)
@given(in_background(lossy=True, windows=False))
def test_the_naive_simulator_agrees_if_clients_fail(found: Case) -> None:
    agrees_with_naive(found, ROUNDS)


@bounded(100)
@given(in_background(windows=False), st.sampled_from([0.05, 0.3, 3.0]))
def test_the_naive_simulator_agrees_with_timeouts(found: Case, timeout: float) -> None:
    setup = dataclasses.replace(found.setup, timeout_seconds=timeout)
    agrees_with_naive(dataclasses.replace(found, setup=setup), ROUNDS)


@bounded(150)
@given(in_background())
def test_the_sparse_simulator_agrees(found: Case) -> None:
    whole = found.plan(ROUNDS)
    part = Plan.collect(make_simulator_for(found.server(), found.fleet, "used"), ROUNDS)
    part.check()
    assert [(record.time, record.merge) for record in part.rounds] == [(r.time, r.merge) for r in whole.rounds]
    assert {(u.client, u.index, u.start, u.end) for u in part.uploads} == {
        (u.client, u.index, u.start, u.end) for u in whole.uploads
    }
