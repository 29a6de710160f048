"""Algorithms of a user with state vectors: one that uses all that there is, and some whose faults appear late."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from defedavg.algorithms import BufferedRound, ServerMachine
from defedavg.algorithms.base import Actions
from defedavg.algorithms.fedavg import FedAvg
from defedavg.algorithms.protocol import (
    Assignment,
    ClientPolicy,
    Merge,
    Send,
    StateSpec,
    StateVector,
    Update,
)
from defedavg.algorithms.setup import NoSettings, Setup

Terms = tuple[tuple[str, float], ...]
FAULT_ROUND = 9
START, CORRECTION, KEPT, GAIN = 0.5, 0.3, 0.2, 0.1


class Corrected(FedAvg):
    """Jobs start halfway between the version and the client's own model, and a part of old updates corrects them."""

    name = "corrected"
    summary = citation = equation = "for tests"
    settings_type = NoSettings
    job_start: ClassVar[Terms] = (("version", START), ("model", 1.0 - START))
    correction: ClassVar[Terms] = (("drift", CORRECTION),)

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:
        total = setup.num_clients
        return StateSpec("model", total, "model", per_client=True), StateSpec("drift", total, per_client=True)

    def with_replacement(self) -> bool:
        return False

    def combine(self, received: list[tuple[Update, int]]) -> Merge:
        merge = super().combine(received)
        after: list[Assignment] = []
        for update, _ in received:
            model, drift = StateVector("model", update.client), StateVector("drift", update.client)
            after.append(Assignment(drift, (), ((update, GAIN),), ((drift, KEPT),)))
            after.append(Assignment(model, ((merge.version, START),), (), ((model, 1.0 - START),)))
        return self.changed(replace(merge, after=tuple(after)))

    def changed(self, merge: Merge) -> Merge:
        return merge if merge.version < FAULT_ROUND else self.faulty(merge)

    def faulty(self, merge: Merge) -> Merge:
        return merge


def first(merge: Merge, **values: Any) -> Merge:
    """Return the merge with another first assignment."""
    return replace(merge, after=(replace(merge.after[0], **values), *merge.after[1:]))


class UndeclaredVector(Corrected):
    """Assigns a vector that it does not declare."""

    name = "undeclared-vector"

    def faulty(self, merge: Merge) -> Merge:
        return first(merge, target=StateVector("mean"))


class NegativeIndex(Corrected):
    """Assigns the vector of a client that does not exist."""

    name = "negative-index"

    def faulty(self, merge: Merge) -> Merge:
        return first(merge, target=StateVector("drift", -1))


class UnmergedUpdate(Corrected):
    """Assigns an update that its merge does not name."""

    name = "unmerged-update"

    def faulty(self, merge: Merge) -> Merge:
        ((update, _),) = merge.after[0].updates
        return first(merge, updates=((replace(update, index=update.index + 7), 1.0),))


class NotANumber(Corrected):
    """Has a coefficient that is not finite."""

    name = "not-a-number"

    def faulty(self, merge: Merge) -> Merge:
        return first(merge, states=((StateVector("drift", 0), math.nan),))


class UnknownTransform(Corrected):
    """Names a transform that executors do not know."""

    name = "unknown-transform"

    def faulty(self, merge: Merge) -> Merge:
        return first(merge, transform="round(3)")


class FutureVersion(Corrected):
    """Uses the version that the merge makes before it is made."""

    name = "future-version"

    def faulty(self, merge: Merge) -> Merge:
        return replace(merge, before=(replace(merge.after[1], states=()),))


class ZeroRate(Corrected):
    """Scales the learning rate by zero."""

    name = "zero-rate"

    def faulty(self, merge: Merge) -> Merge:
        return replace(merge, rate_scale=0.0)


class MovesRunningStarts(BufferedRound):
    """Assigns the models from which clients start that already train their next job."""

    name = "moves-running-starts"
    summary = citation = equation = "for tests"
    policy = ClientPolicy(allow_same_version=True)
    job_start = (("model", 1.0),)

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:
        return (StateSpec("model", setup.num_clients, "model", per_client=True),)

    def start(self) -> Actions:
        return [Send(client, 0) for client in range(self.setup.num_clients)]

    def returned(self, client: int) -> Actions:
        super().returned(client)
        return [Send(client, self.version)]

    def on_update(self, update: Update) -> Actions:
        return [*super().on_update(update), Send(update.client, self.version)]

    def combine(self, buffer: list[Update]) -> Merge:
        merge = super().combine(buffer)
        late = merge.version >= FAULT_ROUND
        models = (StateVector("model", update.client) for update in buffer if late)
        return replace(merge, after=tuple(Assignment(model, ((merge.version, 1.0),)) for model in models))


class StartOfNoClient(Corrected):
    """Starts jobs from a vector that is not one of the client."""

    name = "start-of-no-client"
    job_start = (("mean", 1.0),)

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:
        return (*super().state_vectors(setup, settings), StateSpec("mean"))


class CorrectedByVersion(Corrected):
    """Adds the version to gradients."""

    name = "corrected-by-version"
    correction = (("version", 1.0),)


class DeclaredTwice(Corrected):
    """Declares vectors of one name twice."""

    name = "declared-twice"

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:
        return 2 * super().state_vectors(setup, settings)


class TooFewVectors(Corrected):
    """Declares fewer vectors than clients."""

    name = "too-few-vectors"

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:
        return tuple(replace(spec, count=spec.count - 1) for spec in super().state_vectors(setup, settings))


class UnknownInitial(Corrected):
    """Declares an initial value that does not exist."""

    name = "unknown-initial"

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:
        return tuple(replace(spec, initial="ones") for spec in super().state_vectors(setup, settings))


class DottedName(Corrected):
    """Declares the name of a vector of the server optimiser."""

    name = "dotted-name"
    job_start = (("version", 1.0),)
    correction = ()

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:
        return (StateSpec("optimizer.first"),)


FAULTS: dict[type[ServerMachine], tuple[str, ...]] = {
    UndeclaredVector: ("round 9: it names the state vector mean[0]; declare it in state_vectors()",),
    NegativeIndex: ("round 9: it names the state vector drift[-1]; declare it in state_vectors()",),
    UnmergedUpdate: ("round 9: drift[", "which the merge does not name"),
    NotANumber: ("round 9: the coefficient of drift[0] is nan",),
    UnknownTransform: ("round 9: the transform is 'round(3)'; write quantise(bits) with 2 to 52 bits",),
    FutureVersion: ("round 9: an assignment uses version 9, which does not exist or was freed",),
    ZeroRate: ("round 9: its rate_scale is 0.0; it must be a number above zero",),
    MovesRunningStarts: ("whose start or correction was assigned after it began",),
    StartOfNoClient: ("job_start names 'mean'; declare it in state_vectors(), with per_client=True",),
    CorrectedByVersion: ("correction names 'version'; declare it in state_vectors(), with per_client=True",),
    DeclaredTwice: ("the state vectors 'model' are declared twice",),
    TooFewVectors: ("9 state vectors 'model' are declared for 10 clients; correct the count",),
    UnknownInitial: ("the initial value of 'model' is 'ones'; write 'zero' or 'model'",),
    DottedName: ("the state vector 'optimizer.first' needs another name",),
}
"""What the error about each fault says."""
