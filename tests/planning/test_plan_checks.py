"""``check`` notices each broken invariant: a good plan passes, and breaking any one thing in it is found."""

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
from helpers.plans import GOOD
from helpers.strategies import case, variants


def position(plan: Plan, kind: type[Any], good: Callable[[Any], bool] = lambda record: True) -> int:
    """Where the first such record stands."""
    return next(i for i, record in enumerate(plan.records) if isinstance(record, kind) and good(record))


def swap(plan: Plan, i: int, *records: Record) -> Plan:
    """The plan with record i replaced by others (or none)."""
    return Plan(plan.header, (*plan.records[:i], *records, *plan.records[i + 1 :]))


def edit(plan: Plan, i: int, **words: Any) -> Plan:
    record: Any = plan.records[i]
    return swap(plan, i, replace(record, **words))


def edit_merge(plan: Plan, i: int, **words: Any) -> Plan:
    record = plan.records[i]
    assert isinstance(record, Round)
    return swap(plan, i, replace(record, merge=replace(record.merge, **words)))


def broken(plan: Plan, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan.check()


def round_at(version: int) -> int:
    return position(GOOD, Round, lambda record: record.merge.version == version)


def merged_at(version: int) -> Merge:
    record = GOOD.records[round_at(version)]
    assert isinstance(record, Round)
    return record.merge


JOB = position(GOOD, Job, lambda job: job.index == 1)
UPLOAD = position(GOOD, Uploaded)


def test_the_good_plan_is_good() -> None:
    GOOD.check()
    for name, kind in ALGORITHMS.items():
        for own in variants(kind):
            case(name, 4, 2, own=own, step_seconds=0.05).plan(5).check()


def test_time_runs_backwards() -> None:
    broken(edit(GOOD, round_at(4), time=0.01), "the time .* follows")
    broken(edit(GOOD, position(GOOD, Sent, lambda sent: sent.version == 3), time=0.0), "the time .* follows")
    broken(edit(GOOD, JOB, end=0.02, start=0.01), "the time .* follows|starts before|starts while")
    broken(Plan(GOOD.header, (*GOOD.records, Stall(0.0))), "the time .* follows")
    broken(Plan(GOOD.header, (*GOOD.records, Timeout(0.0, (1,), (2,)))), "the time .* follows")
    broken(Plan(GOOD.header, (*GOOD.records, Absence(0, 0.0, 1.0))), "the time .* follows")


@pytest.mark.parametrize("time", [math.nan, math.inf])
def test_time_is_finite(time: float) -> None:
    broken(edit(GOOD, round_at(4), time=time), "time")


def test_an_update_is_merged_twice() -> None:
    (old, weight), *_ = merged_at(3).updates
    _, *others = merged_at(4).updates
    broken(edit_merge(GOOD, round_at(4), updates=((old, weight), *others)), "merged twice|freed")
    # Within one round, too.
    broken(edit_merge(GOOD, round_at(3), updates=((old, weight), (old, weight))), "merged twice")


def test_an_update_is_merged_before_it_arrives() -> None:
    update = merged_at(3).updates[0][0]
    i = position(GOOD, Uploaded, lambda upload: (upload.client, upload.index) == (update.client, update.index))
    merge_time = next(record.time for record in GOOD.rounds if record.merge.version == 3)
    broken(edit(GOOD, i, end=math.nextafter(merge_time, math.inf)), "before it arrived")
    broken(swap(GOOD, i), "before it arrived")


def test_an_update_of_no_job_is_merged() -> None:
    (_, weight), *others = merged_at(3).updates
    broken(edit_merge(GOOD, round_at(3), updates=((Update(0, 99, 0, 5), weight), *others)), "not a finished job")


@pytest.mark.parametrize("words", [{"version": 0}, {"steps": 4}])
def test_an_update_is_not_as_it_was_trained(words: dict[str, int]) -> None:
    (update, weight), *others = merged_at(8).updates
    assert update.version > 0
    broken(
        edit_merge(GOOD, round_at(8), updates=((replace(update, **words), weight), *others)), "not as it was trained"
    )


def test_a_start_version_comes_from_the_future() -> None:
    broken(edit(GOOD, JOB, version=99), "does not exist")
    job = GOOD.records[JOB]
    assert isinstance(job, Job)
    newest = max(record.merge.version for record in GOOD.rounds if record.time <= job.end)
    made = next(record.time for record in GOOD.rounds if record.merge.version == newest)
    assert job.start < made  # made while the job ran
    broken(edit(GOOD, JOB, version=newest), "starts before version")


def test_two_jobs_start_from_one_version() -> None:
    job = GOOD.records[JOB]
    before = next(
        other for other in GOOD.jobs if isinstance(job, Job) and (other.client, other.index) == (job.client, 0)
    )
    kept = Plan(GOOD.header, tuple(replace(r, freed=()) if isinstance(r, Round) else r for r in GOOD.records))
    broken(edit(kept, JOB, version=before.version), "repeats version")
    repeats = replace(kept.header, allow_same_version=True)
    with pytest.raises(PlanError, match="not as it was trained"):  # allowed to repeat, it fails only where it is merged
        Plan(repeats, edit(kept, JOB, version=before.version).records).check()


def test_jobs_overlap() -> None:
    job = GOOD.records[JOB]
    assert isinstance(job, Job)
    before = next(other for other in GOOD.jobs if (other.client, other.index) == (job.client, 0))
    records = tuple(replace(r, freed=()) if isinstance(r, Round) else r for r in GOOD.records)
    early = math.nextafter(before.end, 0.0)
    words = {"start": early, "version": 0}
    plan = Plan(replace(GOOD.header, allow_same_version=True), records)
    broken(edit(plan, JOB, **words), "while the previous one is running")


def test_a_job_is_out_of_order() -> None:
    broken(edit(GOOD, JOB, index=2), "out of order")
    broken(edit(GOOD, position(GOOD, Job), index=1), "out of order")
    broken(edit(GOOD, JOB, client=5), "out of range")
    broken(edit(GOOD, JOB, client=-1), "out of range")


def test_a_job_ends_before_it_starts() -> None:
    broken(edit(GOOD, position(GOOD, Job), start=1e6), "ends before it starts")


@pytest.mark.parametrize(("words", "says"), [({"steps": 4}, "4 steps"), ({"steps": 6}, "6 steps")])
def test_a_whole_job_has_all_its_steps(words: dict[str, Any], says: str) -> None:
    broken(edit(GOOD, JOB, **words), says)
    broken(edit(GOOD, position(GOOD, Job, lambda job: job.outcome == "running"), **words), says)


def test_a_lost_job_has_not_too_many_steps() -> None:
    broken(edit(GOOD, position(GOOD, Job), outcome="lost", steps=6), "more than 5 steps")


def test_an_interrupted_job_needs_an_interruptible_client() -> None:
    broken(edit(GOOD, JOB, outcome="interrupted", steps=3), "interrupted")


def test_a_running_job_has_not_ended() -> None:
    i = position(GOOD, Job, lambda job: job.outcome == "running")
    broken(edit(GOOD, i, end=math.nextafter(GOOD.seconds, 0.0)), "is running after|before it starts")


def test_an_upload_needs_a_finished_job() -> None:
    upload = GOOD.records[UPLOAD]
    assert isinstance(upload, Uploaded)
    i = position(GOOD, Job, lambda job: (job.client, job.index) == (upload.client, upload.index))
    broken(edit(GOOD, UPLOAD, index=99), "not a finished job")
    broken(edit(GOOD, i, outcome="lost"), "was lost")
    broken(edit(GOOD, UPLOAD, end=math.nextafter(upload.start, 0.0)), "ends before it starts")
    broken(swap(GOOD, UPLOAD, upload, upload), "second upload")
    broken(
        Plan(GOOD.header, (*GOOD.records, replace(upload, start=GOOD.seconds, end=GOOD.seconds + 1))), "a second one"
    )


def test_a_job_is_uploaded_after_its_end() -> None:
    """A running job is recorded with the end it will have; it cannot be sent before."""
    i = position(GOOD, Job, lambda job: job.outcome == "running")
    job = GOOD.records[i]
    assert isinstance(job, Job)
    early = Uploaded(job.client, job.index, GOOD.seconds, GOOD.seconds + 1.0)
    broken(Plan(GOOD.header, (*GOOD.records, early)), "upload")


def test_rounds_count_one_by_one() -> None:
    broken(edit_merge(GOOD, round_at(3), version=4), "follows round 2")
    broken(edit_merge(GOOD, round_at(3), version=2), "follows round 2")
    broken(swap(GOOD, round_at(1)), "does not exist|follows")


@pytest.mark.parametrize(
    "past", [((2, 0.5),), ((2, 1.5),), ((2, -1.0),), (), ((2, math.nan),), ((2, math.inf),), ((2, 1.0), (2, 1.0))]
)
def test_past_coefficients_sum_to_one(past: tuple[tuple[int, float], ...]) -> None:
    broken(edit_merge(GOOD, round_at(3), past=past), "sum to one")


def test_a_past_version_is_there() -> None:
    broken(edit_merge(GOOD, round_at(3), past=((3, 1.0),)), "does not exist")
    broken(edit_merge(GOOD, round_at(3), past=((-1, 1.0),)), "does not exist")


@pytest.mark.parametrize("weight", [0.0, 0.5, -math.inf, math.nan])
def test_no_update_pushes_away(weight: float) -> None:
    (update, _), *others = merged_at(3).updates
    broken(edit_merge(GOOD, round_at(3), updates=((update, weight), *others)), "coefficient")


def test_updates_weigh_one_at_most() -> None:
    (update, weight), *others = merged_at(3).updates
    broken(edit_merge(GOOD, round_at(3), updates=((update, 2 * weight), *others)), "sum to 1.5")


def test_a_round_merges_something_and_not_too_much() -> None:
    broken(edit_merge(GOOD, round_at(3), updates=()), "merges nothing")
    broken(Plan(replace(GOOD.header, updates_per_round=1), GOOD.records), "merges 2 updates, more than 1")


def test_a_round_merges_fewer_only_where_a_wait_ran_out() -> None:
    """One update is forgotten, and nothing says that anybody was missing."""
    _, *others = merged_at(8).updates
    broken(edit_merge(GOOD, round_at(8), updates=tuple(others)), "round 8")


def test_a_freed_version_is_not_used_later() -> None:
    record = GOOD.records[round_at(2)]
    assert isinstance(record, Round)
    needed = max(u.version for u, _ in merged_at(4).updates)
    assert needed <= 2
    assert needed not in record.freed
    freed = tuple(version for version in (*record.freed, 0, 1) if version in (0, 1))
    broken(edit(GOOD, round_at(2), freed=tuple(dict.fromkeys(freed))), "does not exist|freed")


def test_the_version_of_an_update_on_its_way_is_not_freed() -> None:
    """Its job is recorded already, so only the merge can notice."""
    updates = [Update(client, 0, 0, 1) for client in range(2)]
    jobs = [Job(client, 0, 0, 1, 0.0, 1.0, "ended") for client in range(2)]
    sent = [Uploaded(client, 0, 1.0, 2.0 + client) for client in range(2)]
    merged = [Merge(t + 1, ((t, 1.0),), ((updates[t], -1.0),)) for t in range(2)]
    header = replace(GOOD.header, num_clients=2, updates_per_round=1, local_steps=1)
    last = Round(3.0, merged[1], (0, 1))
    Plan(header, (*jobs, *sent, Round(2.0, merged[0], ()), last)).check()
    broken(
        Plan(header, (*jobs, *sent, Round(2.0, merged[0], (0,)), replace(last, freed=(1,)))),
        "version 0, which was freed",
    )


@pytest.mark.parametrize("freed", [(3,), (99,), (0, 0), (-1,)])
def test_only_old_versions_are_freed_and_once(freed: tuple[int, ...]) -> None:
    broken(edit(GOOD, round_at(3), freed=freed), "frees version|not there")


def test_only_versions_that_are_there_are_sent() -> None:
    broken(edit(GOOD, position(GOOD, Sent), version=1), "sent, but does not exist")
    broken(Plan(GOOD.header, (*GOOD.records, Sent(0, 3, GOOD.seconds))), "sent, but does not exist")


def test_nobody_is_back_before_leaving() -> None:
    late = GOOD.seconds
    Plan(GOOD.header, (*GOOD.records, Absence(0, late, late))).check()
    broken(Plan(GOOD.header, (*GOOD.records, Absence(0, late + 2.0, late + 1.0))), "returns before it left")
    broken(Plan(GOOD.header, (*GOOD.records, Absence(0, late, math.nan))), "returns before it left")
