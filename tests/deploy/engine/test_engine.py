"""Deployments in memory: every algorithm, and clients that disconnect, return or send bad replies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS, BUILT_IN, ServerMachine
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.client_tracker import MAX_FAULTS
from defedavg.deploy.engine.event_log import LogNote
from defedavg.deploy.engine.events import Failed, InstantEnded, Joined, Left, Refused, TimerExpired
from defedavg.deploy.transport import Message, Reply
from defedavg.errors import UserError
from defedavg.runstore.layout import EVENT_LOG as LOG
from defedavg.training import Status
from helpers.deployments import ARRIVALS, BACKGROUND, PLAIN, World, agrees, checked
from helpers.strategies import bounded

pytestmark = pytest.mark.usefixtures("worlds")


def test_every_algorithm_is_deployed_in_these_tests() -> None:
    deployed = PLAIN + ARRIVALS + BACKGROUND
    assert {changes["algorithm"] for changes in deployed} == set(BUILT_IN)


@pytest.mark.parametrize("changes", PLAIN + ARRIVALS, ids=lambda c: "-".join(map(str, c.values())))
def test_the_replayed_plan_of_a_log_is_what_the_server_computed(changes: dict[str, Any], tmp_path: Path) -> None:
    world = World(tmp_path / "run", **changes)
    world.coordinator.run()
    assert world.session.progress.status is Status.ROUNDS
    assert world.session.progress.final_accuracy is not None
    log, found = checked(world)
    assert len(found.plan.rounds) == 8  # no more, although one instant may bring several
    assert [note.fields["version"] for note in log.notes("merge")] == [r.merge.version for r in found.plan.rounds]
    agrees(world, found)


class Spy:
    """Records every event that a server machine handled, and the actions it returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[ServerMachine]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], list[Any]]] = []
        self._depth = 0
        for name in ("start", "arrived", "timer", "end_of_instant", "returned"):
            monkeypatch.setattr(kind, name, self._wrapped(name, getattr(kind, name)))

    def _wrapped(self, name: str, method: Any) -> Any:
        def call(machine: ServerMachine, *args: Any) -> Any:
            self._depth += 1  # machines call their own methods; record only calls from outside
            actions = method(machine, *args)
            self._depth -= 1
            if not self._depth:
                self.calls.append((name, args, list(actions)))
            return actions

        return call


@pytest.mark.parametrize("changes", PLAIN + ARRIVALS, ids=lambda c: "-".join(map(str, c.values())))
def test_a_new_machine_returns_the_same_actions_for_the_same_events(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ALGORITHMS[changes["algorithm"]]
    with monkeypatch.context() as patch:
        spy = Spy(patch, kind)
        world = World(tmp_path / "run", **changes)
        world.until(lambda: world.session.engine.server.version >= 2)
        world.node_of(1).alive = False
        world.until(lambda: world.session.progress.status is not Status.RUNNING)
    machine = kind(world.session.engine.server.setup, world.config.settings.algorithm_settings)
    assert any(name == "arrived" for name, _, _ in spy.calls)
    for name, args, actions in spy.calls:
        assert list(getattr(machine, name)(*args)) == actions
    checked(world)


# Clients that disconnect, return, or join late.


@pytest.mark.parametrize("changes", PLAIN + ARRIVALS, ids=lambda c: "-".join(map(str, c.values())))
def test_half_of_the_clients_are_killed_during_their_jobs(changes: dict[str, Any], tmp_path: Path) -> None:
    world = World(tmp_path / "run", training__updates_per_round=5, **changes)
    world.until(lambda: world.session.engine.server.version >= 1)
    for client in (1, 3, 5):
        world.node_of(client).alive = False
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    log, _ = checked(world)
    assert {event.client for event in log.events if isinstance(event, Left)} == {1, 3, 5}


def test_a_killed_client_returns_with_another_node_and_trains_again(tmp_path: Path) -> None:
    world = World(tmp_path / "run", stop__max_rounds=30)
    world.until(lambda: world.session.engine.server.version >= 2)
    world.node_of(2).alive = False
    world.until(lambda: 2 not in world.session.engine.connected)
    before = world.session.engine.clients[2].jobs
    world.connect(2)
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.engine.clients[2].jobs > before
    log, found = checked(world)
    assert sum(isinstance(event, Joined) and event.client == 2 for event in log.events) == 2
    agrees(world, found)


def test_a_client_that_joins_late_takes_part(tmp_path: Path) -> None:
    world = World(tmp_path / "run", connected=range(5), deploy__min_clients=5, stop__max_rounds=30)
    world.until(lambda: world.session.engine.server.version >= 2)
    world.connect(5, delay=0.3)
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    log, found = checked(world)
    assert any(u.client == 5 for r in found.plan.rounds for u, _ in r.merge.updates)
    assert [e.t > 0 for e in log.events if isinstance(e, Joined)] == [False] * 5 + [True]


def test_a_client_that_never_replies_counts_as_disconnected(tmp_path: Path) -> None:
    world = World(tmp_path / "run", algorithm="fedavg", stop__max_rounds=12)
    world.node_of(0).tamper = lambda node, message, reply: None if message.kind == "train" else reply
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    log, _ = checked(world)
    assert any(isinstance(e, Left) and "in time" in e.why for e in log.events)


# Clients that send bad replies.


def _fields(**changes: Any) -> Any:
    def tamper(node: Any, message: Message, reply: Reply) -> Reply:
        return Reply(reply.to, {**reply.fields, **changes}, reply.update) if message.kind == "train" else reply

    return tamper


def _values(change: Any) -> Any:
    def tamper(node: Any, message: Message, reply: Reply) -> Reply:
        return Reply(reply.to, reply.fields, change(reply.update)) if message.kind == "train" else reply

    return tamper


BAD_REPLIES = {
    "NaN": (_values(lambda u: np.full_like(u, np.nan)), "finite"),
    "infinite": (_values(lambda u: np.full_like(u, np.inf)), "finite"),
    "shape": (_values(lambda u: u[:-1]), "shape"),
    "two dimensions": (_values(lambda u: u.reshape(1, -1)), "shape"),
    "double": (_values(lambda u: u.astype("float64")), "float64"),
    "objects": (_values(lambda u: np.zeros(u.shape, dtype=object)), "object"),
    "too long": (_values(lambda u: u + np.float32(1e6)), "norm"),
    "no update": (_values(lambda u: None), "no update"),
    "another client": (_fields(client=3), "claims to be client 3"),
    "text for a number": (_fields(client="2"), "client is"),
    "an old job": (_fields(index=0), "answers job 0"),
    "an old version": (_fields(version=0), "version 0"),
    "a future version": (_fields(version=10**9), "version 1000000000"),
    "fewer steps": (_fields(steps=1), "1 steps of 4"),
    "true for a number": (_fields(index=True), "index is True"),
    "no seconds": (_fields(seconds=float("nan")), "seconds is nan"),
}


@pytest.mark.parametrize("fault", BAD_REPLIES)
def test_a_bad_update_is_refused_and_its_client_quarantined_after_three(fault: str, tmp_path: Path) -> None:
    tamper, word = BAD_REPLIES[fault]
    world = World(tmp_path / "run", stop__max_rounds=25)
    world.until(lambda: world.session.engine.clients[2].jobs >= 2 and world.session.engine.server.version >= 3)
    world.node_of(2).tamper = tamper
    start = world.session.engine.server.version
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    log, found = checked(world)
    refused = [event for event in log.events if isinstance(event, Refused)]
    assert len(refused) == MAX_FAULTS
    assert all(event.client == 2 and word in event.why for event in refused)
    assert [note.fields["client"] for note in log.notes("quarantined")] == [2]
    last = refused[-1].t
    assert not [r for r in found.plan.rounds if r.time > last and any(u.client == 2 for u, _ in r.merge.updates)]
    assert world.session.engine.server.version > start
    assert bool(torch.isfinite(world.session.executor.versions[25]).all())
    assert not [m for m in world.transport.sent[-20:] if m.kind == "train" and m.fields["client"] == 2]
    agrees(world, found)


def test_the_same_reply_twice_is_merged_once(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    pull = world.transport.pull
    world.transport.pull = lambda ids: 2 * pull(ids)  # type: ignore[method-assign]
    world.coordinator.run()
    log, _ = checked(world)
    assert log.notes("stale")


def test_a_client_that_fails_three_times_in_a_row_is_quarantined(tmp_path: Path) -> None:
    world = World(tmp_path / "run", stop__max_rounds=15)
    world.node_of(4).tamper = lambda node, message, reply: (
        reply if message.kind == "hello" else Reply(reply.to, error="RuntimeError: no memory", failed=True)
    )
    world.coordinator.run()
    log, _ = checked(world)
    assert [event.why for event in log.events if isinstance(event, Failed)] == ["RuntimeError: no memory"] * MAX_FAULTS


# Everything at once.


@given(st.data())
@bounded(25)
def test_any_sequence_of_faults_leaves_a_run_that_finishes_and_replays(data: st.DataObject) -> None:
    import tempfile

    changes = data.draw(st.sampled_from(PLAIN + ARRIVALS))
    n = data.draw(st.integers(1, 5))
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "run", training__updates_per_round=n, stop__max_rounds=10, **changes)
        for _ in range(data.draw(st.integers(1, 6))):
            version = world.session.engine.server.version
            wait = data.draw(st.integers(0, 2))
            over = lambda v=version + wait: (  # noqa: E731
                world.session.engine.server.version >= v or world.session.progress.status is not Status.RUNNING
            )
            world.until(over)
            client = data.draw(st.integers(0, 4))  # client 5 has no faults
            what = data.draw(st.sampled_from(["kill", "return", "bad replies", "crash", "silence"]))
            node = world.node_of(client)
            if what == "kill":
                node.alive = False
            elif what == "return":
                node.alive = False
                world.connect(client)
            elif what == "bad replies":
                node.tamper = BAD_REPLIES[data.draw(st.sampled_from(sorted(BAD_REPLIES)))][0]
            elif what == "silence":
                node.tamper = lambda node, message, reply: None
            elif world.session.progress.status is Status.RUNNING:
                world.crash()
        world.until(lambda: world.session.progress.status is not Status.RUNNING)
        assert world.session.progress.status is Status.ROUNDS
        _, found = checked(world)
        assert len(found.plan.rounds) == 10
        agrees(world, found)


# Clients that cannot take part.


def test_too_few_clients_are_counted_after_the_wait(tmp_path: Path) -> None:
    world = World(tmp_path / "run", connected=[0, 3], deploy__wait_seconds=15.0)
    with pytest.raises(UserError, match="2 of the 6 clients expected connected within 15 s; start the others"):
        world.coordinator.run()
    assert 15 <= world.clock.now < 17


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"signature": "another"}, "its model differs from the server's"),
        ({"client": 17}, "clients are numbered 0 to 5"),
        ({"client": -1}, "client is -1"),
        ({}, None),
    ],
)
def test_a_client_that_cannot_take_part_is_excluded_with_a_reason(
    fields: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    world = World(tmp_path / "run", connected=[0], deploy__wait_seconds=5.0)
    world.connect(1, lambda node, message, reply: Reply(reply.to, {**reply.fields, **fields}))
    connected = 1 if words else 2
    with pytest.raises(UserError, match=f"{connected} of the 6 clients.*{words or ''}"):
        world.coordinator.run()
    assert bool(logs.read(tmp_path / "run" / LOG).notes("turned away")) is bool(words)


def test_one_version_is_one_object_for_all_clients(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.coordinator.run()
    objects: dict[Any, set[int]] = {}
    for message in world.transport.sent:
        if message.kind == "train":
            objects.setdefault(message.fields["version"], set()).add(id(message.weights))
    assert len(objects) > 3
    assert {len(found) for found in objects.values()} == {1}


# The log as a file.


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        '{"event":"exploded","t":1}',
        '{"event":"left","t":1}',
        '{"event":"left","t":-1,"client":0,"why":""}',
        '{"event":"left","t":1,"client":true,"why":""}',
        '{"event":"left","t":1,"client":0,"why":7}',
        '{"event":"fired","t":NaN,"token":1}',
        '{"event":"exchanged","t":1,"client":0,"reports":[["go"]],"update":null,"seconds":0,"bytes":0}',
        '{"note":7,"t":1}',
    ],
)
def test_a_foreign_line_is_refused_with_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / LOG
    path.write_text('{"format":"defedavg-log","format_version":1}\n' + line + "\n")
    with pytest.raises(UserError, match="line 2"):
        logs.read(path)


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.coordinator.run()
    log = logs.read(tmp_path / "run" / LOG)
    rows = (tmp_path / "run" / LOG).read_text().splitlines()[1:]
    assert [logs.encode(line) for line in log.lines] == [json.loads(row) for row in rows]
    assert any(isinstance(line, LogNote) for line in log.lines)


def test_the_names_of_events_in_the_log_never_change() -> None:
    """Logs of earlier versions must replay, whatever the classes are called now."""
    assert sorted(logs.EVENTS) == sorted(
        ["joined", "began", "left", "trained", "exchanged", "refused", "failed", "fired", "settled", "resumed"]
    )
    fired = {"event": "fired", "t": 1.5, "token": 2}
    assert logs.decode(fired) == TimerExpired(1.5, 2)
    settled = {"event": "settled", "t": 1.5}
    assert logs.decode(settled) == InstantEnded(1.5)
    for line in (fired, settled):
        assert logs.encode(logs.decode(line)) == line
