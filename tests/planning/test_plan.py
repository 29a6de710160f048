"""Plans as data: files read back exactly, and damaged ones are refused."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms.protocol import Merge, StateSpec, Update
from defedavg.errors import UserError
from defedavg.planning.plan import Plan
from defedavg.planning.plan_io import encode
from defedavg.planning.records import Absence, Job, Round, Stall, Timeout
from helpers.plans import GOOD, rounds_of, with_fields
from helpers.strategies import Case, bounded, case, cases

LOST = Plan(GOOD.header, (*GOOD.records, Absence(1, 99.0, math.inf), Timeout(99.5, (1, 2), (0,)), Stall(100.0)))


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
    assert repr(Plan.load(path)) == repr(plan)  # repr distinguishes −0.0 from 0.0


def test_compressed_files_are_reproducible(tmp_path: Path) -> None:
    GOOD.save(tmp_path / "a.gz")
    GOOD.save(tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert (tmp_path / "a.gz").read_bytes()[4:8] == bytes(4)  # no time stamp
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()).decode().splitlines() == list(GOOD.lines())


def test_a_plan_cannot_be_saved_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        GOOD.save(tmp_path / "missing" / "plan")


def changed(record: Any) -> list[Any]:
    """Return copies of a record, each with one field changed by the smallest step."""
    found = []
    names = [field.name for field in dataclasses.fields(record)] if dataclasses.is_dataclass(record) else record._fields
    for name in names:
        value = getattr(record, name)
        other: Any
        if name == "state":
            other = (*value, StateSpec("sum"))
        elif isinstance(value, bool):
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
        found.append(with_fields(record, **{name: other}))
    return found


def test_the_hash_distinguishes_any_two_plans() -> None:
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


def refused(folder: Path, text: str, message: str, name: str = "plan.jsonl") -> None:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    with pytest.raises(UserError, match=message) as caught:
        Plan.load(path)
    assert name in str(caught.value)


HEADER = next(GOOD.lines())
BAD_HEADERS: list[tuple[str, str]] = [
    ("not json", "line 1"),
    ("[]", "line 1"),
    ("null", "line 1"),
    ("{}", "line 1"),
    ('{"format":"something-else"}', "line 1"),
    (HEADER.replace('"format_version":1', '"format_version":3'), "line 1.*version 3"),
    (HEADER.replace('"format_version":1', '"format_version":2'), "line 1.*not an array"),
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


@pytest.mark.parametrize(("header", "message"), BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_an_invalid_header_is_refused(tmp_path: Path, header: str, message: str) -> None:
    assert header != HEADER
    refused(tmp_path, header + "\n", message)


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


def test_a_long_line_is_shortened_in_the_message(tmp_path: Path) -> None:
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
            message = str(error)
        else:  # some garbage happens to be a record
            message = "line 2"
            assert [json.loads(encode(record)) for record in loaded.records] == [line]
        assert "line 2" in message


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
def test_a_file_that_is_not_a_plan_is_refused(tmp_path: Path, data: bytes, name: str) -> None:
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
    assert {record.outcome for record in GOOD.records[last + 1 :] if isinstance(record, Job)} == {"running"}
    assert all(isinstance(record, Job) for record in GOOD.records[last + 1 :])
    assert GOOD.seconds == GOOD.rounds[-1].time
    assert len(GOOD.jobs) + len(GOOD.uploads) + len(GOOD.rounds) < len(GOOD.records)


def test_a_plan_of_no_rounds_is_empty() -> None:
    plan = case("fedavg", 3, 2).plan(0)
    assert (plan.records, plan.rounds, plan.seconds) == ((), (), 0.0)
    plan.check()
