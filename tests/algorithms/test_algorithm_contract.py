"""The contract that every registered algorithm keeps; a new one is tested by being registered."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS, ServerMachine, Setup, algorithm
from defedavg.algorithms.protocol import Broadcast, ClientPolicy, Merge, ProtocolError, Request, Send, Update
from defedavg.errors import UserError
from defedavg.planning.plan import Plan
from defedavg.planning.records import Job
from helpers.strategies import Case, bounded, case, cases, variants

pytestmark = pytest.mark.parametrize("name", ALGORITHMS)


def test_says_what_it_is(name: str) -> None:
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


def test_is_one_short_file_that_opens_with_its_law(name: str) -> None:
    module = inspect.getmodule(ALGORITHMS[name])
    assert module is not None
    assert module.__file__ is not None
    assert len(Path(module.__file__).read_text(encoding="utf-8").splitlines()) <= 115
    assert module.__doc__
    assert "w[t+1]" in module.__doc__
    assert any(year in module.__doc__ for year in map(str, range(2010, 2030))) or "Alg." in module.__doc__
    # One algorithm per file.
    assert [kind for kind in ALGORITHMS.values() if kind.__module__ == module.__name__] == [ALGORITHMS[name]]


def test_a_misspelt_name_is_met_with_the_right_one(name: str) -> None:
    with pytest.raises(UserError, match=name):
        algorithm(name + "x")


def test_settings_are_frozen_explained_and_have_defaults(name: str) -> None:
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
    """Every word that a text setting takes stands in its help; ``variants`` reads them from there."""
    kind = ALGORITHMS[name].settings_type
    for field in dataclasses.fields(kind):
        if isinstance(field.default, str):
            found = {getattr(own, field.name) for own in variants(ALGORITHMS[name])}
            assert field.default in found
            assert len(found) >= 2


@pytest.mark.parametrize("word", ["num_clients", "updates_per_round", "local_steps"])
@pytest.mark.parametrize("value", [0, -1])
def test_nothing_below_one_is_taken(name: str, word: str, value: int) -> None:
    with pytest.raises(UserError, match=word):
        ALGORITHMS[name](dataclasses.replace(Setup(4, 2, 3), **{word: value}))


@pytest.mark.parametrize("n", [5, 9])
def test_more_updates_than_clients_are_refused_or_work(name: str, n: int) -> None:
    for own in variants(ALGORITHMS[name]):
        try:
            ALGORITHMS[name](Setup(4, n, 3), own)
        except UserError as error:
            told = str(error)
        else:
            told = f"{name}: updates_per_round"
            plan = case(name, 4, n, own=own).plan(6)
            assert len(plan.rounds) == 6
            plan.check()
        assert told.startswith(f"{name}: updates_per_round")


def test_its_rule_makes_sense(name: str) -> None:
    kind = ALGORITHMS[name]
    for own in variants(kind):
        policy = kind.client_policy(own)
        assert isinstance(policy, ClientPolicy)
        assert policy.hold_until_requested or not (policy.pause_when_full or policy.interruptible)
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
        assert math.fsum(a for _, a in record.merge.past) == pytest.approx(1.0, abs=1e-12)
        assert all(a > 0 for _, a in record.merge.past)
        ids = [(update.client, update.index) for update, _ in record.merge.updates]
        assert ids == sorted(set(ids))
        assert min(record.merge.staleness) >= 0


@bounded(15)
@given(data=st.data())
def test_a_plan_is_deterministic(name: str, data: st.DataObject) -> None:
    found: Case = data.draw(cases((name,)))
    assert list(found.plan(6).lines()) == list(found.plan(6).lines())


def test_every_client_takes_part(name: str) -> None:
    for own in variants(ALGORITHMS[name]):
        plan = case(name, 6, 2, own=own).plan(150)
        assert {update.client for record in plan.rounds for update, _ in record.merge.updates} == set(range(6))


def test_jobs_have_all_their_steps_or_were_interrupted(name: str) -> None:
    kind = ALGORITHMS[name]
    for own in variants(kind):
        for job in case(name, 6, 2, own=own, step_seconds=0.01).plan(40).jobs:
            assert isinstance(job, Job)
            assert job.outcome != "interrupted" or kind.client_policy(own).interruptible
            assert job.steps == kind.steps_per_job(5) or job.outcome == "interrupted"


def answers(server: ServerMachine, seed: int) -> list[Any]:
    """Everything a server answers to a fixed course of events, legal and not."""
    told: list[Any] = [server.start()]
    jobs = [0] * server.setup.num_clients
    for step in range(60):
        client = (seed + step * step) % server.setup.num_clients
        event = (seed + step) % 5
        if event == 3:
            told.append(server.timer(step // 5))
        elif event == 4:
            told.append(server.returned(client) if step % 2 else server.end_of_instant())
        else:
            update = Update(client, jobs[client], max(0, server.version - event), 1 + step % 3)
            jobs[client] += event < 2  # now and then the same job again
            try:
                told.append(server.arrived(update))
            except ProtocolError as error:
                told.append(str(error))
    return told


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("timeout", [None, 2.0])
def test_identical_machines_answer_identical_events_identically(name: str, seed: int, timeout: float | None) -> None:
    for own in variants(ALGORITHMS[name]):
        setup = Setup(5, 2, 3, seed, timeout)
        first, second = (answers(ALGORITHMS[name](setup, own), seed) for _ in range(2))
        assert first == second
        flat = [action for told in first if isinstance(told, list) for action in told]
        assert any(isinstance(action, Merge) for action in flat)


def test_a_merge_is_told_to_somebody(name: str) -> None:
    """Whoever trains next gets the new version: by broadcast, to one client, or in answer to a request."""
    for own in variants(ALGORITHMS[name]):
        server = ALGORITHMS[name](Setup(3, 1, 2), own)
        actions = [*server.start(), *server.timer(1)]
        clients = [action.client for action in actions if isinstance(action, Send | Request)] or [0]
        told = [*server.arrived(Update(clients[-1], 0, 0, 1)), *server.end_of_instant()]
        assert isinstance(told[0], Merge)
        assert told[0].version == server.version == 1
        assert any(isinstance(a, Broadcast | Send) and a.version == 1 for a in told)


def test_settings_of_its_own_reach_the_machine(name: str) -> None:
    own = variants(ALGORITHMS[name])[-1]
    assert ALGORITHMS[name](Setup(3, 1, 2), own).settings == own
    assert ALGORITHMS[name](Setup(3, 1, 2)).settings == ALGORITHMS[name].settings_type()


def test_choices_change_the_plan(name: str) -> None:
    """A setting that changes nothing is not a setting."""
    kind = ALGORITHMS[name]
    # Jobs shorter than the pause, and longer: settings differ where clients wait, or where they are interrupted.
    plans: list[tuple[str, ...]] = []
    for own in variants(kind):
        made: list[Plan] = [case(name, 6, 3, own=own, step_seconds=step).plan(40) for step in (0.0017, 0.05)]
        plans.append(tuple(plan.hash() for plan in made))
    assert len(set(plans)) == len(plans)
