"""The virtual clock agrees with a naive simulator, is deterministic, and has the right limits."""

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
from defedavg.planning.devices import Fleet, Windows
from defedavg.planning.plan import Plan
from defedavg.planning.records import Job, Round
from defedavg.planning.simulator import Simulator
from defedavg.planning.slowness import Slowness
from helpers.naive_simulator import agrees_with_naive
from helpers.strategies import Case, bounded, case, cases, equal_speeds, up_to, variants

NAMES = list(ALGORITHMS)
ROUNDS = 12


@bounded(250)
@given(cases())
def test_the_simulator_agrees_with_the_naive_one(found: Case) -> None:
    assert len(agrees_with_naive(found, ROUNDS).rounds) == ROUNDS


@bounded(200)
@given(cases())
def test_every_plan_satisfies_the_invariants(found: Case) -> None:
    found.plan(ROUNDS).check()


@pytest.mark.parametrize("name", NAMES)
def test_the_simulators_agree_if_all_times_tie(name: str) -> None:
    for settings, clients, n in itertools.product(variants(ALGORITHMS[name]), (1, 3, 7), (1, 3)):
        if n <= clients:
            agrees_with_naive(case(name, clients, n, settings=settings, **equal_speeds()), 20)


@bounded(60)
@given(cases())
def test_taking_five_rounds_then_ten_gives_the_same_prefix(found: Case) -> None:
    short, long = up_to(iter(found.simulator()), 5), up_to(iter(found.simulator()), 10)
    assert long[: len(short)] == short
    stream = iter(found.simulator())
    assert up_to(stream, 5) + up_to(stream, 10) == long


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_gives_another_plan(name: str) -> None:
    def records(seed: int) -> Plan:
        plan = case(name, 8, 3, seed=seed).plan(10)
        return Plan(
            dataclasses.replace(plan.header, seed=0), plan.records
        )  # the header alone must not make them differ

    assert len({records(seed).hash() for seed in range(5)}) == 5


@pytest.mark.parametrize("name", NAMES)
def test_draws_depend_on_the_seed_even_if_speeds_do_not(name: str) -> None:
    """If the server draws at all, other seeds draw other clients."""
    settings = ALGORITHMS[name].settings_type()
    merges = set()
    for seed in range(6):
        found = case(name, 9, 2, seed=seed, settings=settings, **equal_speeds())
        merges.add(tuple(tuple(u.client for u, _ in record.merge.updates) for record in found.plan(8).rounds))
    broadcast_to_all = ALGORITHMS[name].broadcasts and not ALGORITHMS[name].policy.hold_until_requested
    everyone_trains = "concurrency" in {field.name for field in dataclasses.fields(settings)}
    assert (len(merges) == 1) == (broadcast_to_all or everyone_trains)


class Backwards(dict[int, None]):
    """A dictionary that lists its keys from the last to the first."""

    def __iter__(self) -> Iterator[int]:
        return reversed(list(super().__iter__()))


@bounded(60)
@given(cases())
def test_the_order_of_clients_in_memory_changes_nothing(found: Case) -> None:
    simulator = found.simulator()
    simulator._idle = Backwards()
    assert Plan.collect(simulator, 8).hash() == found.plan(8).hash()


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
    assert setup.timeout_seconds == fleet.automatic_timeout(3)  # clients can be lost


def test_there_is_no_timeout_if_no_client_can_fail() -> None:
    assert make_simulator(config.study({}).points()[0].settings, 0).server.setup.timeout_seconds is None


def test_server_and_fleet_must_agree() -> None:
    found = case("fedavg", 3, 2)
    with pytest.raises(ValueError, match="different numbers"):
        Simulator(found.server(), Fleet(4))


# Versions.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slowness", ["equal", "two-speed(0.5, 30)"])
def test_no_version_is_freed_that_is_used_later(name: str, slowness: str) -> None:
    """No job starts from a freed version, and no merge uses one; checked from the records alone."""
    for settings in variants(ALGORITHMS[name]):
        freed: set[int] = set()
        found = case(name, 7, 3, settings=settings, slowness=Slowness.parse(slowness), latency_seconds=0.02, jitter=0.2)
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
    """The number of versions is bounded by clients and buffers, not by the length of the plan."""
    for settings in variants(ALGORITHMS[name]):
        live, most = 1, []
        for record in case(name, 6, 2, settings=settings, step_seconds=0.02, model_megabytes=0.1).plan(500).rounds:
            live += 1 - len(record.freed)
            most.append(live)
        # Receive buffer, running job, send buffer or upload: three per client, and the newest two.
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
def test_with_equal_speeds_and_all_clients_asynchronous_algorithms_equal_fedavg(clients: int, steps: int) -> None:
    arguments: dict[str, Any] = {"steps": steps, **equal_speeds()}
    drawn = dataclasses.replace(ALGORITHMS["fedavg"].settings_type(), replacement=False)
    fedavg = merges(case("fedavg", clients, clients, settings=drawn, **arguments).plan(15), index=True)
    assert len(fedavg) == 15
    assert merges(case("defedavg-iid", clients, clients, **arguments).plan(15), index=True) == fedavg
    full = ALGORITHMS["fedbuff"].settings_type(concurrency=clients)
    assert merges(case("fedbuff", clients, clients, settings=full, **arguments).plan(15), index=True) == fedavg
    for time, past, updates in fedavg:
        version = past[0][0]
        assert past == ((version, 1.0),)
        assert updates == [(client, version, steps, -1.0 / clients, version) for client in range(clients)]
        assert time == pytest.approx((version + 1) * (0.25 * steps + 2 * 0.5))


@pytest.mark.parametrize("seed", range(3))
def test_with_one_local_step_defedavg_iid_equals_asysg(seed: int) -> None:
    defedavg = case("defedavg-iid", 9, 4, steps=1, seed=seed, jitter=0.2).plan(40)
    asysg = case("asysg", 9, 4, steps=50, seed=seed, jitter=0.2).plan(40)
    assert asysg.records == defedavg.records
    assert dataclasses.replace(asysg.header, algorithm="defedavg-iid") == defedavg.header


@pytest.mark.parametrize("name", [name for name, kind in ALGORITHMS.items() if kind.uses_updates_per_round])
def test_with_equal_speeds_and_all_clients_no_update_is_stale(name: str) -> None:
    """Staleness is 0 if every round has all clients; draws with replacement omit some, whose updates are stale.

    Clients of FAVANO that receive a version when they are drawn do not have the one of that round's merge.
    """
    for settings in variants(ALGORITHMS[name]):
        if getattr(settings, "send", "merge") == "draw":
            continue
        plan = case(name, 5, 5, settings=settings, **equal_speeds()).plan(12)
        all_participate = all(len(record.merge.updates) == 5 for record in plan.rounds)
        stale = {delay for record in plan.rounds for delay in record.merge.staleness} != {0}
        assert not (all_participate and stale)
        replaced = "replacement" in ALGORITHMS[name].equation or getattr(settings, "replacement", False)
        assert all_participate or replaced or not ALGORITHMS[name].uses_updates_per_round


def test_fedavg_is_never_stale() -> None:
    for settings in variants(ALGORITHMS["fedavg"]):
        plan = case("fedavg", 9, 4, settings=settings, jitter=0.5).plan(20)
        assert {delay for record in plan.rounds for delay in record.merge.staleness} == {0}


@pytest.mark.parametrize("name", [name for name, kind in ALGORITHMS.items() if kind.uses_global_lr])
def test_one_client_gives_sequential_sgd(name: str) -> None:
    for settings in variants(ALGORITHMS[name]):
        plan = case(name, 1, 1, settings=settings, steps=3).plan(10)
        for t, record in enumerate(plan.rounds):
            merge = record.merge
            ((update, weight),) = merge.updates
            assert (merge.version, merge.past) == (t + 1, ((t, 1.0),))
            # An update that enters through state vectors alone has no coefficient; oracles compare its effect.
            assert weight == -1.0 or (weight == 0.0 and update in merge.assigned)
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
    settings = ALGORITHMS["fedbuff"].settings_type(staleness="sqrt")
    plan = case("fedbuff", 9, 3, settings=settings).plan(30)
    assert max(delay for record in plan.rounds for delay in record.merge.staleness) > 1
    for record in plan.rounds:
        for (_, weight), delay in zip(record.merge.updates, record.merge.staleness, strict=True):
            assert weight == pytest.approx(-1.0 / (3 * (1 + delay) ** 0.5))


@pytest.mark.parametrize("reweight", ["stochastic", "deterministic", "none"])
def test_favano_averages_models_and_scales_by_alpha(reweight: str) -> None:
    """w[t+1] = (w[t] + Σ (w[τ] − Δ/α)) / (s + 1), with α recomputed here from the answers."""
    settings = ALGORITHMS["favano"].settings_type(reweight=reweight, wait_seconds=0.05)
    seen: dict[int, list[int]] = {}
    interrupted = 0
    for record in case("favano", 6, 3, steps=8, settings=settings, step_seconds=0.01).plan(60).rounds:
        merge = record.merge
        past: Counter[int] = Counter({merge.version - 1: 1})
        past.update(update.version for update, _ in merge.updates)
        assert dict(merge.past) == pytest.approx({v: count / 4 for v, count in past.items()})
        assert len({update.client for update, _ in merge.updates}) == 3
        for update, weight in merge.updates:
            answers = seen.setdefault(update.client, [])
            answers.append(update.steps)
            mean, busy = np.mean(answers), np.mean([q > 0 for q in answers])
            alpha = {"deterministic": float(mean), "stochastic": float(busy * update.steps), "none": 8.0}[reweight]
            interrupted += 0 < update.steps < 8
            assert weight == pytest.approx(-1.0 / (4 * (alpha if update.steps else 1.0)))
    assert interrupted > 20


# Participation.

UNEQUAL = Slowness.parse("uniform(1, 30)")


def spearman(left: Any, right: Any) -> float:
    first, second = (np.argsort(np.argsort(values)) for values in (left, right))
    return float(np.corrcoef(first, second)[0, 1])


@pytest.mark.parametrize("mode", ["eager", "thrifty"])
def test_defedavg_niid_draws_uniformly_at_any_speed(mode: str) -> None:
    clients, n, rounds = 12, 4, 2_500
    settings = ALGORITHMS["defedavg-niid"].settings_type(mode=mode)
    found = case("defedavg-niid", clients, n, settings=settings, steps=2, slowness=UNEQUAL, step_seconds=0.01)
    draws = np.zeros(clients)
    for record in found.plan(rounds).rounds:
        counts = {u.client: -b * n for u, b in record.merge.updates}
        assert sum(counts.values()) == pytest.approx(n)
        for client, count in counts.items():
            draws[client] += round(count)
    assert draws.sum() == n * rounds
    expected = n * rounds / clients
    assert ((draws - expected) ** 2 / expected).sum() < 36.1  # 11 degrees of freedom, p = 0.00016
    # With replacement: P(a client is drawn twice or more in a round) is not zero, and does not depend on its speed.
    assert abs(spearman(draws, found.fleet.step_times)) < 0.75


@pytest.mark.parametrize("name", ["defedavg-iid", "fedbuff", "asysg"])
def test_in_buffered_rounds_participation_grows_with_speed(name: str) -> None:
    found = case(name, 20, 3, steps=2, slowness=UNEQUAL, step_seconds=0.05)
    taken = Counter(u.client for record in found.plan(600).rounds for u, _ in record.merge.updates)
    assert spearman([taken[i] for i in range(20)], 1.0 / found.fleet.step_times) > 0.95
    assert max(taken.values()) > 4 * min(taken[i] for i in range(20))


@pytest.mark.parametrize("replacement", [True, False])
def test_fedavg_draws_uniformly(replacement: bool) -> None:
    settings = ALGORITHMS["fedavg"].settings_type(replacement=replacement)
    draws: Counter[int] = Counter()
    twice = 0
    for record in case("fedavg", 10, 4, settings=settings, steps=1).plan(2_000).rounds:
        counts = {u.client: round(-b * 4) for u, b in record.merge.updates}
        draws.update(counts)
        twice += len(counts) < 4
    found = np.array([draws[i] for i in range(10)])
    assert ((found - 800.0) ** 2 / 800.0).sum() < 33.0  # 9 degrees of freedom, p = 0.00013
    # Four of ten with replacement differ with probability 0.504.
    assert twice / 2_000 == pytest.approx(0.496 if replacement else 0.0, abs=0.06)


def test_the_papers_round_times() -> None:
    """N = 100, K = 50, FashionMNIST: seconds per round and mean staleness against an independent simulation."""
    table = {
        "fedavg": (0.495, 0.0),
        "defedavg-iid": (0.028, 11.6),
        "defedavg-niid": (0.139, 3.7),
        "fedbuff": (0.033, 9.9),
    }
    for name, (seconds, staleness) in table.items():
        plan = case(name, 100, 10, steps=50, upload="blocking").plan(300)
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
def test_a_client_that_missed_many_requests_continues_when_it_is_reachable(clients: int) -> None:
    """FAVANO: all requests reach it at once; its last answer arrives too late, and it receives a new version."""
    arguments: dict[str, Any] = {"slowness": Slowness.parse("equal"), "step_seconds": 0.0017, "model_megabytes": 0.0}
    found = case("favano", clients, 1, steps=1, timeout=0.05, availability=Windows(0.2, 0.3), **arguments)
    rounds = found.plan(60 * clients).rounds
    later = {update.client for record in rounds[30 * clients :] for update, _ in record.merge.updates}
    assert later == set(range(clients))


def test_of_two_versions_that_arrive_at_once_the_newer_one_counts() -> None:
    """After a timeout the server sends again; by rounding both versions can arrive at the same time."""
    arguments: dict[str, Any] = {"slowness": Slowness.parse("equal"), "step_seconds": 0.0017, "model_megabytes": 2.2}
    found = case("fedbuff", 1, 1, steps=2, timeout=0.3, uplink_mbps=400.0, downlink_mbps=10.0, **arguments)
    assert len(agrees_with_naive(found, 12).rounds) == 12


@bounded(150)
@given(cases(), st.sampled_from([0.05, 0.3, 3.0]))
def test_the_simulators_agree_with_timeouts(found: Case, timeout: float) -> None:
    assume(found.fleet.availability is None)  # windows open at times that differ in the last bit
    agrees_with_naive(
        dataclasses.replace(found, setup=dataclasses.replace(found.setup, timeout_seconds=timeout)), ROUNDS
    )
