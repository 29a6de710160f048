"""Very many clients: what is left out changes nothing that is there, and plans need not be held."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import weakref
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS
from defedavg.config.build import make_simulator
from defedavg.config.study import study
from defedavg.errors import UserError
from defedavg.planning.devices import BLOCK, Fleet, Slowness, StepTimes, Windows
from defedavg.planning.event_queue import Event, EventQueue
from defedavg.planning.plan import Plan, records, without_gc
from defedavg.planning.plan_checks import PlanError, checked
from defedavg.planning.plan_io import Hashed, saved, stream
from defedavg.planning.plan_stats import PlanStatsCollector, summarise
from defedavg.planning.records import Header, Job, Record, Round, Sent, Uploaded
from defedavg.planning.simulator import Simulator
from defedavg.planning.sparse_simulator import SPARSE_FROM_CLIENTS, SparseSimulator, make_simulator_for
from defedavg.tasks.lazy_partition import LazyPartition, sampled, sampled_classes
from helpers.strategies import SLOWNESS_TEXTS, Case, bounded, case, cases, variants

ROUNDS = 12


def sparse_plan(found: Case, rounds: int = ROUNDS) -> Plan:
    """The same plan by the clock for very many clients."""
    return Plan.collect(make_simulator_for(found.server(), found.fleet, "used"), rounds)


def order(record: Any) -> Any:
    return record.client, record.index


def same(found: Case) -> None:
    """Rounds are equal, and so are uploads and the jobs that were uploaded; nothing else is there."""
    whole, part = found.plan(ROUNDS), sparse_plan(found)
    assert part.header == dataclasses.replace(whole.header, sparse=True)
    assert [(r.time, r.merge) for r in part.rounds] == [(r.time, r.merge) for r in whole.rounds]
    assert sorted(part.uploads, key=order) == sorted(whole.uploads, key=order)
    sent = {(upload.client, upload.index) for upload in whole.uploads}
    assert sorted(part.jobs, key=order) == sorted((j for j in whole.jobs if order(j) in sent), key=order)
    part.check()


@bounded(200)
@given(cases())
def test_leaving_out_unused_jobs_changes_no_round(found: Case) -> None:
    eager = found.algorithm == "defedavg-niid" and found.settings.mode == "eager"
    assume(not (eager and found.fleet.jitter))  # there NumPy's cosine and C's may differ in the last bit
    same(found)


@bounded(60)
@given(cases(), st.sampled_from([0.05, 0.3, 3.0]))
def test_leaving_out_unused_jobs_changes_no_round_where_waits_run_out(found: Case, timeout: float) -> None:
    assume(not found.fleet.jitter)
    same(dataclasses.replace(found, setup=dataclasses.replace(found.setup, timeout_seconds=timeout)))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_clients_are_sent_the_same_again_before_their_first_job_ends(name: str) -> None:
    for clients, n in ((1, 1), (4, 2)):
        same(
            case(name, clients, n, steps=1, timeout=0.05, step_seconds=0.25, latency_seconds=0.01, model_megabytes=0.0)
        )


def test_jitter_of_eager_clients_is_the_same_up_to_rounding() -> None:
    found = case("defedavg-niid", 12, 4, step_seconds=0.02, jitter=0.4, seed=3)
    for left, right in zip(sparse_plan(found, 40).rounds, found.plan(40).rounds, strict=True):
        assert left.merge == right.merge
        assert math.isclose(left.time, right.time, rel_tol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_leaving_out_unused_jobs_changes_no_round_where_everything_ties(name: str) -> None:
    for own, clients, n in itertools.product(variants(ALGORITHMS[name]), (1, 3, 7), (1, 3)):
        if n <= clients:
            same(case(name, clients, n, own=own, slowness=Slowness.parse("equal"), step_seconds=0.25))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_fifty_thousand_clients(name: str) -> None:
    """At a size at which unused jobs are left out by themselves: the plan is good, and nobody unneeded is followed."""
    for own in variants(ALGORITHMS[name])[:2]:
        found = case(name, 50_000, 40, steps=50, own=own)
        timeline = make_simulator_for(found.server(), found.fleet, "auto")
        assert isinstance(timeline, SparseSimulator)
        counting = PlanStatsCollector(timeline.header, found.fleet)
        for record in checked(timeline.header, records(timeline, 8)):
            counting.add(record)
        stats = counting.stats()
        assert stats.rounds == 8
        assert 8 * 40 * 0.95 < stats.jobs_merged <= 8 * 40
        assert (stats.jobs_started, stats.idle_share, stats.merged_share) == (None, None, None)
        uploads = round(stats.uplink_bytes / (found.fleet.model_megabytes * 1e6))
        assert len(timeline._clients) <= uploads + 9 * 40  # those that sent something, or were drawn


def test_what_is_followed_is_chosen_by_size_and_by_setting() -> None:
    few, many, lossy = Fleet(SPARSE_FROM_CLIENTS - 1), Fleet(SPARSE_FROM_CLIENTS), Fleet(SPARSE_FROM_CLIENTS, failure_rate=0.1)
    kinds = {
        (fleet.num_clients, fleet.lossy, how): type(make_simulator_for(case("fedavg", fleet.num_clients, 2).server(), fleet, how))
        for fleet, how in itertools.product((few, many), ("auto", "all", "used"))
    }
    assert kinds[SPARSE_FROM_CLIENTS - 1, False, "auto"] is kinds[SPARSE_FROM_CLIENTS, False, "all"] is Simulator
    assert kinds[SPARSE_FROM_CLIENTS, False, "auto"] is kinds[SPARSE_FROM_CLIENTS - 1, False, "used"] is SparseSimulator
    server = case("fedavg", SPARSE_FROM_CLIENTS, 2).server()
    assert type(make_simulator_for(server, lossy, "auto")) is Simulator
    with pytest.raises(UserError, match="clients can be lost"):
        make_simulator_for(server, lossy, "used")
    with pytest.raises(UserError, match=r"plan_detail.*did you mean 'used'"):
        study({"clients": {"plan_detail": "usd"}})
    settings = study({"clients": {"plan_detail": "used"}}).points()[0].settings
    assert make_simulator(settings, 0).header.sparse


# Profiles by key.


@pytest.mark.parametrize("text", SLOWNESS_TEXTS)
def test_speeds_made_by_key_are_the_stored_ones(text: str) -> None:
    fleet = Fleet(2 * BLOCK + 77, 9, slowness=Slowness.parse(text))
    asked = StepTimes(fleet)
    for client in (0, 2 * BLOCK + 76, BLOCK, BLOCK - 1, 5):
        assert asked[client] == fleet.step_times[client]
    assert fleet.step_range[:2] == (fleet.step_times.min(), fleet.step_times.max())
    assert math.isclose(fleet.step_range[2], fleet.step_times.mean(), rel_tol=1e-12)


@bounded(60)
@given(st.integers(0, 2**32), st.sampled_from(SLOWNESS_TEXTS), st.integers(1, 300), st.data())
def test_any_stretch_of_speeds_is_the_stored_one(seed: int, text: str, size: int, data: st.DataObject) -> None:
    fleet = Fleet(size, seed, slowness=Slowness.parse(text))
    first = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(first + 1, size))
    assert fleet.steps_between(first, stop).tolist() == fleet.step_times[first:stop].tolist()


@bounded(100)
@given(st.integers(0, 2**32), st.floats(0.01, 5), st.floats(0, 5), st.lists(st.floats(0, 1e4), min_size=1, max_size=9))
def test_openings_of_many_clients_are_those_of_each(seed: int, on: float, off: float, times: list[float]) -> None:
    fleet = Fleet(len(times), seed, availability=Windows(on, off))
    found = fleet.opens_all(np.arange(len(times)), np.array(times)).tolist()
    assert found == [fleet.opens(client, time) for client, time in enumerate(times)]


@bounded(100)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0, 3.1]), max_size=30), st.sampled_from([0.01, 0.3, 100.0]))
def test_a_wave_of_events_comes_in_the_order_of_single_ones(times: list[float], span: float) -> None:
    one, many = EventQueue(span), EventQueue(span)
    for client, time in enumerate(times):
        one.push((time, 0, client, 1, 4, 0))
    if times:
        many.schedule(np.array(times), np.arange(len(times)), 1, 4)
    for agenda in (one, many):
        agenda.push((0.25, 0, 3, 2, 5, 0))
        agenda.push((2.0, 1, 0, 3, 5, 0))

    def all_of(agenda: EventQueue) -> Iterator[Event]:
        while agenda:
            yield agenda.pop()

    assert list(all_of(one)) == list(all_of(many))


# Streams.


@bounded(60)
@given(cases(lossy=True))
def test_a_plan_that_streams_through_a_file_is_the_plan(tmp_path_factory: pytest.TempPathFactory, found: Case) -> None:
    path = tmp_path_factory.mktemp("stream") / "plan.jsonl.gz"
    timeline, plan = found.timeline(), found.plan(ROUNDS)
    counting = PlanStatsCollector(timeline.header, found.fleet)
    line = Hashed()
    for record in saved(path, timeline.header, checked(timeline.header, records(timeline, ROUNDS)), line):
        counting.add(record)
    assert line.hash() == plan.hash()
    assert repr(counting.stats()) == repr(summarise(plan, found.fleet))
    assert Plan.load(path) == plan
    header, again = stream(path)
    assert (header, tuple(again)) == (plan.header, plan.records)


def test_checking_and_counting_hold_no_record_for_long() -> None:
    """The records of a long plan are gone while it is still being read."""
    found = case("defedavg-iid", 20, 5, step_seconds=0.05)
    timeline = found.timeline()

    class Watched(Uploaded):
        __slots__ = ("__weakref__",)

    alive: weakref.WeakSet[Watched] = weakref.WeakSet()
    most = 0

    def watched(source: Iterator[Record]) -> Iterator[Record]:
        nonlocal most
        for record in source:
            if isinstance(record, Uploaded):
                record = Watched(record.client, record.index, record.start, record.end)
                alive.add(record)
                most = max(most, len(alive))
            yield record

    counting = PlanStatsCollector(timeline.header, found.fleet)
    for record in checked(timeline.header, watched(records(timeline, 400))):
        counting.add(record)
        del record
    gc.collect()
    assert counting.stats().jobs_merged == 2_000
    assert most < 100


@pytest.mark.parametrize("before", [True, False])
def test_cycles_are_searched_for_again_as_before(before: bool) -> None:
    was = gc.isenabled()
    try:
        gc.enable() if before else gc.disable()
        with suppress(KeyError), without_gc():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == before
    finally:
        gc.enable() if was else gc.disable()


def test_a_plan_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    found = case("fedavg", 5, 2)
    path = tmp_path / "plan.jsonl"
    going = saved(path, found.timeline().header, iter(found.timeline()))
    assert isinstance(going, Generator)
    next(going)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.jsonl.part"]
    going.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lean_plan_reads_back_and_says_what_it_is(tmp_path: Path) -> None:
    plan = sparse_plan(case("defedavg-niid", 9, 3))
    plan.save(tmp_path / "plan.jsonl")
    assert Plan.load(tmp_path / "plan.jsonl") == plan
    assert '"lean":true' in (tmp_path / "plan.jsonl").read_text().splitlines()[0]
    assert '"lean"' not in next(case("defedavg-niid", 9, 3).plan(3).lines())


def test_a_lean_plan_is_checked_all_the_same() -> None:
    plan = sparse_plan(case("defedavg-niid", 9, 3))

    def broken(says: str, *items: Record) -> None:
        with pytest.raises(PlanError, match=says):
            Plan(plan.header, items).check()

    uploads = [record for record in plan.records if isinstance(record, Uploaded)]
    late = [
        dataclasses.replace(r, end=r.end + 100) if isinstance(r, Job) and order(r) == order(uploads[0]) else r
        for r in plan.records
    ]
    broken("before its end", *late)
    broken("out of order", *(dataclasses.replace(r, index=0) if isinstance(r, Job) else r for r in plan.records))
    broken("not a finished job", *(r for r in plan.records if not isinstance(r, Job)))
    with pytest.raises(PlanError, match="out of order"):  # what may be left out of a lean plan may not of a whole one
        Plan(dataclasses.replace(plan.header, sparse=False), _skipping()).check()


def _skipping() -> tuple[Record, ...]:
    job = Job(0, 1, 0, 5, 0.1, 0.2, "ended")
    return (Sent(0, None, 0.0), job)


def test_a_header_without_the_word_is_of_a_whole_plan() -> None:
    assert Header("fedavg", 1, 1, 1, 0, False, False).sparse is False
    assert isinstance(sparse_plan(case("fedavg", 3, 2)).records[-1], Round)


# Shares by key.

LABELS = np.repeat(np.arange(5), (30, 10, 3, 40, 17))


def splits(kind: str, clients: int, seed: int, size: int) -> LazyPartition:
    if kind == "sampled":
        return sampled(LABELS, clients, seed, size)
    return sampled_classes(LABELS, clients, seed, size, 2)


@bounded(80)
@given(st.sampled_from(["sampled", "sampled-classes"]), st.integers(0, 2**32), st.integers(2, 100), st.data())
def test_shares_are_the_same_whatever_the_order_of_asking(kind: str, seed: int, size: int, data: st.DataObject) -> None:
    asked = data.draw(st.lists(st.integers(0, 999_999), min_size=1, max_size=20))
    one, other = splits(kind, 1_000_000, seed, size), splits(kind, 1_000_000, seed, size)
    forward = [one[client].tolist() for client in asked]
    backward = [other[client].tolist() for client in reversed(asked)]
    assert forward == backward[::-1]
    assert splits(kind, asked[0] + 1, seed, size)[asked[0]].tolist() == forward[0]  # nor does their number matter
    for share in forward:
        assert share == sorted(set(share))
        assert 0 <= share[0] <= share[-1] < len(LABELS)
        if kind == "sampled":
            assert len(share) == size
        else:
            assert 1 <= len(np.unique(LABELS[share])) <= 2
            assert 1 <= len(share) <= size


def test_shares_are_drawn_uniformly_and_differ() -> None:
    shares = sampled(LABELS, 2_000, 1, 20)
    counts = np.bincount(np.concatenate(list(shares)), minlength=len(LABELS))
    assert abs(counts / 400 - 1).max() < 0.25  # 400 each expected, deviation 18
    assert len({tuple(share) for share in shares}) == 2_000
    classes = sampled_classes(LABELS, 2_000, 1, 10, 2)
    held = [tuple(np.unique(LABELS[share])) for share in classes]
    assert all(len(own) == 2 for own in held)
    assert abs(np.bincount(np.ravel(held)) / 800 - 1).max() < 0.15  # each class with two fifths of the clients


def test_a_million_shares_cost_nothing_until_they_are_used() -> None:
    shares = sampled(LABELS, 1_000_000, 0, 20)
    assert len(shares) == 1_000_000
    assert not shares._kept
    assert shares[-1].tolist() == shares[999_999].tolist()
    with pytest.raises(IndexError):
        shares[1_000_000]
    for client in range(5_000):
        shares[client]
    assert len(shares._kept) == 4_096


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: sampled(LABELS, 0, 0), "number of clients is 0"),
        (lambda: sampled(LABELS, 5, 0, 0), "samples_per_client is 0"),
        (lambda: sampled(LABELS, 5, 0, 101), "give 1 to 100"),
        (lambda: sampled_classes(LABELS, 5, 0, 10, 6), "classes_per_client is 6; give 1 to 5"),
        (lambda: sampled_classes(LABELS, 5, 0, 1, 2), "give 1 to 1"),
    ],
)
def test_shares_that_make_no_sense_are_refused(make: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()
