"""Algorithms of a user whose faults appear after the rounds of the rehearsal, and one that uses older versions."""

from __future__ import annotations

import numpy as np

from defedavg.algorithms import BufferedRound
from defedavg.algorithms.base import Actions
from defedavg.algorithms.protocol import Broadcast, ClientPolicy, Discard, Merge, Send, SetTimer, Update

FAULT_ROUND = 9


class SendsToSenders(BufferedRound):
    """Merges any n updates; every sender receives the newest version."""

    name = "sends-to-senders"
    summary = citation = equation = "for tests"
    policy = ClientPolicy(allow_same_version=True)

    def start(self) -> Actions:
        return [Send(client, 0) for client in range(self.setup.num_clients)]

    def returned(self, client: int) -> Actions:
        super().returned(client)
        return [Send(client, self.version)]

    def on_update(self, update: Update) -> Actions:
        return [*super().on_update(update), *self.answer(update)]

    def answer(self, update: Update) -> Actions:
        return [Send(update.client, self.version)]

    def finish_round(self) -> Actions:
        updates, self.buffer = [(update, -1.0 / len(self.buffer)) for update in self.buffer], []
        return [self.merge_of(updates)]

    def merge_of(self, updates: list[tuple[Update, float]]) -> Merge:
        return self.merge(updates, self.past() if self.version >= FAULT_ROUND - 1 else None)

    def past(self) -> list[tuple[int, float]]:
        return [(self.version, 1.0)]


class WrongSum(SendsToSenders):
    """Gives the newest version a coefficient below one."""

    name = "wrong-sum"

    def past(self) -> list[tuple[int, float]]:
        return [(self.version, 0.9)]


class OlderVersion(SendsToSenders):
    """Averages the newest version with the fifth before it, which it does not declare."""

    name = "older-version"

    def past(self) -> list[tuple[int, float]]:
        return [(self.version, 0.5), (self.version - 5, 0.5)]


class DeclaredOlderVersion(OlderVersion):
    """The same, declared."""

    name = "declared-older-version"
    past_versions = 5


class UndeclaredBroadcast(SendsToSenders):
    """Broadcasts without the class attribute."""

    name = "undeclared-broadcast"

    def answer(self, update: Update) -> Actions:
        return super().answer(update) if self.version < FAULT_ROUND - 1 else [Broadcast(self.version)]


class Stalls(SendsToSenders):
    """Stops sending versions."""

    name = "stalls"

    def answer(self, update: Update) -> Actions:
        return super().answer(update) if self.version < FAULT_ROUND - 1 else []


class SameVersionAgain(SendsToSenders):
    """Sends clients versions from which their policy does not let them train again."""

    name = "same-version-again"
    policy = ClientPolicy()

    def answer(self, update: Update) -> Actions:
        if self.version < FAULT_ROUND - 1:
            return super().answer(update)
        return [Send(update.client, update.version)] if update in self.buffer else []


class OnlyTimers(Stalls):
    """Stops sending versions, and sets one timer after the other."""

    name = "only-timers"

    def answer(self, update: Update) -> Actions:
        return super().answer(update) or [SetTimer(1, 1.0)]

    def timer(self, token: int) -> Actions:
        return [SetTimer(token + 1, 1.0)]


class NeverMergesAgain(SendsToSenders):
    """Discards every update."""

    name = "never-merges-again"

    def on_update(self, update: Update) -> Actions:
        if self.version < FAULT_ROUND - 1:
            return super().on_update(update)
        return [Discard(update), *self.answer(update)]


class MergesTwice(SendsToSenders):
    """Merges an update a second time."""

    name = "merges-twice"

    def merge_of(self, updates: list[tuple[Update, float]]) -> Merge:
        if self.version >= FAULT_ROUND - 1:
            updates = [updates[0], (updates[0][0], updates[1][1]), *updates[2:]]
        return super().merge_of(updates)


class SendsToNoClient(SendsToSenders):
    """Sends a version to a client with a negative number."""

    name = "sends-to-no-client"

    def answer(self, update: Update) -> Actions:
        return super().answer(update) if self.version < FAULT_ROUND - 1 else [Send(-1, self.version)]


class Raises(SendsToSenders):
    """Raises an error of Python."""

    name = "raises"

    def past(self) -> list[tuple[int, float]]:
        raise KeyError("rate")


class ReturnsNothing(SendsToSenders):
    """Forgets to return a list."""

    name = "returns-nothing"

    def on_update(self, update: Update) -> Actions:
        return super().on_update(update) if self.version < FAULT_ROUND - 1 else None  # type: ignore[return-value]


class AnswersMergeWithNothing(SendsToSenders):
    """Forgets to return a list from a hook whose result inherited code uses."""

    name = "answers-merge-with-nothing"
    on_update = BufferedRound.on_update
    finish_round = BufferedRound.finish_round

    def after_merge(self) -> Actions:
        sent: Actions = [Send(client, self.version) for client in range(self.setup.num_clients)]
        return sent if self.version < FAULT_ROUND else None  # type: ignore[return-value]


class SetsTextTimer(SendsToSenders):
    """Sets a timer to a text."""

    name = "sets-text-timer"

    def answer(self, update: Update) -> Actions:
        late = self.version >= FAULT_ROUND - 1
        return [*super().answer(update), *([SetTimer(1, "soon")] if late else [])]  # type: ignore[arg-type]


class DiscardsNumber(SendsToSenders):
    """Discards the number of a client instead of its update."""

    name = "discards-number"

    def on_update(self, update: Update) -> Actions:
        if self.version < FAULT_ROUND - 1:
            return super().on_update(update)
        return [Discard(update.client), *self.answer(update)]  # type: ignore[arg-type]


class ReturnsText(SendsToSenders):
    """Returns something that is not an action."""

    name = "returns-text"

    def answer(self, update: Update) -> Actions:
        return super().answer(update) if self.version < FAULT_ROUND - 1 else ["send"]  # type: ignore[list-item]


class SendsToNumpyClient(SendsToSenders):
    """Names a client by a number of NumPy."""

    name = "sends-to-numpy-client"

    def answer(self, update: Update) -> Actions:
        client = update.client if self.version < FAULT_ROUND - 1 else np.int64(update.client)
        return [Send(client, self.version)]  # type: ignore[arg-type]


FAULTS: dict[type[SendsToSenders], tuple[str, ...]] = {
    WrongSum: (
        "round 9: the coefficients of past versions sum to 0.9",
        "sum to one, within 1e-09",
        "past of self.merge()",
    ),
    OlderVersion: ("uses past version", "set the class attribute past_versions"),
    UndeclaredBroadcast: ("Broadcast after round 8", "broadcasts is False; set the class attribute to True"),
    Stalls: ("no client has work after", "return Send or Broadcast in start() and after every merge"),
    SameVersionAgain: ("no client has work after", "allow_same_version=True"),
    OnlyTimers: ("events have passed without a merge since round", "merge updates when they arrive"),
    NeverMergesAgain: ("events have passed without a merge since round 8", "merge updates when they arrive"),
    Raises: ("it raises KeyError: 'rate' (faulty_algorithms.py, line", "after round 8; correct it"),
    ReturnsNothing: ("it returns NoneType after round 8; return a list of actions",),
    AnswersMergeWithNothing: (
        "after round 8 it raises TypeError: ",
        "from what a hook returned",
        "check what these return: ",
        "after_merge()",
    ),
    SetsTextTimer: ("it sets a timer of 'soon' s; give zero seconds or more, a number",),
    DiscardsNumber: ("it discards ", "which is not an update; discard one that arrived"),
    ReturnsText: ("it returns 'send', which is not an action of a server",),
    SendsToNumpyClient: ("Send names the client np.int64(", "convert it with int()"),
    SendsToNoClient: ("Send names client -1; give one of 0 to 9",),
}
"""What the error about each fault says."""
