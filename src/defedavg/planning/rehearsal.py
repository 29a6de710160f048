"""Rehearse an algorithm: plan a few small rounds before a run starts, and report its first fault in one line.

An algorithm from outside the package can break the rules that plans, executors and deployments rely on. The rehearsal
drives its server machine with the virtual clock on a small fleet of uneven speeds, checks every action and every record
of the plan, and compares the decisions of a second machine, of one that is saved and restored at every event, and of
one whose clients fail.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

from ..algorithms import ServerMachine, Setup, protocol
from ..errors import UserError, first_line
from .action_checks import from_a_hook, raised, refuse, refuse_action
from .devices import Fleet
from .plan import records
from .plan_checks import PlanError, checked
from .plan_io import encode
from .simulator import Simulator

ROUNDS = 5
REHEARSAL_CLIENTS = 20
MAX_EVENTS = 10_000  # without a merge: 20 clients need a few hundred
JOB_SECONDS = 0.1  # of the fastest client

T = TypeVar("T")
HOOKS = ("start", "arrived", "timer", "end_of_instant", "returned")
DIFFERENCES = (
    ("in a second run with the same seed", "draw random numbers with defedavg.rng only"),
    ("after restore(state())", "list every attribute that decisions depend on in state_attributes"),
)  # what repeats a decision, and how to correct an algorithm whose decision then differs
Decisions = list[tuple[str, list[protocol.ServerAction]]]


def rehearse(kind: type[ServerMachine], setup: Setup, settings: Any, upload: str = "auto") -> None:
    """Plan a few rounds on a small fleet; raise ``UserError`` that names the algorithm, its fault and the remedy."""
    _call(kind, "its constructor", lambda: kind(setup, settings))
    setup, settings = _small(kind, setup, settings)
    steps = _call(kind, "steps_per_job()", lambda: kind.steps_per_job(setup.local_steps))
    policy = _call(kind, "client_policy()", lambda: kind.client_policy(settings))
    if not isinstance(steps, int) or steps < 1:
        _fail(kind, f"steps_per_job() returns {steps!r}; return a whole number of at least 1")
    if not isinstance(policy, protocol.ClientPolicy):
        _fail(kind, f"client_policy() returns {policy!r}; return a ClientPolicy")
    fleet = Fleet(setup.num_clients, setup.seed, step_seconds=JOB_SECONDS / steps, upload=upload)
    timeout = 10.0 * fleet.round_trip(steps)
    if setup.timeout_seconds is not None:
        setup = dataclasses.replace(setup, timeout_seconds=timeout)

    decisions = _plan(kind, setup, settings, fleet)
    _plan(kind, setup, settings, fleet, expected=decisions)
    _plan(kind, setup, settings, fleet, expected=decisions, restore=True)
    failing = dataclasses.replace(fleet, failure_rate=0.3, return_seconds=0.5 * timeout)
    _plan(kind, dataclasses.replace(setup, timeout_seconds=timeout), settings, failing)


def _small(kind: type[ServerMachine], setup: Setup, settings: Any) -> tuple[Setup, Any]:
    """Return a setup of few clients and settings that the algorithm accepts for it."""
    clients = min(setup.num_clients, REHEARSAL_CLIENTS)
    small = dataclasses.replace(
        setup, num_clients=clients, updates_per_round=min(setup.updates_per_round, clients), timeout_seconds=None
    )
    if settings is None:
        settings = kind.settings_type()
    counts = {
        field.name: clients
        for field in dataclasses.fields(settings)
        if type(getattr(settings, field.name)) is int and getattr(settings, field.name) > clients
    }
    for changes in ({}, counts):
        try:
            scaled = dataclasses.replace(settings, **changes)
            kind(small, scaled)
        except Exception:  # noqa: S112 (the algorithm may refuse a smaller setup; its own one has been accepted)
            continue
        return small, scaled
    return setup, settings


def _plan(
    kind: type[ServerMachine],
    setup: Setup,
    settings: Any,
    fleet: Fleet,
    *,
    expected: Decisions | None = None,
    restore: bool = False,
) -> Decisions:
    """Plan a few rounds with all checks; return what the server machine decided at every event."""
    server = _ObservedServer(kind, setup, settings, expected, restore=restore)
    simulator = _RehearsalSimulator(server, fleet)
    try:
        for record in checked(simulator.header, records(simulator, ROUNDS)):
            encode(record)
    except UserError:
        raise
    except PlanError as error:
        _fail(kind, f"the plan is not valid: {first_line(error)}; correct the merges that it returns")
    except Exception as error:  # what an action causes later, such as numbers that are not Python's
        _fail(kind, f"its actions cannot be planned: {type(error).__name__}: {first_line(error)}; correct them")
    if simulator.server.broadcasts and not simulator.has_broadcast:
        _fail(kind, "broadcasts is True, but it never broadcasts version 0; return Broadcast(0) from start()")
    return server.decisions


def _fail(kind: type[ServerMachine], fault: str) -> NoReturn:
    refuse(kind.name, fault)


def _call(kind: type[ServerMachine], hook: str, function: Callable[[], T]) -> T:
    """Call a hook; report what it raises."""
    try:
        return function()
    except UserError as error:
        if str(error).startswith(f"{kind.name}:"):
            raise
        _fail(kind, first_line(error))
    except Exception as error:  # the algorithm is not part of this package
        if where := raised(kind, error):
            _fail(kind, f"{hook} raises {where}; correct it")
        _fail(kind, f"{hook} raises {from_a_hook(kind, error)}")


class _ObservedServer:
    """Forward events to a server machine and log its decisions, which must be the expected ones, if there are any.

    With ``restore``, a new machine is restored from the state of the last one before every event.
    """

    def __init__(
        self, kind: type[ServerMachine], setup: Setup, settings: Any, expected: Decisions | None, *, restore: bool
    ) -> None:
        self.kind = kind
        self.decisions: Decisions = []
        self._expected, self._restore = expected, restore
        self._arguments = setup, settings
        self._machine = self._new()

    def __getattr__(self, name: str) -> Any:
        return partial(self._event, name) if name in HOOKS else getattr(self._machine, name)

    def _new(self) -> ServerMachine:
        return _call(self.kind, "its constructor", lambda: self.kind(*self._arguments))

    def _event(self, hook: str, *arguments: Any) -> list[protocol.ServerAction]:
        number = len(self.decisions)
        if self._restore and number:
            state = _call(self.kind, "state()", lambda: json.dumps(self._machine.state()))
            self._machine = self._new()
            _call(self.kind, "restore()", lambda: self._machine.restore(json.loads(state)))
        written = "on_update" if hook == "arrived" else hook  # by the author of the algorithm
        actions = _call(self.kind, f"{written}()", lambda: getattr(self._machine, hook)(*arguments))
        if not isinstance(actions, list):
            _fail(self.kind, f"{written}() returns {type(actions).__name__}; return a list of actions")
        self.decisions.append((hook, list(actions)))
        if self._expected is not None and self.decisions[-1:] != self._expected[number : number + 1]:
            when, remedy = DIFFERENCES[self._restore]
            _fail(self.kind, f"{written}() makes another decision {when}; {remedy}")
        return actions


class _RehearsalSimulator(Simulator):
    """A simulator that checks every action of the server before it carries it out, and notices a hang."""

    def __init__(self, server: _ObservedServer, fleet: Fleet) -> None:
        super().__init__(cast(ServerMachine, server), fleet)
        self._kind = server.kind
        self._open: set[protocol.Update] = set()  # arrived, neither merged nor discarded
        self._closed: set[protocol.Update] = set()
        self._handled_at_merge = 0

    @property
    def has_broadcast(self) -> bool:
        """Whether the server has broadcast a version."""
        return len(self._broadcasts) > 0

    def _handle(self, event: int, client: int, detail: int) -> None:
        if self.handled - self._handled_at_merge > MAX_EVENTS:
            failing = " while clients fail and time out" if self.fleet.lossy else ""
            _fail(self._kind, f"{MAX_EVENTS:,} events pass without a merge{failing}; merge updates when they arrive")
        super()._handle(event, client, detail)

    def _arrived(self, client: int, index: int) -> None:
        update = self._finished.get((client, index))
        if update is not None:
            self._open.add(update)
        super()._arrived(client, index)

    def _serve(self, actions: list[protocol.ServerAction]) -> None:
        for action in actions:
            self._check(action)
            super()._serve([action])

    def _check(self, action: protocol.ServerAction) -> None:
        if isinstance(action, protocol.Merge):
            self._check_merge(action)
        elif isinstance(action, protocol.Send | protocol.Request):
            if type(action.client) is not int:
                refuse_action(self.server, action, self._newest)
            if isinstance(action, protocol.Request) and not self.policy.hold_until_requested:
                _fail(
                    self._kind,
                    "it returns Request, but its clients send updates unrequested; set hold_until_requested=True in "
                    "policy",
                )
        elif isinstance(action, protocol.SetTimer):
            if not action.seconds >= 0.0:
                _fail(self._kind, f"it sets a timer of {action.seconds} s; give zero seconds or more")
        elif isinstance(action, protocol.Discard):
            self._close(action.update, "discards")
        elif not isinstance(action, protocol.Resample | protocol.EndOfInstant | protocol.Broadcast):
            _fail(self._kind, f"it returns {action!r:.60}, which is not an action of a server")

    def _check_merge(self, merge: protocol.Merge) -> None:
        for update, weight in merge.updates:
            name = f"round {merge.version}"
            self._close(update, f"{name} uses")
            if not (-math.inf < weight < 0.0 or (weight == 0.0 and update in merge.assigned)):
                _fail(
                    self._kind,
                    f"{name} gives an update the coefficient {weight}; Δ points away from the client's model, so "
                    "coefficients of updates must be below zero, or zero for an update in assignments alone",
                )
        self._handled_at_merge = self.handled

    def _close(self, update: protocol.Update, verb: str) -> None:
        """Check that an update has arrived and is merged or discarded once."""
        if update in self._closed:
            job = f"job {update.index} of client {update.client}"
            _fail(self._kind, f"{verb} {job} a second time; merge or discard every update at most once")
        if update not in self._open:
            _fail(self._kind, f"{verb} {update!r:.80}, which has not arrived; keep updates as they arrive")
        self._open.remove(update)
        self._closed.add(update)
