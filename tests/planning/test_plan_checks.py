"""``check`` reports every violated invariant: a valid plan passes, and each change that makes it invalid is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from defedavg.algorithms import ALGORITHMS
from defedavg.algorithms.protocol import Merge, Update
from defedavg.planning.plan import Plan
from defedavg.planning.plan_checks import PlanError
from defedavg.planning.records import Absence, Job, Record, Round, Sent, Stall, Timeout, Uploaded
from helpers.plans import GOOD, with_fields
from helpers.strategies import case, variants


def position(plan: Plan, kind: type[Any], good: Callable[[Any], bool] = lambda record: True) -> int:
    """Return the position of the first such record."""
    return next(i for i, record in enumerate(plan.records) if isinstance(record, kind) and good(record))


def swap(plan: Plan, i: int, *records: Record) -> Plan:
    """Return the plan with record i replaced by others (or none)."""
    return Plan(plan.header, (*plan.records[:i], *records, *plan.records[i + 1 :]))


def edit(plan: Plan, i: int, **changes: Any) -> Plan:
    return swap(plan, i, with_fields(plan.records[i], **changes))


def edit_merge(plan: Plan, i: int, **changes: Any) -> Plan:
    record = plan.records[i]
    assert isinstance(record, Round)
    return swap(plan, i, replace(record, merge=replace(record.merge, **changes)))


def assert_invalid(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan.check()


def round_at(version: int) -> int:
    return position(GOOD, Round, lambda record: record.merge.version == version)


def merged_at(version: int) -> Merge:
    record = GOOD.records[round_at(version)]
    assert isinstance(record, Round)
    return record.merge


JOB = position(GOOD, Job, lambda job: job.index == 1)
UPLOAD = position(GOOD, Uploaded)


def test_valid_plans_pass() -> None:
    GOOD.check()
    for name, kind in ALGORITHMS.items():
        for settings in variants(kind):
            case(name, 4, 2, settings=settings, step_seconds=0.05).plan(5).check()


def test_time_decreases() -> None:
    assert_invalid(edit(GOOD, round_at(4), time=0.01), "the time .* follows")
    assert_invalid(edit(GOOD, position(GOOD, Sent, lambda sent: sent.version == 3), time=0.0), "the time .* follows")
    assert_invalid(edit(GOOD, JOB, end=0.02, start=0.01), "the time .* follows|starts before|starts while")
    assert_invalid(Plan(GOOD.header, (*GOOD.records, Stall(0.0))), "the time .* follows")
    assert_invalid(Plan(GOOD.header, (*GOOD.records, Timeout(0.0, (1,), (2,)))), "the time .* follows")
    assert_invalid(Plan(GOOD.header, (*GOOD.records, Absence(0, 0.0, 1.0))), "the time .* follows")


@pytest.mark.parametrize("time", [math.nan, math.inf])
def test_time_is_finite(time: float) -> None:
    assert_invalid(edit(GOOD, round_at(4), time=time), "time")


def test_an_update_is_merged_twice() -> None:
    (old, weight), *_ = merged_at(3).updates
    _, *others = merged_at(4).updates
    assert_invalid(edit_merge(GOOD, round_at(4), updates=((old, weight), *others)), "merged twice|freed")
    # Also within one round.
    assert_invalid(edit_merge(GOOD, round_at(3), updates=((old, weight), (old, weight))), "merged twice")


def test_an_update_is_merged_before_it_arrives() -> None:
    update = merged_at(3).updates[0][0]
    i = position(GOOD, Uploaded, lambda upload: (upload.client, upload.index) == (update.client, update.index))
    merge_time = next(record.time for record in GOOD.rounds if record.merge.version == 3)
    assert_invalid(edit(GOOD, i, end=math.nextafter(merge_time, math.inf)), "before it arrived")
    assert_invalid(swap(GOOD, i), "before it arrived")


def test_an_update_without_a_job_is_merged() -> None:
    (_, weight), *others = merged_at(3).updates
    assert_invalid(
        edit_merge(GOOD, round_at(3), updates=((Update(0, 99, 0, 5), weight), *others)), "not a finished job"
    )


@pytest.mark.parametrize("changes", [{"version": 0}, {"steps": 4}])
def test_an_update_is_not_as_it_was_trained(changes: dict[str, int]) -> None:
    (update, weight), *others = merged_at(8).updates
    assert update.version > 0
    assert_invalid(
        edit_merge(GOOD, round_at(8), updates=((replace(update, **changes), weight), *others)), "not as it was trained"
    )


def test_a_start_version_does_not_exist_yet() -> None:
    assert_invalid(edit(GOOD, JOB, version=99), "does not exist")
    job = GOOD.records[JOB]
    assert isinstance(job, Job)
    newest = max(record.merge.version for record in GOOD.rounds if record.time <= job.end)
    made = next(record.time for record in GOOD.rounds if record.merge.version == newest)
    assert job.start < made  # created while the job ran
    assert_invalid(edit(GOOD, JOB, version=newest), "starts before version")


def test_two_jobs_start_from_one_version() -> None:
    job = GOOD.records[JOB]
    before = next(
        other for other in GOOD.jobs if isinstance(job, Job) and (other.client, other.index) == (job.client, 0)
    )
    kept = Plan(GOOD.header, tuple(replace(r, freed=()) if isinstance(r, Round) else r for r in GOOD.records))
    assert_invalid(edit(kept, JOB, version=before.version), "repeats version")
    repeats = replace(kept.header, allow_same_version=True)
    with pytest.raises(PlanError, match="not as it was trained"):  # fails only where it is merged
        Plan(repeats, edit(kept, JOB, version=before.version).records).check()


def test_jobs_overlap() -> None:
    job = GOOD.records[JOB]
    assert isinstance(job, Job)
    before = next(other for other in GOOD.jobs if (other.client, other.index) == (job.client, 0))
    records = tuple(replace(r, freed=()) if isinstance(r, Round) else r for r in GOOD.records)
    early = math.nextafter(before.end, 0.0)
    changes = {"start": early, "version": 0}
    plan = Plan(replace(GOOD.header, allow_same_version=True), records)
    assert_invalid(edit(plan, JOB, **changes), "while the previous one is running")


def test_a_job_is_out_of_order() -> None:
    assert_invalid(edit(GOOD, JOB, index=2), "out of order")
    assert_invalid(edit(GOOD, position(GOOD, Job), index=1), "out of order")
    assert_invalid(edit(GOOD, JOB, client=5), "out of range")
    assert_invalid(edit(GOOD, JOB, client=-1), "out of range")


def test_a_job_ends_before_it_starts() -> None:
    assert_invalid(edit(GOOD, position(GOOD, Job), start=1e6), "ends before it starts")


@pytest.mark.parametrize(("changes", "message"), [({"steps": 4}, "4 steps"), ({"steps": 6}, "6 steps")])
def test_a_complete_job_has_all_its_steps(changes: dict[str, Any], message: str) -> None:
    assert_invalid(edit(GOOD, JOB, **changes), message)
    assert_invalid(edit(GOOD, position(GOOD, Job, lambda job: job.outcome == "running"), **changes), message)


def test_a_lost_job_has_at_most_all_steps() -> None:
    assert_invalid(edit(GOOD, position(GOOD, Job), outcome="lost", steps=6), "more than 5 steps")


def test_an_interrupted_job_needs_an_interruptible_client() -> None:
    assert_invalid(edit(GOOD, JOB, outcome="interrupted", steps=3), "interrupted")


def test_a_running_job_has_not_ended() -> None:
    i = position(GOOD, Job, lambda job: job.outcome == "running")
    assert_invalid(edit(GOOD, i, end=math.nextafter(GOOD.seconds, 0.0)), "is running after|before it starts")


def test_an_upload_needs_a_finished_job() -> None:
    upload = GOOD.records[UPLOAD]
    assert isinstance(upload, Uploaded)
    i = position(GOOD, Job, lambda job: (job.client, job.index) == (upload.client, upload.index))
    assert_invalid(edit(GOOD, UPLOAD, index=99), "not a finished job")
    assert_invalid(edit(GOOD, i, outcome="lost"), "was lost")
    assert_invalid(edit(GOOD, UPLOAD, end=math.nextafter(upload.start, 0.0)), "ends before it starts")
    assert_invalid(swap(GOOD, UPLOAD, upload, upload), "second upload")
    assert_invalid(
        Plan(GOOD.header, (*GOOD.records, upload._replace(start=GOOD.seconds, end=GOOD.seconds + 1))), "a second one"
    )


def test_a_job_is_uploaded_after_its_end() -> None:
    """A running job is recorded with its future end; it cannot be uploaded before."""
    i = position(GOOD, Job, lambda job: job.outcome == "running")
    job = GOOD.records[i]
    assert isinstance(job, Job)
    early = Uploaded(job.client, job.index, GOOD.seconds, GOOD.seconds + 1.0)
    assert_invalid(Plan(GOOD.header, (*GOOD.records, early)), "upload")


def test_rounds_are_consecutive() -> None:
    assert_invalid(edit_merge(GOOD, round_at(3), version=4), "follows round 2")
    assert_invalid(edit_merge(GOOD, round_at(3), version=2), "follows round 2")
    assert_invalid(swap(GOOD, round_at(1)), "does not exist|follows")


@pytest.mark.parametrize(
    "past", [((2, 0.5),), ((2, 1.5),), ((2, -1.0),), (), ((2, math.nan),), ((2, math.inf),), ((2, 1.0), (2, 1.0))]
)
def test_past_coefficients_sum_to_one(past: tuple[tuple[int, float], ...]) -> None:
    assert_invalid(edit_merge(GOOD, round_at(3), past=past), "sum to one")


def test_a_past_version_exists() -> None:
    assert_invalid(edit_merge(GOOD, round_at(3), past=((3, 1.0),)), "does not exist")
    assert_invalid(edit_merge(GOOD, round_at(3), past=((-1, 1.0),)), "does not exist")


@pytest.mark.parametrize("weight", [0.0, 0.5, -math.inf, math.nan])
def test_coefficients_of_updates_are_negative_and_finite(weight: float) -> None:
    (update, _), *others = merged_at(3).updates
    assert_invalid(edit_merge(GOOD, round_at(3), updates=((update, weight), *others)), "coefficient")


def test_weights_of_updates_sum_to_at_most_one() -> None:
    (update, weight), *others = merged_at(3).updates
    assert_invalid(edit_merge(GOOD, round_at(3), updates=((update, 2 * weight), *others)), "sum to 1.5")


def test_a_round_merges_at_least_one_and_at_most_n_updates() -> None:
    assert_invalid(edit_merge(GOOD, round_at(3), updates=()), "merges nothing")
    assert_invalid(Plan(replace(GOOD.header, updates_per_round=1), GOOD.records), "merges 2 updates, more than 1")


def test_a_round_merges_fewer_only_after_a_timeout() -> None:
    """One update is missing, and no record mentions a timeout."""
    _, *others = merged_at(8).updates
    assert_invalid(edit_merge(GOOD, round_at(8), updates=tuple(others)), "round 8")


def test_a_freed_version_is_not_used_later() -> None:
    record = GOOD.records[round_at(2)]
    assert isinstance(record, Round)
    needed = max(u.version for u, _ in merged_at(4).updates)
    assert needed <= 2
    assert needed not in record.freed
    freed = tuple(version for version in (*record.freed, 0, 1) if version in (0, 1))
    assert_invalid(edit(GOOD, round_at(2), freed=tuple(dict.fromkeys(freed))), "does not exist|freed")


def test_the_version_of_an_update_in_transit_is_not_freed() -> None:
    """Its job is already recorded, so only the merge reveals it."""
    updates = [Update(client, 0, 0, 1) for client in range(2)]
    jobs = [Job(client, 0, 0, 1, 0.0, 1.0, "ended") for client in range(2)]
    sent = [Uploaded(client, 0, 1.0, 2.0 + client) for client in range(2)]
    merged = [Merge(t + 1, ((t, 1.0),), ((updates[t], -1.0),)) for t in range(2)]
    header = replace(GOOD.header, num_clients=2, updates_per_round=1, local_steps=1)
    last = Round(3.0, merged[1], (0, 1))
    Plan(header, (*jobs, *sent, Round(2.0, merged[0], ()), last)).check()
    assert_invalid(
        Plan(header, (*jobs, *sent, Round(2.0, merged[0], (0,)), replace(last, freed=(1,)))),
        "version 0, which was freed",
    )


@pytest.mark.parametrize("freed", [(3,), (99,), (0, 0), (-1,)])
def test_only_old_versions_are_freed_once(freed: tuple[int, ...]) -> None:
    assert_invalid(edit(GOOD, round_at(3), freed=freed), "frees version|not there")


def test_only_existing_versions_are_sent() -> None:
    assert_invalid(edit(GOOD, position(GOOD, Sent), version=1), "sent, but does not exist")
    assert_invalid(Plan(GOOD.header, (*GOOD.records, Sent(0, 3, GOOD.seconds))), "sent, but does not exist")


def test_no_client_returns_before_it_leaves() -> None:
    late = GOOD.seconds
    Plan(GOOD.header, (*GOOD.records, Absence(0, late, late))).check()
    assert_invalid(Plan(GOOD.header, (*GOOD.records, Absence(0, late + 2.0, late + 1.0))), "returns before it left")
    assert_invalid(Plan(GOOD.header, (*GOOD.records, Absence(0, late, math.nan))), "returns before it left")
