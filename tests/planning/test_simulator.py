"""The virtual clock: it agrees with its plain-loop twin, repeats itself exactly, and has the right limits."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS
from defedavg.algorithms.protocol import Merge
from defedavg.config import study as config
from defedavg.config.build import make_fleet, make_plan, make_simulator
from defedavg.planning.devices import Fleet, Slowness, Windows
from defedavg.planning.plan import Plan
from defedavg.planning.records import Job, Round
from defedavg.planning.simulator import Simulator
from helpers.naive_simulator import agrees_with_twin
from helpers.strategies import Case, bounded, case, cases, equal_speeds, up_to, variants

NAMES = list(ALGORITHMS)
ROUNDS = 12


@bounded(250)
@given(cases())
def test_the_timeline_agrees_with_its_plain_loop_twin(found: Case) -> None:
    assert len(agrees_with_twin(found, ROUNDS).rounds) == ROUNDS


@bounded(200)
@given(cases())
def test_every_plan_keeps_every_invariant(found: Case) -> None:
    found.plan(ROUNDS).check()


@pytest.mark.parametrize("name", NAMES)
def test_twin_and_timeline_agree_where_everything_ties(name: str) -> None:
    for own, clients, n in itertools.product(variants(ALGORITHMS[name]), (1, 3, 7), (1, 3)):
        if n <= clients:
            agrees_with_twin(case(name, clients, n, own=own, **equal_speeds()), 20)


@bounded(60)
@given(cases())
def test_taking_five_rounds_then_ten_gives_the_same_prefix(found: Case) -> None:
    short, long = up_to(iter(found.timeline()), 5), up_to(iter(found.timeline()), 10)
    assert long[: len(short)] == short
    stream = iter(found.timeline())
    assert up_to(stream, 5) + up_to(stream, 10) == long


@bounded(40)
@given(cases())
def test_the_same_seed_gives_the_same_plan(found: Case) -> None:
    assert found.plan(6).hash() == found.plan(6).hash()


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_gives_another_plan(name: str) -> None:
    def records(seed: int) -> Plan:
        plan = case(name, 8, 3, seed=seed).plan(10)
        return Plan(dataclasses.replace(plan.header, seed=0), plan.records)  # the header alone must not tell them apart

    assert len({records(seed).hash() for seed in range(5)}) == 5


@pytest.mark.parametrize("name", NAMES)
def test_draws_depend_on_the_seed_even_where_speeds_do_not(name: str) -> None:
    """Where the server draws at all, other seeds draw other clients."""
    own = ALGORITHMS[name].settings_type()
    merges = set()
    for seed in range(6):
        found = case(name, 9, 2, seed=seed, own=own, **equal_speeds())
        merges.add(tuple(tuple(u.client for u, _ in record.merge.updates) for record in found.plan(8).rounds))
    broadcast_to_all = ALGORITHMS[name].broadcasts and not ALGORITHMS[name].policy.hold_until_requested
    everyone_trains = "concurrency" in {field.name for field in dataclasses.fields(own)}
    assert (len(merges) == 1) == (broadcast_to_all or everyone_trains)


class Backwards(dict[int, None]):
    """A dictionary that lists its keys from the last to the first."""

    def __iter__(self) -> Iterator[int]:
        return reversed(list(super().__iter__()))


@bounded(60)
@given(cases())
def test_the_order_of_clients_in_memory_changes_nothing(found: Case) -> None:
    timeline = found.timeline()
    timeline._idle = Backwards()
    assert Plan.collect(timeline, 8).hash() == found.plan(8).hash()


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_with_shuffled_rows_gives_the_same_plan(name: str, tmp_path: Path) -> None:
    rows = [f"{i},{0.001 * (1 + i % 3)},{(5, 50, 400)[i % 3]},{(400, 20)[i % 2]}" for i in range(7)]
    hashes = set()
    for order in (range(7), range(6, -1, -1), (3, 0, 6, 1, 5, 2, 4)):
        path = tmp_path / "trace.csv"
        path.write_text("\n".join(["client,step_seconds,up_mbps,down_mbps", *(rows[i] for i in order)]) + "\n")
        tables = {"algorithms": [name], "clients": {"trace": str(path)}, "training": {"updates_per_round": 3}}
        hashes.add(make_plan(config.study(tables).points()[0].settings, 4, 10).hash())
    assert len(hashes) == 1


def test_settings_become_the_fleet_and_the_machines() -> None:
    clients = {
        "num_clients": 9,
        "step_seconds": 0.5,
        "slowness": "pareto(3)",
        "jitter": 0.25,
        "uplink_mbps": 7.0,
        "downlink_mbps": 8.0,
        "latency_seconds": 0.125,
        "model_megabytes": 3.0,
        "availability": "windows(5, 6)",
        "failure_rate": 0.125,
        "return_seconds": 9.0,
    }
    tables = {"algorithms": ["fedavg"], "clients": clients, "training": {"updates_per_round": 2, "local_steps": 3}}
    found = config.study(tables).points()[0].settings
    fleet = make_fleet(found, 5)
    expected = Fleet(9, 5, 0.5, Slowness("pareto", (3.0,)), 0.25, 7.0, 8.0, 0.125, 3.0, Windows(5.0, 6.0), 0.125, 9.0)
    assert fleet == expected
    setup = make_simulator(found, 5).server.setup
    assert (setup.num_clients, setup.updates_per_round, setup.local_steps, setup.seed) == (9, 2, 3, 5)
    assert setup.timeout_seconds == pytest.approx(10.0 * fleet.round_trip(3))  # clients can be lost


def test_nobody_times_out_where_nobody_can_be_lost() -> None:
    assert make_simulator(config.study({}).points()[0].settings, 0).server.setup.timeout_seconds is None


def test_server_and_fleet_must_agree() -> None:
    found = case("fedavg", 3, 2)
    with pytest.raises(ValueError, match="different numbers"):
        Simulator(found.server(), Fleet(4))


# Versions.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slowness", ["equal", "two-speed(0.5, 30)"])
def test_no_version_is_freed_that_is_used_later(name: str, slowness: str) -> None:
    """By hand, from the records alone: once freed, a version is neither started from nor merged."""
    for own in variants(ALGORITHMS[name]):
        freed: set[int] = set()
        found = case(name, 7, 3, own=own, slowness=Slowness.parse(slowness), latency_seconds=0.02, jitter=0.2)
        for record in found.plan(60).records:
            if isinstance(record, Job):
                assert record.version not in freed
            elif isinstance(record, Round):
                used = {v for v, _ in record.merge.past} | {u.version for u, _ in record.merge.updates}
                assert not used & freed
                assert not set(record.freed) & freed
                freed |= set(record.freed)


@pytest.mark.parametrize("name", NAMES)
def test_live_versions_do_not_grow_with_rounds(name: str) -> None:
    """A version per client and buffer, and those on their way: no more, however long the plan."""
    for own in variants(ALGORITHMS[name]):
        live, most = 1, []
        for record in case(name, 6, 2, own=own, step_seconds=0.02, model_megabytes=0.1).plan(500).rounds:
            live += 1 - len(record.freed)
            most.append(live)
        # Receive buffer, running job, send buffer or upload: three a client; and the newest two.
        assert max(most) <= 3 * 6 + 2
        assert max(most[300:]) <= max(most[:300]) + 2


# Limits.


def merges(plan: Plan, *, index: bool = False) -> list[Any]:
    """Merges as (time, past, [(client, version, steps, coefficient)])."""
    return [
        (
            record.time,
            record.merge.past,
            [(u.client, u.version, u.steps, b, *([u.index] if index else [])) for u, b in record.merge.updates],
        )
        for record in plan.rounds
    ]


@pytest.mark.parametrize(("clients", "steps"), [(1, 1), (4, 3), (10, 7)])
def test_equal_speeds_and_all_clients_make_fedavg_of_the_asynchronous(clients: int, steps: int) -> None:
    words: dict[str, Any] = {"steps": steps, **equal_speeds()}
    drawn = dataclasses.replace(ALGORITHMS["fedavg"].settings_type(), replacement=False)
    fedavg = merges(case("fedavg", clients, clients, own=drawn, **words).plan(15), index=True)
    assert len(fedavg) == 15
    assert merges(case("defedavg-iid", clients, clients, **words).plan(15), index=True) == fedavg
    full = ALGORITHMS["fedbuff"].settings_type(concurrency=clients)
    assert merges(case("fedbuff", clients, clients, own=full, **words).plan(15), index=True) == fedavg
    for time, past, updates in fedavg:
        version = past[0][0]
        assert past == ((version, 1.0),)
        assert updates == [(client, version, steps, -1.0 / clients, version) for client in range(clients)]
        assert time == pytest.approx((version + 1) * (0.25 * steps + 2 * 0.5))


@pytest.mark.parametrize("seed", range(3))
def test_one_local_step_makes_asysg_of_defedavg_iid(seed: int) -> None:
    defedavg = case("defedavg-iid", 9, 4, steps=1, seed=seed, jitter=0.2).plan(40)
    asysg = case("asysg", 9, 4, steps=50, seed=seed, jitter=0.2).plan(40)
    assert asysg.records == defedavg.records
    assert dataclasses.replace(asysg.header, algorithm="defedavg-iid") == defedavg.header


@pytest.mark.parametrize("name", NAMES)
def test_equal_speeds_and_all_clients_leave_nothing_stale(name: str) -> None:
    """λ = 0 wherever every round has all clients; draws with replacement leave some out, and those come late."""
    for own in variants(ALGORITHMS[name]):
        plan = case(name, 5, 5, own=own, **equal_speeds()).plan(12)
        everybody = all(len(record.merge.updates) == 5 for record in plan.rounds)
        stale = {delay for record in plan.rounds for delay in record.merge.staleness} != {0}
        assert not (everybody and stale)
        assert everybody or "replacement" in ALGORITHMS[name].equation or getattr(own, "replacement", False)


def test_fedavg_is_never_stale() -> None:
    for own in variants(ALGORITHMS["fedavg"]):
        plan = case("fedavg", 9, 4, own=own, jitter=0.5).plan(20)
        assert {delay for record in plan.rounds for delay in record.merge.staleness} == {0}


@pytest.mark.parametrize("name", [name for name, kind in ALGORITHMS.items() if kind.uses_global_lr])
def test_one_client_makes_a_chain(name: str) -> None:
    for own in variants(ALGORITHMS[name]):
        plan = case(name, 1, 1, own=own, steps=3).plan(10)
        for t, record in enumerate(plan.rounds):
            merge = record.merge
            ((update, weight),) = merge.updates
            assert (merge.version, merge.past, weight) == (t + 1, ((t, 1.0),), -1.0)
            assert (update.client, update.version) == (0, t)


def test_a_round_of_fedavg_takes_as_long_as_its_slowest() -> None:
    found = case("fedavg", 6, 4, steps=10)
    rounds = found.plan(8).rounds
    for before, record in itertools.pairwise((0.0, *rounds)):
        assert isinstance(record, Round)
        start = before.time if isinstance(before, Round) else 0.0
        slowest = max(found.fleet.step_times[u.client] for u, _ in record.merge.updates)
        assert record.time - start == pytest.approx(10 * slowest + 0.044 + 0.044)


def test_staleness_weights_divide_once() -> None:
    own = ALGORITHMS["fedbuff"].settings_type(staleness="sqrt")
    plan = case("fedbuff", 9, 3, own=own).plan(30)
    assert max(delay for record in plan.rounds for delay in record.merge.staleness) > 1
    for record in plan.rounds:
        for (_, weight), delay in zip(record.merge.updates, record.merge.staleness, strict=True):
            assert weight == pytest.approx(-1.0 / (3 * (1 + delay) ** 0.5))


@pytest.mark.parametrize("reweight", ["stochastic", "deterministic"])
def test_favano_averages_models_and_scales_by_alpha(reweight: str) -> None:
    """w[t+1] = (w[t] + Σ (w[τ] − Δ/α)) / (s + 1), with α recomputed here from what was answered."""
    own = ALGORITHMS["favano"].settings_type(reweight=reweight, wait_seconds=0.05)
    seen: dict[int, list[int]] = {}
    interrupted = 0
    for record in case("favano", 6, 3, steps=8, own=own, step_seconds=0.01).plan(60).rounds:
        merge = record.merge
        past: Counter[int] = Counter({merge.version - 1: 1})
        past.update(update.version for update, _ in merge.updates)
        assert dict(merge.past) == pytest.approx({v: count / 4 for v, count in past.items()})
        assert len({update.client for update, _ in merge.updates}) == 3
        for update, weight in merge.updates:
            answers = seen.setdefault(update.client, [])
            answers.append(update.steps)
            mean, busy = np.mean(answers), np.mean([q > 0 for q in answers])
            alpha = mean if reweight == "deterministic" else busy * update.steps
            interrupted += 0 < update.steps < 8
            assert weight == pytest.approx(-1.0 / (4 * (alpha if update.steps else 1.0)))
    assert interrupted > 20


# Who takes part (invariant 4).

UNEQUAL = Slowness.parse("uniform(1, 30)")


def spearman(left: Any, right: Any) -> float:
    first, second = (np.argsort(np.argsort(values)) for values in (left, right))
    return float(np.corrcoef(first, second)[0, 1])


@pytest.mark.parametrize("mode", ["eager", "thrifty"])
def test_defedavg_niid_draws_uniformly_whatever_the_speed(mode: str) -> None:
    clients, n, rounds = 12, 4, 2_500
    own = ALGORITHMS["defedavg-niid"].settings_type(mode=mode)
    found = case("defedavg-niid", clients, n, own=own, steps=2, slowness=UNEQUAL, step_seconds=0.01)
    draws = np.zeros(clients)
    for record in found.plan(rounds).rounds:
        counts = {u.client: -b * n for u, b in record.merge.updates}
        assert sum(counts.values()) == pytest.approx(n)
        for client, count in counts.items():
            draws[client] += round(count)
    assert draws.sum() == n * rounds
    expected = n * rounds / clients
    assert ((draws - expected) ** 2 / expected).sum() < 36.1  # 11 degrees of freedom, p = 0.00016
    # With replacement: P(a client is drawn twice or more in a round) is not zero, and its speed is no help either.
    assert abs(spearman(draws, found.fleet.step_times)) < 0.75


@pytest.mark.parametrize("name", ["defedavg-iid", "fedbuff", "asysg"])
def test_in_open_rounds_participation_grows_with_speed(name: str) -> None:
    found = case(name, 20, 3, steps=2, slowness=UNEQUAL, step_seconds=0.05)
    taken = Counter(u.client for record in found.plan(600).rounds for u, _ in record.merge.updates)
    assert spearman([taken[i] for i in range(20)], 1.0 / found.fleet.step_times) > 0.95
    assert max(taken.values()) > 4 * min(taken[i] for i in range(20))


@pytest.mark.parametrize("replacement", [True, False])
def test_fedavg_draws_uniformly(replacement: bool) -> None:
    own = ALGORITHMS["fedavg"].settings_type(replacement=replacement)
    draws: Counter[int] = Counter()
    twice = 0
    for record in case("fedavg", 10, 4, own=own, steps=1).plan(2_000).rounds:
        counts = {u.client: round(-b * 4) for u, b in record.merge.updates}
        draws.update(counts)
        twice += len(counts) < 4
    found = np.array([draws[i] for i in range(10)])
    assert ((found - 800.0) ** 2 / 800.0).sum() < 33.0  # 9 degrees of freedom, p = 0.00013
    # Four of ten with replacement differ with probability 0.504.
    assert twice / 2_000 == pytest.approx(0.496 if replacement else 0.0, abs=0.06)


def test_the_papers_round_times() -> None:
    """N = 100, K = 50, FashionMNIST figures: seconds a round, and mean staleness, against an independent simulation."""
    table = {
        "fedavg": (0.495, 0.0),
        "defedavg-iid": (0.028, 11.6),
        "defedavg-niid": (0.139, 3.7),
        "fedbuff": (0.033, 9.9),
    }
    for name, (seconds, staleness) in table.items():
        plan = case(name, 100, 10, steps=50).plan(300)
        assert plan.seconds / 300 == pytest.approx(seconds, rel=0.12), name
        delays = [delay for record in plan.rounds for delay in record.merge.staleness]
        assert float(np.mean(delays)) == pytest.approx(staleness, rel=0.12, abs=0.01), name


def test_only_a_small_share_of_eager_jobs_is_merged() -> None:
    plan = case("defedavg-niid", 100, 10, steps=50).plan(400)
    merged = sum(len(record.merge.updates) for record in plan.rounds)
    assert merged / len(plan.jobs) == pytest.approx(3_800 / 21_600, rel=0.15)


@bounded(30)
@given(st.integers(1, 200), st.integers(1, 20))
def test_a_plan_starts_at_version_zero(clients: int, n: int) -> None:
    record = case("defedavg-niid", clients, n).plan(1).rounds[0]
    assert isinstance(record.merge, Merge)
    assert record.merge.version == 1
    assert {update.version for update, _ in record.merge.updates} == {0}


@pytest.mark.parametrize("clients", [1, 4])
def test_a_client_that_was_asked_in_vain_many_times_goes_on_when_it_can_be_reached(clients: int) -> None:
    """FAVANO: all requests reach it at once; its answer to the last comes too late, and it is given more to do."""
    words: dict[str, Any] = {"slowness": Slowness.parse("equal"), "step_seconds": 0.0017, "model_megabytes": 0.0}
    found = case("favano", clients, 1, steps=1, timeout=0.05, availability=Windows(0.2, 0.3), **words)
    rounds = found.plan(60 * clients).rounds
    later = {update.client for record in rounds[30 * clients :] for update, _ in record.merge.updates}
    assert later == set(range(clients))


def test_of_two_versions_that_arrive_at_one_moment_the_newer_counts() -> None:
    """Waits that run out send again; rounding can let both reach the client together."""
    words: dict[str, Any] = {"slowness": Slowness.parse("equal"), "step_seconds": 0.0017, "model_megabytes": 2.2}
    found = case("fedbuff", 1, 1, steps=2, timeout=0.3, uplink_mbps=400.0, downlink_mbps=10.0, **words)
    assert len(agrees_with_twin(found, 12).rounds) == 12


@bounded(150)
@given(cases(), st.sampled_from([0.05, 0.3, 3.0]))
def test_the_timeline_agrees_with_its_twin_where_waits_run_out(found: Case, timeout: float) -> None:
    assume(found.fleet.availability is None)  # where it is, windows open at moments that differ in the last bit
    agrees_with_twin(
        dataclasses.replace(found, setup=dataclasses.replace(found.setup, timeout_seconds=timeout)), ROUNDS
    )
