"""Plans of eager clients that are computed between events are those of the simulator that handles every event."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS, Setup
from defedavg.algorithms.base import Actions
from defedavg.algorithms.defedavg_niid import DeFedAvgNIID
from defedavg.algorithms.protocol import Request, Send
from defedavg.errors import UserError
from defedavg.planning.devices import Fleet, Windows
from defedavg.planning.eager_simulator import EagerSimulator
from defedavg.planning.plan import Plan
from defedavg.planning.plan_recorder import PlanRecorder
from defedavg.planning.records import Record
from defedavg.planning.simulator import Simulator
from defedavg.planning.sparse_simulator import make_simulator_for
from helpers.strategies import Case, bounded, case, cases, equal_speeds

EAGER = ALGORITHMS["defedavg-niid"].settings_type()


def eager(found: Case) -> EagerSimulator:
    """Return the simulator that is chosen for a complete plan."""
    simulator = make_simulator_for(found.server(), found.fleet)
    assert isinstance(simulator, EagerSimulator)
    return simulator


def eager_cases() -> st.SearchStrategy[Case]:
    found = cases(("defedavg-niid",), windows=False)
    return found.map(lambda each: dataclasses.replace(each, settings=EAGER))


@bounded(250)
@given(eager_cases(), st.integers(0, 14), st.sampled_from([math.inf, math.inf, 0.25, 0.51, 1.0, 3.0]))
def test_plans_are_equal_record_by_record(found: Case, rounds: int, seconds: float) -> None:
    assert Plan.collect(eager(found), rounds, seconds) == Plan.collect(found.simulator(), rounds, seconds)


@pytest.mark.parametrize(("clients", "n"), [(1, 1), (3, 1), (7, 3), (40, 10)])
@pytest.mark.parametrize("megabytes", [0.0, 12.5, 25.0])
def test_plans_are_equal_if_all_times_tie(clients: int, n: int, megabytes: float) -> None:
    """A job takes 1.25 s, and a transfer nothing, 0.25 s or 0.5 s, so that ends, arrivals and starts coincide."""
    found = case("defedavg-niid", clients, n, **{**equal_speeds(), "model_megabytes": megabytes})
    assert Plan.collect(eager(found), 30).hash() == found.plan(30).hash()


@bounded(40)
@given(eager_cases(), st.integers(0, 6), st.integers(0, 5))
def test_a_recorded_plan_has_the_jobs_that_were_running(found: Case, rounds: int, ahead: int) -> None:
    simulator = eager(found)
    records: list[Record] = []
    recorder = PlanRecorder(simulator, records.append)
    reader = iter(recorder)
    for _ in range(ahead * found.setup.num_clients):
        next(reader)
    recorder.finish(rounds)
    assert Plan(simulator.header, tuple(records)) == found.plan(rounds)


class _Sending(DeFedAvgNIID):
    """Sends the new version to one client, although it was broadcast."""

    name = "sending"

    def close_round(self) -> Actions:
        actions = super().close_round()
        return [*actions, Send(0, self.version)] if self.version else actions


class _Declaring(_Sending):
    requests_once = True


class _Repeating(DeFedAvgNIID):
    requests_once = True
    name = "repeating"

    def on_update(self, update: object) -> Actions:
        return [Request(0), Request(1)]


def test_a_subclass_must_declare_it_again_and_is_held_to_it() -> None:
    setup, fleet = Setup(6, 2, 5), Fleet(6)
    inherited = make_simulator_for(_Sending(setup), fleet)
    assert type(inherited) is Simulator
    assert len(Plan.collect(inherited, 5).rounds) == 5
    with pytest.raises(UserError, match=r"'sending': it returns Send.*after round 0; set requests_once to False"):
        Plan.collect(make_simulator_for(_Declaring(setup), fleet), 5)
    with pytest.raises(UserError, match=r"'repeating': it requests client [01] again before its update has arrived"):
        Plan.collect(make_simulator_for(_Repeating(setup), fleet), 5)


def test_events_are_handled_where_they_decide_something() -> None:
    server = ALGORITHMS["defedavg-niid"]
    setup, reliable = Setup(6, 2, 5), Fleet(6)
    for fleet in (Fleet(6, failure_rate=0.1), Fleet(6, availability=Windows(1.0, 1.0))):
        assert type(make_simulator_for(server(setup), fleet)) is Simulator
    assert type(make_simulator_for(server(dataclasses.replace(setup, timeout_seconds=1.0)), reliable)) is Simulator
    assert type(make_simulator_for(server(setup, server.settings_type(mode="thrifty")), reliable)) is Simulator
