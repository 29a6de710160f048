"""A fault of an algorithm is an error before its round is trained, in every simulator, command and deployment."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

from defedavg import simulate
from defedavg.algorithms import Setup, register
from defedavg.algorithms.protocol import Merge, Send, Update
from defedavg.deploy.engine import events
from defedavg.deploy.engine.engine import Engine
from defedavg.errors import UserError
from defedavg.planning import action_checks, simulator
from defedavg.planning.devices import Fleet
from defedavg.planning.plan import Plan
from defedavg.planning.sparse_simulator import make_simulator_for
from helpers import faulty_algorithms as faulty
from helpers.command_line import call, refuse
from helpers.deployments import World, agrees, checked

SETTINGS = {
    "task.model": "softmax",
    "clients.num_clients": 10,
    "training.local_steps": 2,
    "training.updates_per_round": 3,
    "stop.max_rounds": 30,
    "stop.eval_every_rounds": 30,
}
IN_A_DEPLOYMENT = [
    faulty.WrongSum,
    faulty.OlderVersion,
    faulty.UndeclaredBroadcast,
    faulty.Stalls,
    faulty.AnswersMergeWithNothing,
    faulty.SetsTextTimer,
    faulty.DiscardsNumber,
]
TWICE = ("the plan is not valid", "is merged twice")
ALL_FAULTS: dict[type[faulty.SendsToSenders], tuple[str, ...]] = {**faulty.FAULTS, faulty.MergesTwice: TWICE}


def ids(value: object) -> str | None:
    return value.__name__ if isinstance(value, type) else None


@pytest.fixture(autouse=True)
def few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds end after fewer events, so that the tests are quick."""
    monkeypatch.setattr(simulator, "MAX_EVENTS_WITHOUT_MERGE", 10_000)


pytestmark = pytest.mark.usefixtures("registry")


@pytest.mark.parametrize("executor", ["batched", "reference"])
@pytest.mark.parametrize(("kind", "words"), ALL_FAULTS.items(), ids=ids)
def test_simulate_reports_a_late_fault(
    kind: type[faulty.SendsToSenders], words: tuple[str, ...], executor: str
) -> None:
    register(kind)
    with pytest.raises(UserError) as caught:
        simulate(kind.name, settings=SETTINGS, executor=executor)
    for word in (f"algorithm {kind.name!r}", *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("detail", ["all", "used"])
@pytest.mark.parametrize(("kind", "words"), faulty.FAULTS.items(), ids=ids)
def test_every_simulator_reports_it(kind: type[faulty.SendsToSenders], words: tuple[str, ...], detail: str) -> None:
    made = make_simulator_for(kind(Setup(10, 3, 2)), Fleet(10), detail)
    assert made.sparse == (detail == "used")
    with pytest.raises(UserError) as caught:
        Plan.collect(made, 30)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("kind", [*IN_A_DEPLOYMENT, faulty.MergesTwice, faulty.ReturnsNothing])
def test_the_commands_report_it_in_one_line(kind: type[faulty.SendsToSenders], command: str, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(
        inspect.getsource(faulty) + f"\nfrom defedavg.algorithms import register\nregister({kind.__name__})\n"
    )
    (tmp_path / "study.toml").write_text(
        f'algorithms = ["{kind.name}"]\nplugins = ["plugin.py"]\n[task]\nmodel = "softmax"\n[clients]\n'
        "num_clients = 10\n[training]\nlocal_steps = 2\nupdates_per_round = 3\n[stop]\nmax_rounds = 30\n"
    )
    refuse(call(command, "study.toml", cwd=tmp_path), f"algorithm {kind.name!r}", *ALL_FAULTS[kind])


def test_rounding_of_the_sum_is_tolerated_and_nothing_more() -> None:
    server = faulty.SendsToSenders(Setup(10, 3, 2))
    for error in (0.0, 0.5 * action_checks.SUM_TOLERANCE, -0.5 * action_checks.SUM_TOLERANCE):
        merge = faulty.SendsToSenders(Setup(10, 3, 2)).merge([], [(0, 1.0 + error)])
        action_checks.check_merge(server, merge, 0)
    for error in (2 * action_checks.SUM_TOLERANCE, -2 * action_checks.SUM_TOLERANCE, float("nan")):
        merge = faulty.SendsToSenders(Setup(10, 3, 2)).merge([], [(0, 1.0 + error)])
        with pytest.raises(UserError, match="round 1: the coefficients"):
            action_checks.check_merge(server, merge, 0)


def test_a_declared_older_version_is_kept_until_its_last_use() -> None:
    kind = faulty.DeclaredOlderVersion
    register(kind)
    results = [simulate(kind.name, settings=SETTINGS, executor=executor) for executor in ("batched", "reference")]
    for result in results:
        assert result.rounds == 30
        result.plan.check()
        assert dict(result.plan.rounds[-1].merge.past) == {24: 0.5, 29: 0.5}
        freed = [version for record in result.plan.rounds for version in record.freed]
        assert len(freed) == len(set(freed))
        assert max(freed) == 24  # the next merge may use 25, and no later one may
    assert results[0].plan == results[1].plan
    assert results[0].weights.allclose(results[1].weights, rtol=1e-4, atol=1e-6)
    plans = [
        Plan.collect(make_simulator_for(kind(Setup(10, 3, 2)), Fleet(10), detail), 30) for detail in ("all", "used")
    ]
    assert plans[0].rounds == plans[1].rounds


def test_versions_are_freed_as_before_without_the_declaration() -> None:
    plain = Plan.collect(make_simulator_for(faulty.SendsToSenders(Setup(10, 3, 2)), Fleet(10), "all"), 30)
    kept = Plan.collect(make_simulator_for(faulty.DeclaredOlderVersion(Setup(10, 3, 2)), Fleet(10), "all"), 30)
    assert sum(len(record.freed) for record in plain.rounds) > sum(len(record.freed) for record in kept.rounds)


@pytest.mark.parametrize("value", [-1, 1.5, True, "2", None])
def test_the_declaration_is_checked(value: object) -> None:
    kind = type("Bad", (faulty.SendsToSenders,), {"past_versions": value, "name": "bad"})
    with pytest.raises(UserError, match=r"past_versions is .*; set it to a whole number of zero or more"):
        register(kind)


@pytest.mark.usefixtures("worlds")
def test_a_deployment_keeps_a_declared_older_version(tmp_path: Path) -> None:
    register(faulty.DeclaredOlderVersion)
    world = World(tmp_path / "run", algorithm="declared-older-version", stop__max_rounds=14)
    world.until(lambda: world.session.engine.server.version >= 11)
    world.crash()
    world.coordinator.run()
    _, found = checked(world)
    assert len(found.plan.rounds) == 14
    assert dict(found.plan.rounds[-1].merge.past) == {8: 0.5, 13: 0.5}
    agrees(world, found)


@pytest.mark.usefixtures("worlds")
@pytest.mark.parametrize("kind", [*IN_A_DEPLOYMENT, faulty.Raises])
def test_a_deployment_reports_it(kind: type[faulty.SendsToSenders], tmp_path: Path) -> None:
    register(kind)
    world = World(tmp_path / "run", algorithm=kind.name, stop__max_rounds=30)
    with pytest.raises(UserError) as caught:
        world.coordinator.run()
    assert all(word in str(caught.value) for word in (f"algorithm {kind.name!r}", *ALL_FAULTS[kind]))


def test_an_engine_refuses_a_client_that_does_not_exist() -> None:
    engine = Engine(faulty.SendsToNoClient(Setup(2, 1, 2)), 30)
    engine.server.version = faulty.FAULT_ROUND
    engine.server.start = lambda: [Send(2, 0)]  # type: ignore[method-assign]
    with pytest.raises(UserError, match="Send names client 2; give one of 0 to 1"):
        engine.handle(events.Began(0.0))


def test_numbers_of_numpy_are_coefficients() -> None:
    server = faulty.SendsToSenders(Setup(10, 3, 2))
    merge = server.merge([(Update(1, 0, 0, 2), np.float32(-0.5))], [(np.int64(0), np.float32(1.0))])  # type: ignore[list-item]
    assert merge == Merge(1, ((0, 1.0),), ((Update(1, 0, 0, 2), -0.5),))
    assert {type(number) for pair in (*merge.past, *merge.updates) for number in pair} == {int, float, Update}


def test_an_error_of_this_package_is_not_blamed_on_the_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    made = simulator.Simulator(faulty.SendsToSenders(Setup(10, 3, 2)), Fleet(10))
    monkeypatch.setattr(made, "_merge", lambda merge: merge.missing)
    with pytest.raises(AttributeError):
        Plan.collect(made, 30)
