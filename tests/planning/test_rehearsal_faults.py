"""The rehearsal reports each fault of a broken algorithm in one line."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from defedavg.algorithms import BufferedRound, ServerMachine, Setup
from defedavg.algorithms.base import Actions
from defedavg.algorithms.protocol import (
    Broadcast,
    ClientPolicy,
    Discard,
    Merge,
    Request,
    Resample,
    Send,
    SetTimer,
    Update,
)
from defedavg.errors import UserError
from defedavg.planning.rehearsal import rehearse
from helpers.correct_machines import SETUP, Correct, CorrectBroadcast

FAULTS: list[tuple[type[ServerMachine], str]] = []


def fault(message: str) -> Any:
    """Decorate a broken algorithm with the message that the rehearsal must give."""

    def add(kind: type[ServerMachine]) -> type[ServerMachine]:
        FAULTS.append((kind, message))
        return kind

    return add


@fault("returns Broadcast after round 0, but broadcasts is False; set the class attribute to True")
class UndeclaredBroadcast(CorrectBroadcast):
    broadcasts = False


@fault(r"broadcasts is True, but it never broadcasts version 0; return Broadcast\(0\) from start")
class NeverBroadcasts(Correct):
    broadcasts = True


@fault(r"broadcasts version 2 after 1 broadcasts.*broadcast every version once")
class SkipsABroadcast(CorrectBroadcast):
    def after(self, merged: list[Update]) -> Actions:
        return [Broadcast(self.version)] if self.version != 1 else [Send(update.client, 1) for update in merged]


@fault(r"round 3 uses past version 0; it may use the newest version and the start versions of its updates, ")
class UsesAFreedVersion(Correct):
    def merge_of(self, merged: list[Update]) -> Merge:
        weighted = [(update, -1.0 / len(merged)) for update in merged if update.version or self.version < 2]
        old = 0 if self.version >= 2 else self.version
        return self.merge(weighted or [(merged[0], -1.0)], [(self.version, 0.5), (old, 0.5)])

    def on_update(self, update: Update) -> Actions:
        if self.version >= 2 and update.version == 0:
            return [Discard(update), Send(update.client, self.version)]
        return super().on_update(update)


@fault(r"round 1 uses past version 1; it may use .*here 0")
class UsesAFutureVersion(Correct):
    def merge_of(self, merged: list[Update]) -> Merge:
        return self.merge([(update, -0.5) for update in merged], [(self.version, 0.5), (self.version + 1, 0.5)])


@fault("coefficients of past versions sum to 0.9; they must sum to one")
class PastSumsToLess(Correct):
    def merge_of(self, merged: list[Update]) -> Merge:
        return self.merge([(update, -0.5) for update in merged], [(self.version, 0.9)])


@fault("job 0 of client .* a second time; merge or discard every update at most once")
class MergesTwice(Correct):
    def on_update(self, update: Update) -> Actions:
        actions = super().on_update(update)
        if actions:
            self.buffer.append(update)
        return actions


@fault(r"which has not arrived; keep updates as they arrive")
class InventsAnUpdate(Correct):
    def merge_of(self, merged: list[Update]) -> Merge:
        return self.merge([(dataclasses.replace(update, index=7), -0.5) for update in merged])


@fault("gives an update the coefficient 0.5; .* must be below zero")
class PositiveCoefficient(Correct):
    def merge_of(self, merged: list[Update]) -> Merge:
        return self.merge([(update, 0.5) for update in merged])


class Weighted(BufferedRound):
    name = "mine"
    summary, citation, equation = "a test", "none", "none"
    policy = ClientPolicy()
    value: Any = 1.0

    def start(self) -> Actions:
        return [Send(client, 0) for client in range(self.setup.num_clients)]

    def returned(self, client: int) -> Actions:
        return [Send(client, self.version)]

    def weight(self, update: Update) -> Any:
        return self.value


@fault(r"weight\(\) returns 'heavy'; return a number above zero")
class TextAsWeight(Weighted):
    value = "heavy"


@fault(r"weight\(\) returns nan; return a number above zero")
class UndefinedWeight(Weighted):
    value = math.nan


@fault(r"weight\(\) returns -1; return a number above zero")
class NegativeWeight(Weighted):
    value = -1


@fault(r"from what a hook returned; check what these return: .*after_merge\(\)")
class NoActionsAfterMerge(Weighted):
    def after_merge(self) -> Any:
        return None


@fault("the plan is not valid: round 1: the weights of its updates sum to 2")
class WeightsAboveOne(Correct):
    def merge_of(self, merged: list[Update]) -> Merge:
        return self.merge([(update, -1.0) for update in merged])


@fault("the plan is not valid: round 1 merges 1 updates, fewer than 2")
class MergesFewer(Correct):
    def merge_of(self, merged: list[Update]) -> Merge:
        return self.merge([(merged[0], -0.5)])


@fault("version 2 follows version 0")
class SkipsAVersion(Correct):
    def merge_of(self, merged: list[Update]) -> Merge:
        return dataclasses.replace(super().merge_of(merged), version=2)


@fault("Send names client 20; give one of 0 to 19")
class SendsOutOfRange(Correct):
    def start(self) -> Actions:
        return [Send(client, 0) for client in range(self.setup.num_clients + 1)]


@fault("Request names client -1; give one of 0 to 19")
class RequestsOutOfRange(Correct):
    policy = ClientPolicy(hold_until_requested=True)

    def start(self) -> Actions:
        return [*super().start(), Request(-1)]


@fault("returns Request, but its clients send updates unrequested; set hold_until_requested=True in policy")
class RequestsFromOthers(Correct):
    def start(self) -> Actions:
        return [*super().start(), Request(0)]


@fault("sends version 1 after round 0, which does not exist or was freed; send the newest version")
class SendsTheNextVersion(Correct):
    def start(self) -> Actions:
        return [Send(0, 1)]


@fault("sends version 0 after round 3, which does not exist or was freed; send the newest version")
class SendsAFreedVersion(Correct):
    def start(self) -> Actions:
        return [Send(client, 0) for client in range(2)]

    def after(self, merged: list[Update]) -> Actions:
        return [Send(update.client, 0 if self.version == 3 else self.version) for update in merged]


@fault("no client has work after 0 merges; return Send or Broadcast in start")
class SendsNothing(Correct):
    def start(self) -> Actions:
        return []


@fault("no client has work after 0 merges; .* Request for updates")
class NeverRequests(Correct):
    policy = ClientPolicy(hold_until_requested=True)


@fault("no client has work after 0 merges")
class NeverMerges(Correct):
    def on_update(self, update: Update) -> Actions:
        return [Discard(update)]


@fault("10,000 events pass without a merge; merge updates")
class TimerLoop(Correct):
    def start(self) -> Actions:
        return [SetTimer(1, 0.0)]

    def timer(self, token: int) -> Actions:
        return [SetTimer(token, 0.0)]


@fault("sets a timer of -1.0 s; give zero seconds or more")
class NegativeTimer(Correct):
    def start(self) -> Actions:
        return [*super().start(), SetTimer(1, -1.0)]


@fault(r"on_update\(\) raises ZeroDivisionError: .* \(test_rehearsal_faults.py, line \d+\); correct it")
class RaisesInAHook(Correct):
    def merge_of(self, merged: list[Update]) -> Merge:
        return self.merge([(update, -1.0 / (len(merged) - 2)) for update in merged])


@fault(r"its constructor raises KeyError: 'rate' \(test_rehearsal_faults.py, line \d+\); correct it")
class RaisesInItsConstructor(Correct):
    def check_setup(self) -> None:
        raise KeyError("rate")


@fault(r"start\(\) raises NotImplementedError")
class HasNoStart(Correct):
    start = ServerMachine.start


@fault(r"on_update\(\) returns NoneType; return a list of actions")
class ReturnsNone(Correct):
    def on_update(self, update: Update) -> Actions:
        return None  # type: ignore[return-value]


@fault("returns 'merge', which is not an action of a server")
class ReturnsAString(Correct):
    def after(self, merged: list[Update]) -> Actions:
        return ["merge"]  # type: ignore[list-item]


@fault("its actions cannot be planned: TypeError: .*int64")
class UsesNumbersThatAreNotPythons(Correct):
    def timer(self, token: int) -> Actions:
        return [Resample((np.int64(3),), ())]  # type: ignore[arg-type]

    def start(self) -> Actions:
        return [*super().start(), SetTimer(1, 0.1)]


@fault(r"mine: rounds would not be saved; add to state_attributes")
class HidesItsState(Correct):
    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.rounds = 0


@fault(r"on_update\(\) makes another decision after restore\(state\(\)\); list every attribute")
class ForgetsItsState(Correct):
    def state(self) -> dict[str, Any]:
        return {"version": self.version}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]


@fault(r"state\(\) raises TypeError: .*not JSON serializable")
class SavesNoJson(Correct):
    def state(self) -> dict[str, Any]:
        return {"buffer": set(self.buffer)}


@fault(r"restore\(\) raises KeyError")
class CannotRestore(Correct):
    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = state["missing"]


@fault("makes another decision in a second run with the same seed; draw random numbers with defedavg.rng only")
class IsNotDeterministic(Correct):
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def after(self, merged: list[Update]) -> Actions:
        return [*super().after(merged), SetTimer(next(self.numbers), 1.0)]


@fault(r"no client has work after \d merges after clients failed; send them a version in returned\(\)")
class IgnoresReturnedClients(Correct):
    def start(self) -> Actions:
        return [Send(client, 0) for client in range(self.setup.updates_per_round)]

    def returned(self, client: int) -> Actions:
        return []


@fault("10,000 events pass without a merge while clients fail and time out")
class WaitsForFailedClients(Correct):
    def start(self) -> Actions:
        return [*(Send(client, 0) for client in range(self.setup.updates_per_round)), *self.start_timeout()]

    def returned(self, client: int) -> Actions:
        return []

    def timer(self, token: int) -> Actions:
        return self.start_timeout()


@fault(r"steps_per_job\(\) returns 0; return a whole number of at least 1")
class TrainsNoSteps(Correct):
    @classmethod
    def steps_per_job(cls, local_steps: int) -> int:
        return 0


@fault(r"client_policy\(\) returns None; return a ClientPolicy")
class HasNoPolicy(Correct):
    @classmethod
    def client_policy(cls, settings: Any) -> ClientPolicy:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "message"), FAULTS, ids=[kind.__name__ for kind, _ in FAULTS])
def test_a_fault_is_reported_in_one_line(kind: type[ServerMachine], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        rehearse(kind, SETUP, None)
    text = str(caught.value)
    assert text.startswith(("algorithm 'mine': ", "mine: "))
    assert "\n" not in text
