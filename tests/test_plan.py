"""Plans as data: files read back exactly, damaged ones are refused, and ``check`` notices each broken invariant."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS
from defedavg.errors import UserError
from defedavg.invariants import PlanError
from defedavg.plan import Absence, Job, Plan, Record, Replacement, Round, Sent, Stall, Uploaded
from defedavg.planfile import encode
from defedavg.protocol import Merge, Update
from strategies import Case, bounded, case, cases, variants
from support import rounds_of

GOOD = case("defedavg-iid", 5, 2, seed=1, step_seconds=0.05).plan(8)  # long jobs: some run while others are merged
LOST = Plan(GOOD.header, (*GOOD.records, Absence(1, 99.0, math.inf), Replacement(99.5, (1, 2), (0,)), Stall(100.0)))


# Files.


@pytest.mark.parametrize("name", ["plan.jsonl", "plan.jsonl.gz", "plan"])
@pytest.mark.parametrize("plan", [GOOD, LOST], ids=["good", "lost"])
def test_a_plan_reads_back_exactly(tmp_path: Path, name: str, plan: Plan) -> None:
    path = tmp_path / name
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert again.hash() == plan.hash()
    assert [p.name for p in tmp_path.iterdir()] == [name]  # no half-written file is left


@bounded(40)
@given(cases())
def test_any_plan_reads_back_exactly(tmp_path_factory: pytest.TempPathFactory, found: Case) -> None:
    plan = found.plan(4)
    path = tmp_path_factory.mktemp("plan") / "plan.jsonl.gz"
    plan.save(str(path))
    assert Plan.load(str(path)) == plan


@bounded(200)
@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_read_back_exactly(tmp_path_factory: pytest.TempPathFactory, time: float, weight: float) -> None:
    merge = Merge(1, ((0, weight),), ((Update(0, 0, 0, 5), -weight),))
    plan = Plan(GOOD.header, (Round(time, merge, ()), Job(0, 0, 0, 5, weight, time, "lost")))
    path = tmp_path_factory.mktemp("plan") / "plan"
    plan.save(path)
    assert repr(Plan.load(path)) == repr(plan)  # repr tells −0.0 from 0.0


def test_compressed_files_are_the_same_every_time(tmp_path: Path) -> None:
    GOOD.save(tmp_path / "a.gz")
    GOOD.save(tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert (tmp_path / "a.gz").read_bytes()[4:8] == bytes(4)  # no time stamp
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()).decode().splitlines() == list(GOOD.lines())


def test_a_plan_cannot_be_saved_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        GOOD.save(tmp_path / "missing" / "plan")


def changed(record: Any) -> list[Any]:
    """The record with each field changed by the smallest step."""
    found = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        other: Any
        if isinstance(value, bool):
            other = not value
        elif isinstance(value, int):
            other = value + 1
        elif isinstance(value, float):
            other = math.nextafter(value, math.inf) if math.isfinite(value) else 1.0
        elif isinstance(value, tuple):
            other = (*value, 7)
        elif isinstance(value, Merge):
            (update, weight), *more = value.updates
            other = replace(value, updates=((update, math.nextafter(weight, 0.0)), *more))
        else:
            other = "lost" if value is not None else 0
        found.append(replace(record, **{field.name: other}))
    return found


def test_the_hash_tells_any_two_plans_apart() -> None:
    hashes = {LOST.hash()}
    count = 1
    kinds = {type(record): i for i, record in enumerate(LOST.records)}
    assert len(kinds) == 7  # every kind of record
    for i in kinds.values():
        for other in changed(LOST.records[i]):
            hashes.add(Plan(LOST.header, (*LOST.records[:i], other, *LOST.records[i + 1 :])).hash())
            count += 1
    for header in changed(LOST.header):
        hashes.add(Plan(header, LOST.records).hash())
        count += 1
    hashes.add(Plan(LOST.header, LOST.records[:-1]).hash())
    hashes.add(Plan(LOST.header, (LOST.records[1], LOST.records[0], *LOST.records[2:])).hash())
    assert len(hashes) == count + 2


def lines_of(plan: Plan) -> list[Any]:
    return [json.loads(line) for line in plan.lines()]


def refused(folder: Path, text: str, says: str, name: str = "plan.jsonl") -> None:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    with pytest.raises(UserError, match=says) as caught:
        Plan.load(path)
    assert name in str(caught.value)


HEADER = next(GOOD.lines())
BAD_HEADERS: list[tuple[str, str]] = [
    ("not json", "line 1"),
    ("[]", "line 1"),
    ("null", "line 1"),
    ("{}", "line 1"),
    ('{"format":"something-else"}', "line 1"),
    (HEADER.replace('"format_version":1', '"format_version":2'), "line 1.*version 2"),
    (HEADER.replace('"format_version":1,', ""), "line 1"),
    (HEADER.replace('"seed":1,', ""), "line 1"),
    (HEADER.replace('"seed":1', '"seed":1,"more":2'), "line 1"),
    (HEADER.replace('"seed":1', '"seed":1.5'), "line 1"),
    (HEADER.replace('"seed":1', '"seed":true'), "line 1"),
    (HEADER.replace('"num_clients":5', '"num_clients":"5"'), "line 1"),
    (HEADER.replace('"num_clients":5', '"num_clients":-5'), "line 1"),
    (HEADER.replace('"algorithm":"defedavg-iid"', '"algorithm":3'), "line 1"),
    (HEADER.replace('"repeats":false', '"repeats":0'), "line 1"),
    ("[" * 100_000, "line 1"),
]


@pytest.mark.parametrize(("header", "says"), BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_a_foreign_header_is_refused(tmp_path: Path, header: str, says: str) -> None:
    assert header != HEADER
    refused(tmp_path, header + "\n", says)


BAD_RECORDS = [
    "",
    "not json",
    "{}",
    "[]",
    "null",
    "3",
    '"job"',
    '["job"]',
    '["nothing",1,2]',
    "[[]]",
    "[{}]",
    '["job",0,0,0,5,0.0,1.0]',
    '["job",0,0,0,5,0.0,1.0,"ended",1]',
    '["job",-1,0,0,5,0.0,1.0,"ended"]',
    '["job",0,-1,0,5,0.0,1.0,"ended"]',
    '["job",0,0,-1,5,0.0,1.0,"ended"]',
    '["job",0,0,0,-5,0.0,1.0,"ended"]',
    '["job",0.5,0,0,5,0.0,1.0,"ended"]',
    '["job",true,0,0,5,0.0,1.0,"ended"]',
    '["job",null,0,0,5,0.0,1.0,"ended"]',
    '["job",[0],0,0,5,0.0,1.0,"ended"]',
    '["job",0,0,0,5,NaN,1.0,"ended"]',
    '["job",0,0,0,5,0.0,Infinity,"ended"]',
    '["job",0,0,0,5,0.0,1e999,"ended"]',
    '["job",0,0,0,5,0.0,' + "9" * 400 + ',"ended"]',
    '["job",0,0,0,5,0.0,"1","ended"]',
    '["job",0,0,0,5,0.0,1.0,"stopped"]',
    '["job",0,0,0,5,0.0,1.0,[]]',
    '["upload",0,0,0.0]',
    '["upload",0,0,0.0,null]',
    '["upload",0,0,0.0,NaN]',
    '["sent",0,-1,0.0]',
    '["sent",null,0,0.0]',
    '["round",1.0,1,[[0,1.0]],[],[-1]]',
    '["round",1.0,1,[[0,1.0]],[[0,0,0,5]],[]]',
    '["round",1.0,1,[[0,1.0]],[[0,0,0,5,-1.0,3]],[]]',
    '["round",1.0,1,[[0,1.0]],[[0,0,0,5,NaN]],[]]',
    '["round",1.0,1,[[0,NaN]],[],[]]',
    '["round",1.0,1,[[0,1.0,2.0]],[],[]]',
    '["round",1.0,1,[0,1.0],[],[]]',
    '["round",1.0,1,3,[],[]]',
    '["round",1.0,1,[[0,1.0]],null,[]]',
    '["round",1.0,1,{},{},{}]',
    '["round",1.0,1,"","",""]',
    '["absence",-1,0.0,null]',
    '["absence",0,0.0,NaN]',
    '["replacement",0.0,[[0]],[]]',
    '["replacement",0.0,0,1]',
    '["stall"]',
    '["stall",null]',
    '["stall",false]',
    "[" * 100_000,
    '["stall",' + "[" * 100_000,
]


@pytest.mark.parametrize("line", BAD_RECORDS, ids=lambda line: line[:60])
@pytest.mark.parametrize("name", ["plan.jsonl", "plan.jsonl.gz"])
def test_a_damaged_record_is_refused_by_line(tmp_path: Path, line: str, name: str) -> None:
    first = encode(GOOD.records[0])
    refused(tmp_path, "\n".join([HEADER, first, line, first]) + "\n", "line 3:", name)


def test_a_hostile_line_is_not_repeated_at_length(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    for line in (json.dumps(["x" * 100_000]), json.dumps(["stall", "x" * 100_000])):
        path.write_text(f"{HEADER}\n{line}\n")
        with pytest.raises(UserError) as caught:
            Plan.load(path)
        assert len(str(caught.value).replace(str(path), "")) < 1_000


@bounded(100)
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), st.lists, max_leaves=8)
)
def test_any_json_is_a_record_or_is_refused(tmp_path_factory: pytest.TempPathFactory, garbage: Any) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan"
    for line in (garbage, ["job", garbage], ["round", 1.0, 1, garbage, [], []], ["replacement", 0.0, [], garbage]):
        path.write_text(f"{HEADER}\n{json.dumps(line)}\n")
        try:
            loaded = Plan.load(path)
        except UserError as error:
            told = str(error)
        else:  # some garbage happens to be a record
            told = "line 2"
            assert [json.loads(encode(record)) for record in loaded.records] == [line]
        assert "line 2" in told


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    GOOD.save(tmp_path / "plan.gz")
    data = (tmp_path / "plan.gz").read_bytes()
    for size in (1, 5, 12, len(data) // 2, len(data) - 4, len(data) - 1):
        (tmp_path / "plan.gz").write_bytes(data[:size])
        with pytest.raises(UserError, match=r"plan\.gz"):
            Plan.load(tmp_path / "plan.gz")
    middle = len(data) // 2
    (tmp_path / "plan.gz").write_bytes(data[:middle] + bytes([data[middle] ^ 0x55]) + data[middle + 1 :])
    with pytest.raises(UserError, match=r"plan\.gz"):
        Plan.load(tmp_path / "plan.gz")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\x00", b"PK\x03\x04 something"])
@pytest.mark.parametrize("name", ["plan", "plan.gz"])
def test_a_foreign_file_is_refused(tmp_path: Path, data: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=name):
        Plan.load(tmp_path / name)


def test_a_file_cut_in_the_middle_of_a_line_is_refused(tmp_path: Path) -> None:
    text = "\n".join(GOOD.lines())
    refused(tmp_path, text[:-3], f"line {len(text.splitlines())}:")


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            Plan.load(path)


# Collecting.


def test_collecting_stops_after_the_last_merge() -> None:
    assert [record.merge.version for record in GOOD.rounds] == list(range(1, 9))
    assert list(rounds_of(GOOD.records)) == list(GOOD.rounds)
    last = GOOD.records.index(GOOD.rounds[-1])
    assert {record.fate for record in GOOD.records[last + 1 :] if isinstance(record, Job)} == {"running"}
    assert all(isinstance(record, Job) for record in GOOD.records[last + 1 :])
    assert GOOD.seconds == GOOD.rounds[-1].time
    assert len(GOOD.jobs) + len(GOOD.uploads) + len(GOOD.rounds) < len(GOOD.records)


def test_no_rounds_are_no_plan() -> None:
    plan = case("fedavg", 3, 2).plan(0)
    assert (plan.records, plan.rounds, plan.seconds) == ((), (), 0.0)
    plan.check()


# Invariants.


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
    broken(edit(GOOD, round_at(4), time=0.01), "time runs backwards")
    broken(edit(GOOD, position(GOOD, Sent, lambda sent: sent.version == 3), time=0.0), "time runs backwards")
    broken(edit(GOOD, JOB, end=0.02, start=0.01), "time runs backwards|starts before|starts while")
    broken(Plan(GOOD.header, (*GOOD.records, Stall(0.0))), "time runs backwards")
    broken(Plan(GOOD.header, (*GOOD.records, Replacement(0.0, (1,), (2,)))), "time runs backwards")
    broken(Plan(GOOD.header, (*GOOD.records, Absence(0, 0.0, 1.0))), "time runs backwards")


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
    broken(edit_merge(GOOD, round_at(3), updates=((Update(0, 99, 0, 5), weight), *others)), "no finished job")


@pytest.mark.parametrize("words", [{"version": 0}, {"steps": 4}])
def test_an_update_is_not_as_it_was_trained(words: dict[str, int]) -> None:
    (update, weight), *others = merged_at(8).updates
    assert update.version > 0
    broken(
        edit_merge(GOOD, round_at(8), updates=((replace(update, **words), weight), *others)), "not as it was trained"
    )


def test_a_start_version_comes_from_the_future() -> None:
    broken(edit(GOOD, JOB, version=99), "not there")
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
    repeats = replace(kept.header, repeats=True)
    with pytest.raises(PlanError, match="not as it was trained"):  # allowed to repeat, it fails only where it is merged
        Plan(repeats, edit(kept, JOB, version=before.version).records).check()


def test_jobs_overlap() -> None:
    job = GOOD.records[JOB]
    assert isinstance(job, Job)
    before = next(other for other in GOOD.jobs if (other.client, other.index) == (job.client, 0))
    records = tuple(replace(r, freed=()) if isinstance(r, Round) else r for r in GOOD.records)
    early = math.nextafter(before.end, 0.0)
    words = {"start": early, "version": 0}
    plan = Plan(replace(GOOD.header, repeats=True), records)
    broken(edit(plan, JOB, **words), "while the one before is running")


def test_a_job_is_out_of_order() -> None:
    broken(edit(GOOD, JOB, index=2), "out of order")
    broken(edit(GOOD, position(GOOD, Job), index=1), "out of order")
    broken(edit(GOOD, JOB, client=5), "no such client")
    broken(edit(GOOD, JOB, client=-1), "no such client")


def test_a_job_ends_before_it_starts() -> None:
    broken(edit(GOOD, position(GOOD, Job), start=1e6), "ends before it starts")


@pytest.mark.parametrize(("words", "says"), [({"steps": 4}, "4 steps"), ({"steps": 6}, "6 steps")])
def test_a_whole_job_has_all_its_steps(words: dict[str, Any], says: str) -> None:
    broken(edit(GOOD, JOB, **words), says)
    broken(edit(GOOD, position(GOOD, Job, lambda job: job.fate == "running"), **words), says)


def test_a_lost_job_has_not_too_many_steps() -> None:
    broken(edit(GOOD, position(GOOD, Job), fate="lost", steps=6), "more than 5 steps")


def test_an_interrupted_job_needs_an_interruptible_client() -> None:
    broken(edit(GOOD, JOB, fate="interrupted", steps=3), "interrupted")


def test_a_running_job_has_not_ended() -> None:
    i = position(GOOD, Job, lambda job: job.fate == "running")
    broken(edit(GOOD, i, end=math.nextafter(GOOD.seconds, 0.0)), "still runs|before it starts")


def test_an_upload_needs_a_finished_job() -> None:
    upload = GOOD.records[UPLOAD]
    assert isinstance(upload, Uploaded)
    i = position(GOOD, Job, lambda job: (job.client, job.index) == (upload.client, upload.index))
    broken(edit(GOOD, UPLOAD, index=99), "no finished job")
    broken(edit(GOOD, i, fate="lost"), "was lost")
    broken(edit(GOOD, UPLOAD, end=math.nextafter(upload.start, 0.0)), "arrives before it leaves")
    broken(swap(GOOD, UPLOAD, upload, upload), "second upload")
    broken(
        Plan(GOOD.header, (*GOOD.records, replace(upload, start=GOOD.seconds, end=GOOD.seconds + 1))), "second upload"
    )


def test_a_job_is_uploaded_after_its_end() -> None:
    """A running job is recorded with the end it will have; it cannot be sent before."""
    i = position(GOOD, Job, lambda job: job.fate == "running")
    job = GOOD.records[i]
    assert isinstance(job, Job)
    early = Uploaded(job.client, job.index, GOOD.seconds, GOOD.seconds + 1.0)
    broken(Plan(GOOD.header, (*GOOD.records, early)), "upload")


def test_rounds_count_one_by_one() -> None:
    broken(edit_merge(GOOD, round_at(3), version=4), "follows round 2")
    broken(edit_merge(GOOD, round_at(3), version=2), "follows round 2")
    broken(swap(GOOD, round_at(1)), "not there|follows")


@pytest.mark.parametrize(
    "past", [((2, 0.5),), ((2, 1.5),), ((2, -1.0),), (), ((2, math.nan),), ((2, math.inf),), ((2, 1.0), (2, 1.0))]
)
def test_past_coefficients_sum_to_one(past: tuple[tuple[int, float], ...]) -> None:
    broken(edit_merge(GOOD, round_at(3), past=past), "sum to one")


def test_a_past_version_is_there() -> None:
    broken(edit_merge(GOOD, round_at(3), past=((3, 1.0),)), "not there")
    broken(edit_merge(GOOD, round_at(3), past=((-1, 1.0),)), "not there")


@pytest.mark.parametrize("weight", [0.0, 0.5, -math.inf, math.nan])
def test_no_update_pushes_away(weight: float) -> None:
    (update, _), *others = merged_at(3).updates
    broken(edit_merge(GOOD, round_at(3), updates=((update, weight), *others)), "coefficient")


def test_updates_weigh_one_at_most() -> None:
    (update, weight), *others = merged_at(3).updates
    broken(edit_merge(GOOD, round_at(3), updates=((update, 2 * weight), *others)), "sum to 1.5")


def test_a_round_merges_something_and_not_too_much() -> None:
    broken(edit_merge(GOOD, round_at(3), updates=()), "merges nothing")
    broken(Plan(replace(GOOD.header, updates_per_round=1), GOOD.records), "merges 2 updates")


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
    broken(edit(GOOD, round_at(2), freed=tuple(dict.fromkeys(freed))), "not there|freed")


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
    broken(edit(GOOD, position(GOOD, Sent), version=1), "sent, but is not there")
    broken(Plan(GOOD.header, (*GOOD.records, Sent(0, 3, GOOD.seconds))), "sent, but is not there")


def test_nobody_is_back_before_leaving() -> None:
    late = GOOD.seconds
    Plan(GOOD.header, (*GOOD.records, Absence(0, late, late))).check()
    broken(Plan(GOOD.header, (*GOOD.records, Absence(0, late + 2.0, late + 1.0))), "back before it left")
    broken(Plan(GOOD.header, (*GOOD.records, Absence(0, late, math.nan))), "back before it left")
