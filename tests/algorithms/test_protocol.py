"""The client machine: illegal events raise and change nothing; every policy holds in any order of events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from defedavg.algorithms.protocol import (
    ClientAction,
    ClientMachine,
    ClientPolicy,
    Drop,
    Phase,
    ProtocolError,
    Start,
    Upload,
)
from helpers.strategies import bounded

POLICIES = {
    "at-once": ClientPolicy(),
    "background": ClientPolicy(background_upload=True),
    "eager": ClientPolicy(hold_until_requested=True),
    "thrifty": ClientPolicy(hold_until_requested=True, pause_when_full=True),
    "interruptible": ClientPolicy(hold_until_requested=True, pause_when_full=True, interruptible=True),
    "repeating": ClientPolicy(allow_same_version=True),
}

# Whether each event is legal in each phase, written by hand.
LEGAL = {
    ("idle", "model"): True,
    ("idle", "go"): True,
    ("idle", "ended"): False,
    ("idle", "sent"): False,
    ("idle", "request"): True,
    ("idle", "died"): True,
    ("idle", "returned"): False,
    ("training", "model"): True,
    ("training", "go"): True,
    ("training", "ended"): True,
    ("training", "sent"): False,
    ("training", "request"): True,
    ("training", "died"): True,
    ("training", "returned"): False,
    ("sending", "model"): True,
    ("sending", "go"): True,
    ("sending", "ended"): False,
    ("sending", "sent"): True,
    ("sending", "request"): True,
    ("sending", "died"): True,
    ("sending", "returned"): False,
    ("gone", "model"): False,
    ("gone", "go"): False,
    ("gone", "ended"): False,
    ("gone", "sent"): False,
    ("gone", "request"): False,
    ("gone", "died"): False,
    ("gone", "returned"): True,
}


def slots(client: ClientMachine) -> dict[str, Any]:
    return {name: getattr(client, name) for name in ClientMachine.__slots__}


def client_in(phase: str, policy: ClientPolicy) -> ClientMachine:
    """Return a client that events brought to a phase."""
    client = ClientMachine(3, policy)
    client.model(0)
    if phase != "idle":
        client.go()
    if phase == "sending":
        client.ended()
    if phase == "gone":
        client.died()
    assert client.phase.value == phase
    return client


def fire(client: ClientMachine, event: str) -> Any:
    return client.model(7) if event == "model" else getattr(client, event)()


def test_the_table_has_every_phase_and_event() -> None:
    assert len(LEGAL) == len(Phase) * 7
    assert {phase for phase, _ in LEGAL} == {phase.value for phase in Phase}


# A client that holds its updates, or sends them in the background, is never occupied by sending.
TABLE = [
    (name, *pair)
    for name, policy in POLICIES.items()
    for pair in LEGAL
    if pair[0] != "sending" or not (policy.hold_until_requested or policy.background_upload)
]


@pytest.mark.parametrize(("name", "phase", "event"), TABLE)
def test_every_event_is_legal_or_changes_nothing(name: str, phase: str, event: str) -> None:
    policy = POLICIES[name]
    client = client_in(phase, policy)
    before = slots(client)
    if LEGAL[phase, event] and (event != "request" or policy.hold_until_requested):
        fire(client, event)
    else:
        with pytest.raises(ProtocolError, match="client 3"):
            fire(client, event)
        assert slots(client) == before


@pytest.mark.parametrize("phase", ["idle", "training"])
def test_a_negative_version_is_refused(phase: str) -> None:
    client = client_in(phase, ClientPolicy())
    before = slots(client)
    with pytest.raises(ProtocolError, match="-1"):
        client.model(-1)
    assert slots(client) == before


def test_a_client_starts_empty() -> None:
    client = ClientMachine(0, ClientPolicy())
    assert (client.phase, client.receive_buffer, client.send_buffer, client.wanted, client.jobs) == (
        Phase.IDLE,
        None,
        None,
        False,
        0,
    )
    assert client.go() == ()


def test_the_receive_buffer_keeps_the_newest() -> None:
    client = ClientMachine(0, ClientPolicy())
    assert [client.model(version) for version in (2, 5, 3, 5)] == [True, True, False, True]
    assert client.go() == (Start(0, 5),)
    assert client.receive_buffer is None
    assert [client.model(version) for version in (5, 4, 6)] == [False, False, True]


def test_an_upload_occupies_a_client_that_sends_at_once() -> None:
    client = ClientMachine(0, ClientPolicy())
    client.model(0)
    client.go()
    client.model(1)
    assert client.ended() == (Upload(0),)
    assert client.phase is Phase.SENDING
    assert client.go() == ()
    client.sent()
    assert client.go() == (Start(1, 1),)


def test_a_background_upload_does_not_occupy_its_client() -> None:
    client = ClientMachine(0, POLICIES["background"])
    for version in range(3):
        client.model(version)
        assert client.go() == (Start(version, version),)
        assert client.ended() == (Upload(version),)
        assert client.phase is Phase.IDLE
        assert client.go() == ()  # it has trained from this version
    client.model(3)
    client.go()
    assert client.died() == (Drop(3),)  # the uploads are under way


def test_an_eager_client_drops_the_update_that_it_overwrites() -> None:
    client = ClientMachine(0, POLICIES["eager"])
    for version in range(3):
        client.model(version)
        assert client.go() == (Start(version, version),)
        assert client.ended() == ((Drop(version - 1),) if version else ())
    assert client.request() == (Upload(2),)
    assert client.send_buffer is None


def test_an_eager_client_answers_a_request_when_its_job_ends() -> None:
    client = ClientMachine(0, POLICIES["eager"])
    client.model(0)
    client.go()
    assert client.request() == ()
    assert client.ended() == (Upload(0),)
    assert (client.send_buffer, client.wanted) == (None, False)
    client.model(1)
    client.go()
    assert client.ended() == ()


def test_a_thrifty_client_pauses_until_its_update_is_requested() -> None:
    client = ClientMachine(0, POLICIES["thrifty"])
    client.model(0)
    client.go()
    client.ended()
    client.model(1)
    assert client.go() == ()
    assert client.request() == (Upload(0),)
    assert client.go() == (Start(1, 1),)


def test_a_request_interrupts() -> None:
    client = ClientMachine(0, POLICIES["interruptible"])
    client.model(0)
    client.go()
    assert client.request() == (Upload(0),)
    assert client.phase is Phase.IDLE


def test_an_interruptible_client_requested_before_its_first_model_answers_with_no_steps() -> None:
    client = ClientMachine(0, POLICIES["interruptible"])
    assert client.request() == ()
    client.model(0)
    assert client.go() == (Start(0, 0), Upload(0))
    assert (client.phase, client.wanted, client.jobs) == (Phase.IDLE, False, 1)


@pytest.mark.parametrize(
    ("steps", "lost"), [((), ()), (("go",), (0,)), (("go", "ended"), (0,)), (("go", "ended", "go"), (0, 1))]
)
def test_a_failure_loses_the_buffers_and_the_job(steps: tuple[str, ...], lost: tuple[int, ...]) -> None:
    client = ClientMachine(0, POLICIES["eager"])
    for version, step in enumerate(steps):
        if step == "go":
            client.model(version)
        getattr(client, step)()
    client.model(9)
    if not steps:
        client.request()
    assert client.died() == tuple(Drop(index) for index in lost)
    assert (client.phase, client.receive_buffer, client.send_buffer, client.wanted) == (Phase.GONE, None, None, False)
    assert client.returned() == ()
    assert client.go() == ()


class ClientWalk(RuleBasedStateMachine):
    """Any events in any order; a model of the policy runs beside the machine."""

    policy: ClientPolicy

    def __init__(self) -> None:
        super().__init__()
        self.client = ClientMachine(0, self.policy)
        self.running: int | None = None
        self.finished: set[int] = set()  # neither uploaded nor dropped
        self.sending: int | None = None
        self.closed: set[int] = set()  # uploaded or dropped
        self.versions: list[int] = []  # start versions of jobs, by index
        self.spent: list[int] = []  # the same, without lost jobs
        self.requested = False
        self.newest = 0

    def act(self, actions: tuple[ClientAction, ...], *, dying: bool = False) -> tuple[ClientAction, ...]:
        """Check that the actions are possible, and update the model."""
        for action in actions:
            if isinstance(action, Start):
                assert self.running is None, "two jobs at a time"
                assert self.sending is None, "a job while sending"
                assert not (self.policy.pause_when_full and self.finished), "a pausing client trains"
                assert action.index == len(self.versions)
                assert all(
                    action.version > v or (self.policy.allow_same_version and action.version == v) for v in self.spent
                )
                self.versions.append(action.version)
                self.spent.append(action.version)
                self.running = action.index
            else:
                assert action.index not in self.closed, "an update leaves twice"
                assert action.index in self.finished | {self.running, self.sending}
                if isinstance(action, Drop):
                    assert dying or (self.policy.hold_until_requested and not self.policy.pause_when_full), (
                        "only an eager client overwrites"
                    )
                elif action.index == self.running:
                    assert self.policy.interruptible
                self.running = None if action.index == self.running else self.running
                self.sending = None if action.index == self.sending else self.sending
                self.finished.discard(action.index)
                self.closed.add(action.index)
        return actions

    @precondition(lambda self: self.client.phase is not Phase.GONE)
    @rule(ahead=st.integers(-2, 2))
    def model(self, ahead: int) -> None:
        version = max(0, self.newest + ahead)
        self.newest = max(self.newest, version)
        held = self.client.receive_buffer
        useful = [
            (version > last or (self.policy.allow_same_version and version == last))
            and (held is None or version >= held)
            for last in (max(self.versions, default=-1), max(self.spent, default=-1))
        ]
        taken = self.client.model(version)
        assert taken in useful  # a client may or may not repeat lost work from the same version
        assert self.client.receive_buffer == (version if taken else held)

    @precondition(lambda self: self.client.phase is not Phase.GONE)
    @rule()
    def go(self) -> None:
        free = self.running is None and self.sending is None and not (self.policy.pause_when_full and self.finished)
        can, version, requested = (
            free and self.client.receive_buffer is not None,
            self.client.receive_buffer,
            self.requested,
        )
        actions = self.act(self.client.go())
        if not can:
            assert actions == ()
            return
        assert actions[0] == Start(len(self.versions) - 1, version if version is not None else -1)
        assert self.client.receive_buffer is None
        if self.policy.interruptible and requested:
            assert actions[1:] == (Upload(len(self.versions) - 1),)
            self.requested = False
        else:
            assert actions[1:] == ()

    @precondition(lambda self: self.running is not None)
    @rule()
    def ended(self) -> None:
        assert self.running is not None
        index, self.running = self.running, None
        old, requested = set(self.finished), self.requested
        self.finished.add(index)
        actions = self.act(self.client.ended())
        drops = tuple(Drop(i) for i in sorted(old))
        if not self.policy.hold_until_requested:
            assert actions == (Upload(index),)
            self.sending = None if self.policy.background_upload else index
        elif requested:
            assert actions == (*drops, Upload(index))
            self.requested = False
        else:
            assert actions == drops
            assert self.client.send_buffer == index

    @precondition(lambda self: self.sending is not None)
    @rule()
    def sent(self) -> None:
        assert self.act(self.client.sent()) == ()
        self.sending = None

    @precondition(lambda self: self.policy.hold_until_requested and self.client.phase is not Phase.GONE)
    @rule()
    def request(self) -> None:
        waiting = self.finished or ({self.running} if self.policy.interruptible and self.running is not None else set())
        expected = tuple(Upload(index) for index in waiting if index is not None)
        assert self.act(self.client.request()) == expected
        if expected:
            assert self.client.send_buffer is None
        else:
            self.requested = True

    @precondition(lambda self: self.client.phase is not Phase.GONE)
    @rule()
    def died(self) -> None:
        self.closed -= (
            {self.sending} if self.sending is not None else set()
        )  # in transit: dropped after its upload started
        held = self.finished | {i for i in (self.running, self.sending) if i is not None}
        assert {action.index for action in self.act(self.client.died(), dying=True)} == held
        lost = {self.versions[index] for index in held}
        self.spent = [version for version in self.spent if version not in lost]
        self.requested = False

    @precondition(lambda self: self.client.phase is Phase.GONE)
    @rule()
    def returned(self) -> None:
        assert self.client.returned() == ()
        assert self.client.phase is Phase.IDLE

    @rule(event=st.sampled_from(["model", "go", "ended", "sent", "request", "died", "returned"]))
    def illegal(self, event: str) -> None:
        if LEGAL[self.client.phase.value, event] and (event != "request" or self.policy.hold_until_requested):
            return
        before = slots(self.client)
        with pytest.raises(ProtocolError):
            fire(self.client, event)
        assert slots(self.client) == before

    @invariant()
    def agrees(self) -> None:
        assert (self.client.phase is Phase.TRAINING) == (self.running is not None)
        assert (self.client.phase is Phase.SENDING) == (self.sending is not None)
        assert self.client.send_buffer == next(iter(self.finished), None)
        assert len(self.finished) <= 1
        assert self.client.wanted == self.requested
        assert self.client.jobs == len(self.versions)
        if not self.policy.allow_same_version:
            assert len(set(self.spent)) == len(self.spent)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_hold_in_any_order_of_events(name: str) -> None:
    walk = type(f"{name.title()}Walk", (ClientWalk,), {"policy": POLICIES[name]})
    run_state_machine_as_test(walk, settings=bounded(60))
