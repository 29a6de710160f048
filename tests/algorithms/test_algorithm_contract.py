"""The contract of every registered algorithm; registering an algorithm tests it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS, ServerMachine, Setup, algorithm
from defedavg.algorithms.protocol import Broadcast, ClientPolicy, Merge, ProtocolError, Request, Send, SetTimer, Update
from defedavg.errors import UserError
from defedavg.planning.plan import Plan
from defedavg.planning.records import Job
from helpers.strategies import Case, GuardedSimulator, bounded, case, cases, variants

pytestmark = pytest.mark.parametrize("name", ALGORITHMS)


def test_has_a_name_and_texts(name: str) -> None:
    kind = ALGORITHMS[name]
    assert kind.name == name
    assert name == name.lower().strip()
    assert algorithm(name) is kind
    for word in ("summary", "citation", "equation"):
        text = getattr(kind, word)
        assert word in vars(kind), f"{word} is inherited"
        assert len(text) >= 10
        assert "\n" not in text
        assert text == text.strip()
    assert kind.equation.startswith("w[t+1] = ")
    assert "__doc__" in vars(kind)
    assert kind.__doc__


def test_is_one_short_file_that_opens_with_its_equation(name: str) -> None:
    module = inspect.getmodule(ALGORITHMS[name])
    assert module is not None
    assert module.__file__ is not None
    assert len(Path(module.__file__).read_text(encoding="utf-8").splitlines()) <= 115
    assert module.__doc__
    assert "w[t+1]" in module.__doc__
    assert any(year in module.__doc__ for year in map(str, range(2010, 2030))) or "Alg." in module.__doc__
    # One algorithm per file.
    assert [kind for kind in ALGORITHMS.values() if kind.__module__ == module.__name__] == [ALGORITHMS[name]]


def test_a_misspelt_name_suggests_the_right_one(name: str) -> None:
    with pytest.raises(UserError, match=name):
        algorithm(name + "x")


def test_settings_are_frozen_and_have_help_and_defaults(name: str) -> None:
    kind = ALGORITHMS[name].settings_type
    assert dataclasses.is_dataclass(kind)
    assert kind.__doc__
    made: Any = kind()
    for field in dataclasses.fields(kind):
        assert field.default is not dataclasses.MISSING
        assert type(field.default) in (bool, int, float, str)
        assert len(field.metadata["help"]) >= 10
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, field.default)
        if isinstance(field.default, str):
            with pytest.raises(UserError, match="no-such-word"):
                kind(**{field.name: "no-such-word"})
    assert kind() == kind()


def test_help_texts_name_the_choices(name: str) -> None:
    """The help of a text setting lists its values; ``variants`` reads them there."""
    kind = ALGORITHMS[name].settings_type
    for field in dataclasses.fields(kind):
        if isinstance(field.default, str):
            found = {getattr(settings, field.name) for settings in variants(ALGORITHMS[name])}
            assert field.default in found
            assert len(found) >= 2


@pytest.mark.parametrize("word", ["num_clients", "updates_per_round", "local_steps"])
@pytest.mark.parametrize("value", [0, -1])
def test_values_below_one_are_refused(name: str, word: str, value: int) -> None:
    sizes = {"num_clients": 4, "updates_per_round": 2, "local_steps": 3} | {word: value}
    setup = Setup(sizes["num_clients"], sizes["updates_per_round"], sizes["local_steps"])
    with pytest.raises(UserError, match=word):
        ALGORITHMS[name](setup)


@pytest.mark.parametrize("n", [5, 9])
def test_more_updates_than_clients_are_refused_or_work(name: str, n: int) -> None:
    for settings in variants(ALGORITHMS[name]):
        try:
            ALGORITHMS[name](Setup(4, n, 3), settings)
        except UserError as error:
            message = str(error)
        else:
            message = f"{name}: updates_per_round"
            plan = case(name, 4, n, settings=settings).plan(6)
            assert len(plan.rounds) == 6
            plan.check()
        assert message.startswith(f"{name}: updates_per_round")


def test_its_client_policy_is_consistent(name: str) -> None:
    kind = ALGORITHMS[name]
    for settings in variants(kind):
        policy = kind.client_policy(settings)
        assert isinstance(policy, ClientPolicy)
        assert policy.hold_until_requested or not (policy.pause_when_full or policy.interruptible)
        assert kind.overlaps_uploads(settings) or not policy.background_upload
        server = kind(Setup(4, 2, 3), settings)
        assert server.policy_with("auto") == policy
        assert not server.policy_with("blocking").background_upload
        assert server.policy_with("background").background_upload == kind.overlaps_uploads(settings)
        assert 1 <= kind.steps_per_job(7) <= 7


@bounded(25)
@given(data=st.data())
def test_plans_pass_every_check(name: str, data: st.DataObject) -> None:
    found: Case = data.draw(cases((name,)))
    plan = found.plan(8)
    assert len(plan.rounds) == 8
    plan.check()
    assert plan.header.algorithm == name
    for record in plan.rounds:
        models = {spec.name for spec in plan.header.state if spec.initial == "model"}
        states = (c for vector, c in record.merge.states if vector.name in models)
        assert math.fsum((*(a for _, a in record.merge.past), *states)) == pytest.approx(1.0, abs=1e-12)
        assert all(a > 0 for _, a in record.merge.past)
        ids = [(update.client, update.index) for update, _ in record.merge.updates]
        assert ids == sorted(set(ids))
        assert min(record.merge.staleness) >= 0


@bounded(15)
@given(data=st.data())
def test_a_plan_is_deterministic(name: str, data: st.DataObject) -> None:
    found: Case = data.draw(cases((name,)))
    assert list(found.plan(6).lines()) == list(found.plan(6).lines())


def test_every_client_participates(name: str) -> None:
    for settings in variants(ALGORITHMS[name]):
        if getattr(settings, "rule", "discard") == "discard" and getattr(settings, "threshold", 0):
            continue  # all updates of the slowest clients are discarded
        plan = case(name, 6, 2, settings=settings).plan(150)
        assert {update.client for record in plan.rounds for update, _ in record.merge.updates} == set(range(6))


def test_jobs_have_all_their_steps_or_were_interrupted(name: str) -> None:
    kind = ALGORITHMS[name]
    for settings in variants(kind):
        for job in case(name, 6, 2, settings=settings, step_seconds=0.01).plan(40).jobs:
            assert isinstance(job, Job)
            assert job.outcome != "interrupted" or kind.client_policy(settings).interruptible
            stopped = job.outcome == "lost" and kind.client_policy(settings).restart_on_model
            assert job.steps == kind.steps_per_job(5) or job.outcome == "interrupted" or stopped


def answers(server: ServerMachine, seed: int) -> list[Any]:
    """Return a server's answers to a fixed sequence of legal and illegal events."""
    given: list[Any] = [server.start()]
    jobs = [0] * server.setup.num_clients
    for step in range(60):
        client = (seed + step * step) % server.setup.num_clients
        event = (seed + step) % 5
        if event == 3:
            given.append(server.timer(step // 5))
        elif event == 4:
            given.append(server.returned(client) if step % 2 else server.end_of_instant())
        else:
            update = Update(client, jobs[client], max(0, server.version - event), 1 + step % 3)
            jobs[client] += event < 2  # sometimes the same job again
            try:
                given.append(server.arrived(update))
            except ProtocolError as error:
                given.append(str(error))
    return given


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("timeout", [None, 2.0])
def test_identical_machines_answer_identical_events_identically(name: str, seed: int, timeout: float | None) -> None:
    for settings in variants(ALGORITHMS[name]):
        setup = Setup(5, 2, 3, seed, timeout)
        first, second = (answers(ALGORITHMS[name](setup, settings), seed) for _ in range(2))
        assert first == second
        flat = [action for answer in first if isinstance(answer, list) for action in answer]
        assert any(isinstance(action, Merge) for action in flat)


class RecordedServer:
    """Forward events to a server machine and keep them."""

    def __init__(self, server: ServerMachine) -> None:
        self.server = server
        self.events: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.server, name)
        if name not in ("start", "arrived", "timer", "end_of_instant", "returned"):
            return value

        def event(*arguments: Any) -> Any:
            self.events.append((name, arguments))
            return value(*arguments)

        return event


@bounded(25)
@given(data=st.data())
def test_a_machine_restored_from_json_makes_the_same_decisions(name: str, data: st.DataObject) -> None:
    found: Case = data.draw(cases((name,), lossy=data.draw(st.booleans())))
    recorded = RecordedServer(found.server())
    plan = Plan.collect(GuardedSimulator(cast(ServerMachine, recorded), found.fleet), 8)
    split = data.draw(st.integers(0, len(recorded.events)))
    original, restored = found.server(), found.server()
    for hook, arguments in recorded.events[:split]:
        getattr(original, hook)(*arguments)
    text = json.dumps(original.state())
    restored.restore(json.loads(text))
    assert json.dumps(restored.state()) == text
    for hook, arguments in recorded.events[split:]:
        assert getattr(restored, hook)(*arguments) == getattr(original, hook)(*arguments)
    assert restored.version == original.version == len(plan.rounds)
    assert json.dumps(restored.state()) == json.dumps(original.state())


def test_the_state_of_another_algorithm_or_format_is_refused(name: str) -> None:
    server = ALGORITHMS[name](Setup(4, 2, 3))
    state = server.state()
    for change in ({"algorithm": "other"}, {"format": 0}, {"more": 1}):
        with pytest.raises(UserError, match=f"not one of '{name}'"):
            server.restore({**state, **change})
    with pytest.raises(UserError, match=f"not one of '{name}'"):
        server.restore({key: value for key, value in state.items() if key != "pool"})
    assert server.state() == state


def test_an_attribute_that_would_not_be_saved_is_refused(name: str) -> None:
    server = ALGORITHMS[name](Setup(4, 2, 3))
    vars(server)["extra"] = 1
    with pytest.raises(UserError, match=f"{name}: extra would not be saved; add to state_attributes"):
        server.state()


def test_a_new_version_is_sent(name: str) -> None:
    """After a merge the server broadcasts the new version or sends it to a client, if need be when it next draws."""
    for settings in variants(ALGORITHMS[name]):
        server = ALGORITHMS[name](Setup(3, 1, 2), settings)
        actions = [*server.start(), *server.timer(1)]
        clients = [action.client for action in actions if isinstance(action, Send | Request)] or [0]
        actions = [*server.arrived(Update(clients[-1], 0, 0, 1)), *server.end_of_instant()]
        assert isinstance(actions[0], Merge)
        assert actions[0].version == server.version == 1
        if getattr(settings, "send", "merge") == "draw":
            actions = [each for a in actions if isinstance(a, SetTimer) for each in server.timer(a.token)]
        assert any(isinstance(a, Broadcast | Send) and a.version == 1 for a in actions)


def test_the_machine_has_its_settings(name: str) -> None:
    settings = variants(ALGORITHMS[name])[-1]
    assert ALGORITHMS[name](Setup(3, 1, 2), settings).settings == settings
    assert ALGORITHMS[name](Setup(3, 1, 2)).settings == ALGORITHMS[name].settings_type()


def test_choices_change_the_plan(name: str) -> None:
    """Every value of a setting changes the plan."""
    kind = ALGORITHMS[name]
    # Jobs shorter and longer than the pause: settings matter when clients wait, or when they are interrupted.
    plans: list[tuple[str, ...]] = []
    for settings in variants(kind):
        made: list[Plan] = [case(name, 6, 3, settings=settings, step_seconds=step).plan(40) for step in (0.0017, 0.05)]
        plans.append(tuple(plan.hash() for plan in made))
    assert len(set(plans)) == len(plans)
