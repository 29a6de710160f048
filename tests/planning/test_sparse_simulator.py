"""Sparse simulation: omitted jobs change no other record, and plans can be streamed."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
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
from defedavg.planning.devices import BLOCK, Fleet, StepTimes, Windows
from defedavg.planning.event_queue import Event, EventQueue
from defedavg.planning.plan import Plan, records, without_gc
from defedavg.planning.plan_checks import PlanError, checked
from defedavg.planning.plan_io import Hashed, saved, stream
from defedavg.planning.plan_stats import PlanStatsCollector, summarise
from defedavg.planning.records import Header, Job, Record, Round, Sent, Uploaded
from defedavg.planning.simulator import Simulator
from defedavg.planning.slowness import Slowness
from defedavg.planning.sparse_simulator import SPARSE_FROM_CLIENTS, SparseSimulator, make_simulator_for
from helpers.strategies import SLOWNESS_TEXTS, Case, bounded, case, cases, variants

ROUNDS = 12


def can_omit_jobs(found: Case) -> bool:
    """Return whether unused jobs can be omitted: clients that train between requests need broadcasts."""
    kind = ALGORITHMS[found.algorithm]
    policy = kind.client_policy(found.settings)
    return kind.broadcasts or policy.pause_when_full or not policy.hold_until_requested


def sparse_plan(found: Case, rounds: int = ROUNDS) -> Plan:
    """Return the same plan from the sparse simulator."""
    return Plan.collect(make_simulator_for(found.server(), found.fleet, "used"), rounds)


def order(record: Any) -> Any:
    return record.client, record.index


def assert_same(found: Case) -> None:
    """Assert that rounds, uploads and uploaded jobs are equal, and that the sparse plan has no other jobs."""
    if not can_omit_jobs(found):
        with pytest.raises(UserError, match="'used', which needs broadcasts"):
            sparse_plan(found)
        return
    whole, part = found.plan(ROUNDS), sparse_plan(found)
    assert part.header == dataclasses.replace(whole.header, sparse=True)
    assert [(r.time, r.merge) for r in part.rounds] == [(r.time, r.merge) for r in whole.rounds]
    assert sorted(part.uploads, key=order) == sorted(whole.uploads, key=order)
    sent = {(upload.client, upload.index) for upload in whole.uploads}
    assert sorted(part.jobs, key=order) == sorted((j for j in whole.jobs if order(j) in sent), key=order)
    part.check()


@bounded(200)
@given(cases())
def test_omitting_unused_jobs_changes_no_round(found: Case) -> None:
    eager = found.algorithm == "defedavg-niid" and found.settings.mode == "eager"
    assume(not (eager and found.fleet.jitter))  # NumPy's cosine and C's may differ in the last bit
    assert_same(found)


@bounded(60)
@given(cases(), st.sampled_from([0.05, 0.3, 3.0]))
def test_omitting_unused_jobs_changes_no_round_with_timeouts(found: Case, timeout: float) -> None:
    assume(not found.fleet.jitter)
    assert_same(dataclasses.replace(found, setup=dataclasses.replace(found.setup, timeout_seconds=timeout)))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_clients_receive_a_version_again_before_their_first_job_ends(name: str) -> None:
    for clients, n in ((1, 1), (4, 2)):
        assert_same(
            case(name, clients, n, steps=1, timeout=0.05, step_seconds=0.25, latency_seconds=0.01, model_megabytes=0.0)
        )


def test_jitter_of_eager_clients_is_equal_up_to_rounding() -> None:
    found = case("defedavg-niid", 12, 4, step_seconds=0.02, jitter=0.4, seed=3)
    for left, right in zip(sparse_plan(found, 40).rounds, found.plan(40).rounds, strict=True):
        assert left.merge == right.merge
        assert math.isclose(left.time, right.time, rel_tol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_omitting_unused_jobs_changes_no_round_if_all_times_tie(name: str) -> None:
    for settings, clients, n in itertools.product(variants(ALGORITHMS[name]), (1, 3, 7), (1, 3)):
        if n <= clients:
            assert_same(case(name, clients, n, settings=settings, slowness=Slowness.parse("equal"), step_seconds=0.25))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_fifty_thousand_clients(name: str) -> None:
    """``auto`` omits unused jobs at this size: the plan is valid, and unneeded clients are not created."""
    n = ALGORITHMS[name].updates_per_merge(40)
    choices = variants(ALGORITHMS[name])
    if name == "ringmaster":  # with a small threshold every client would have to answer twice
        choices = [settings for settings in choices if settings.threshold == 0]
    cases_ = (case(name, 50_000, 40, steps=50, settings=settings) for settings in choices)
    for found in itertools.islice(filter(can_omit_jobs, cases_), 2):
        simulator = make_simulator_for(found.server(), found.fleet, "auto")
        assert isinstance(simulator, SparseSimulator)
        collector = PlanStatsCollector(simulator.header, found.fleet)
        for record in checked(simulator.header, records(simulator, 8)):
            collector.add(record)
        stats = collector.stats()
        assert stats.rounds == 8
        n = simulator.header.updates_per_round
        assert 8 * n * 0.95 < stats.jobs_merged <= 8 * n
        assert (stats.jobs_started, stats.idle_share, stats.merged_share) == (None, None, None)
        uploads = round(stats.uplink_bytes / (found.fleet.model_megabytes * 1e6))
        assert len(simulator._clients) <= uploads + 9 * 40  # those that sent an update or were drawn


def test_the_simulator_is_chosen_by_size_and_by_setting() -> None:
    few, many, lossy = (
        Fleet(SPARSE_FROM_CLIENTS - 1),
        Fleet(SPARSE_FROM_CLIENTS),
        Fleet(SPARSE_FROM_CLIENTS, failure_rate=0.1),
    )
    kinds = {
        (fleet.num_clients, fleet.lossy, how): type(
            make_simulator_for(case("fedavg", fleet.num_clients, 2).server(), fleet, how)
        )
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


# Devices by key.


@pytest.mark.parametrize("text", SLOWNESS_TEXTS)
def test_speeds_drawn_by_block_equal_the_array(text: str) -> None:
    fleet = Fleet(2 * BLOCK + 77, 9, slowness=Slowness.parse(text))
    asked = StepTimes(fleet)
    for client in (0, 2 * BLOCK + 76, BLOCK, BLOCK - 1, 5):
        assert asked[client] == fleet.step_times[client]
    assert fleet.step_range[:2] == (fleet.step_times.min(), fleet.step_times.max())
    assert math.isclose(fleet.step_range[2], fleet.step_times.mean(), rel_tol=1e-12)


@bounded(60)
@given(st.integers(0, 2**32), st.sampled_from(SLOWNESS_TEXTS), st.integers(1, 300), st.data())
def test_any_slice_of_speeds_equals_that_of_the_array(seed: int, text: str, size: int, data: st.DataObject) -> None:
    fleet = Fleet(size, seed, slowness=Slowness.parse(text))
    first = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(first + 1, size))
    assert fleet.steps_between(first, stop).tolist() == fleet.step_times[first:stop].tolist()


@bounded(100)
@given(st.integers(0, 2**32), st.floats(0.01, 5), st.floats(0, 5), st.lists(st.floats(0, 1e4), min_size=1, max_size=9))
def test_openings_of_many_clients_equal_those_of_each(seed: int, on: float, off: float, times: list[float]) -> None:
    fleet = Fleet(len(times), seed, availability=Windows(on, off))
    found = fleet.opens_all(np.arange(len(times)), np.array(times)).tolist()
    assert found == [fleet.opens(client, time) for client, time in enumerate(times)]


@bounded(100)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0, 3.1]), max_size=30), st.sampled_from([0.01, 0.3, 100.0]))
def test_scheduled_events_have_the_order_of_single_ones(times: list[float], span: float) -> None:
    one, many = EventQueue(span), EventQueue(span)
    for client, time in enumerate(times):
        one.push((time, 0, client, 1, 4, 0))
    if times:
        many.schedule(np.array(times), np.arange(len(times)), 1, 4)
    for queue in (one, many):
        queue.push((0.25, 0, 3, 2, 5, 0))
        queue.push((2.0, 1, 0, 3, 5, 0))

    def all_of(queue: EventQueue) -> Iterator[Event]:
        while queue:
            yield queue.pop()

    assert list(all_of(one)) == list(all_of(many))


# Streams.


@bounded(60)
@given(cases(lossy=True))
def test_a_streamed_plan_equals_the_collected_one(tmp_path_factory: pytest.TempPathFactory, found: Case) -> None:
    path = tmp_path_factory.mktemp("stream") / "plan.jsonl.gz"
    simulator, plan = found.simulator(), found.plan(ROUNDS)
    collector = PlanStatsCollector(simulator.header, found.fleet)
    line = Hashed()
    for record in saved(path, simulator.header, checked(simulator.header, records(simulator, ROUNDS)), line):
        collector.add(record)
    assert line.hash() == plan.hash()
    assert repr(collector.stats()) == repr(summarise(plan, found.fleet))
    assert Plan.load(path) == plan
    header, again = stream(path)
    assert (header, tuple(again)) == (plan.header, plan.records)


def test_checks_and_statistics_keep_few_records() -> None:
    """Records of a long plan are released while it is being read."""
    found = case("defedavg-iid", 20, 5, step_seconds=0.05)
    simulator = found.simulator()

    alive = most = 0

    class Watched(Uploaded):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def watched(source: Iterator[Record]) -> Iterator[Record]:
        nonlocal alive, most
        for record in source:
            if isinstance(record, Uploaded):
                record = Watched(record.client, record.index, record.start, record.end)
                alive += 1
                most = max(most, alive)
            yield record

    collector = PlanStatsCollector(simulator.header, found.fleet)
    for record in checked(simulator.header, watched(records(simulator, 400))):
        collector.add(record)
        del record
    gc.collect()
    assert collector.stats().jobs_merged == 2_000
    assert most < 100


@pytest.mark.parametrize("before", [True, False])
def test_the_garbage_collector_is_restored(before: bool) -> None:
    was = gc.isenabled()
    try:
        gc.enable() if before else gc.disable()
        with suppress(KeyError), without_gc():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == before
    finally:
        gc.enable() if was else gc.disable()


def test_an_interrupted_plan_leaves_no_file(tmp_path: Path) -> None:
    found = case("fedavg", 5, 2)
    path = tmp_path / "plan.jsonl"
    stream_ = saved(path, found.simulator().header, iter(found.simulator()))
    assert isinstance(stream_, Generator)
    next(stream_)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.jsonl.part"]
    stream_.close()
    assert list(tmp_path.iterdir()) == []


def test_a_sparse_plan_reads_back_and_is_marked(tmp_path: Path) -> None:
    plan = sparse_plan(case("defedavg-niid", 9, 3))
    plan.save(tmp_path / "plan.jsonl")
    assert Plan.load(tmp_path / "plan.jsonl") == plan
    assert '"lean":true' in (tmp_path / "plan.jsonl").read_text().splitlines()[0]
    assert '"lean"' not in next(case("defedavg-niid", 9, 3).plan(3).lines())


def test_a_sparse_plan_is_checked() -> None:
    plan = sparse_plan(case("defedavg-niid", 9, 3))

    def assert_invalid(message: str, *items: Record) -> None:
        with pytest.raises(PlanError, match=message):
            Plan(plan.header, items).check()

    uploads = [record for record in plan.records if isinstance(record, Uploaded)]
    late = [
        r._replace(end=r.end + 100) if isinstance(r, Job) and order(r) == order(uploads[0]) else r for r in plan.records
    ]
    assert_invalid("before its end", *late)
    assert_invalid("out of order", *(r._replace(index=0) if isinstance(r, Job) else r for r in plan.records))
    assert_invalid("not a finished job", *(r for r in plan.records if not isinstance(r, Job)))
    with pytest.raises(PlanError, match="out of order"):  # a complete plan may not omit it
        Plan(dataclasses.replace(plan.header, sparse=False), _skipping()).check()


def _skipping() -> tuple[Record, ...]:
    job = Job(0, 1, 0, 5, 0.1, 0.2, "ended")
    return (Sent(0, None, 0.0), job)


def test_a_header_without_the_key_is_of_a_complete_plan() -> None:
    assert Header("fedavg", 1, 1, 1, 0, False, False).sparse is False
    assert isinstance(sparse_plan(case("fedavg", 3, 2)).records[-1], Round)
