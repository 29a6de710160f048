"""Replies that arrive together: one flush, the same log as one by one, and nothing is sent before it is on disk."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.event_log import EventLogWriter
from defedavg.deploy.engine.events import Trained
from defedavg.deploy.server.coordinator import Coordinator
from defedavg.deploy.server.session import Session, save_bytes
from defedavg.deploy.server.state_store import StateStore
from defedavg.deploy.transport import Message
from defedavg.errors import UserError
from defedavg.runstore.layout import EVENT_LOG as LOG
from defedavg.training import Status
from helpers.deployments import World, agrees, checked

pytestmark = pytest.mark.usefixtures("worlds")

RARELY_EVALUATED = {"stop__eval_every_rounds": 1000, "stop__max_rounds": 40}


class PowerLossError(Exception):
    """The machine loses its power here."""


def together(folder: Path, **changes: Any) -> World:
    """Return a world whose six clients always answer at the same moment; FedBuff keeps all of them at work."""
    given = {"algorithm": "fedbuff", "fedbuff__concurrency": 6, **RARELY_EVALUATED, **changes}
    world = World(folder, save_seconds=math.inf, **given)
    for node in world.transport.members.values():
        node.delay = 0.4
    return world


def received(world: World) -> int:
    """Return the number of updates in the log."""
    return sum(isinstance(event, Trained) for event in logs.read(world.folder / LOG).events)


def step_with_replies(world: World) -> None:
    """Let the coordinator handle the next replies."""
    world.session.save_if_due()
    while not world.coordinator.step():
        world.clock.sleep(0.05)


def test_six_replies_cost_one_flush_of_the_updates_and_one_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = together(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 2)
    flushed: list[str] = []
    fsync, before = os.fsync, received(world)

    def counted(handle: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", counted)
    step_with_replies(world)
    assert received(world) == before + 6
    assert world.session.engine.server.version == 4  # two merges of three updates each
    [updates, folder, log] = flushed
    assert (folder, log) == ("state", LOG)
    with safe_open(tmp_path / "run" / "state" / updates, framework="pt") as file:
        assert len(file.keys()) == 6


def test_the_log_is_the_same_as_that_of_replies_that_are_committed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(world: World) -> list[dict[str, Any]]:
        """Return the lines without notes of what was sent, which follow the flush."""
        world.until(lambda: world.session.progress.status is not Status.RUNNING)
        rows = [json.loads(row) for row in (world.folder / LOG).read_text().splitlines()]
        return [
            {name: value for name, value in row.items() if name != "wall_seconds"}
            for row in rows
            if row.get("note") != "sent"
        ]

    grouped = lines(together(tmp_path / "grouped"))
    handle = Coordinator._handle

    def handle_and_commit(self: Coordinator, event: Any) -> None:
        handle(self, event)
        self._commit()

    monkeypatch.setattr(Coordinator, "_handle", handle_and_commit)
    assert grouped == lines(together(tmp_path / "single"))
    assert sum(row.get("note") == "merge" for row in grouped) == 40


def test_a_loss_of_power_before_the_flush_loses_only_replies_on_which_nothing_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = together(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 4)
    path, sent = tmp_path / "run" / LOG, len(world.transport.sent)
    on_disk, versions = path.read_bytes(), sorted((tmp_path / "run" / "state").glob("version-*"))

    def lose_power(log: EventLogWriter) -> None:
        assert path.stat().st_size > len(on_disk)
        os.truncate(path, len(on_disk))
        raise PowerLossError

    with monkeypatch.context() as patch:
        patch.setattr(EventLogWriter, "_flush", lose_power)
        with pytest.raises(PowerLossError):
            step_with_replies(world)
    assert world.session.engine.server.version == 6  # in memory
    assert len(world.transport.sent) == sent
    assert sorted((tmp_path / "run" / "state").glob("version-*")) == versions
    world.crash()
    assert world.session.engine.server.version == 4
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    _, found = checked(world)
    assert len(found.plan.rounds) == 40
    agrees(world, found)


def test_messages_are_sent_after_the_flush_of_the_events_that_they_follow_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = together(tmp_path / "run")
    order: list[str] = []
    push, write = world.transport.push, EventLogWriter._write

    def pushed(messages: list[Message]) -> list[str]:
        order.extend(f"job of {m.fields['client']}" for m in messages if m.kind == "train")
        return push(messages)

    def written(log: EventLogWriter, objects: list[dict[str, Any]]) -> None:
        write(log, objects)
        order.extend(f"update of {row['client']}" for row in objects if row.get("event") == "trained")

    world.until(lambda: world.session.engine.server.version >= 2)
    monkeypatch.setattr(world.transport, "push", pushed)
    monkeypatch.setattr(EventLogWriter, "_write", written)
    step_with_replies(world)
    assert order == [f"{what} of {client}" for what in ("update", "job") for client in range(6)]


def test_updates_that_would_take_much_memory_are_written_before_the_next_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = together(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 2)
    monkeypatch.setattr("defedavg.deploy.server.session.SAVE_BYTES_MOST", 2 * 40)  # two updates of ten values
    written: list[int] = []
    save = StateStore.save_updates

    def saved(store: StateStore, number: int, updates: Any) -> None:
        written.append(len(updates))
        save(store, number, updates)

    monkeypatch.setattr(StateStore, "save_updates", saved)
    step_with_replies(world)
    assert written == [2, 2, 2]


def test_a_reply_after_the_last_merge_is_ignored_although_it_arrived_with_the_others(tmp_path: Path) -> None:
    world = together(tmp_path / "run", training__updates_per_round=2, stop__max_rounds=2)
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    assert received(world) == 4
    checked(world)


def test_merges_since_the_state_was_saved_are_computed_again(tmp_path: Path) -> None:
    world = together(tmp_path / "run", training__server_optimizer="adam", training__global_lr=0.02)
    world.until(lambda: world.session.engine.server.version >= 7)
    state = tmp_path / "run" / "state"
    assert not (state / "state.json").exists()
    before, vectors = dict(world.session.executor.versions), world.session.executor.state.assigned()
    world.crash()
    assert json.loads((state / "state.json").read_text())["version"] == world.session.engine.server.version == 8
    assert before.keys() == world.session.executor.versions.keys()
    assert all(before[version].equal(world.session.executor.versions[version]) for version in before)
    assert all(vectors[name].equal(value) for name, value in world.session.executor.state.assigned().items())
    assert not list(state.glob("updates-*"))  # all of them are merged in saved versions


def test_the_state_is_saved_early_if_many_bytes_of_updates_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [save_bytes(size) >> 20 for size in (40, 1 << 20, 1 << 30)] == [4, 16, 64]
    world = together(tmp_path / "run")
    world.session._save_bytes = 12 * 40  # twelve updates of ten values
    saves: list[int] = []
    save = Session.save

    def saved(session: Session) -> None:
        saves.append(session.engine.server.version)
        save(session)

    monkeypatch.setattr(Session, "save", saved)
    world.until(lambda: world.session.engine.server.version >= 16)
    assert saves == [4, 8, 12, 16]


def test_updates_that_earlier_versions_saved_one_by_one_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    world = together(tmp_path / "run", training__updates_per_round=20)
    world.until(lambda: len(world.session.engine.received) >= 6)
    state = tmp_path / "run" / "state"
    [path] = state.glob("updates-*")
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            save_file({"update": file.get_tensor(name)}, state / f"update-{name}.safetensors")
    path.unlink()
    world.crash()
    assert len(list(state.glob("update-*"))) == 6
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    _, found = checked(world)
    agrees(world, found)
    world.session.save()
    assert not list(state.glob("update-*"))


def test_a_full_disk_leaves_no_part_of_an_update_and_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = together(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 2)
    sent, log = len(world.transport.sent), (tmp_path / "run" / LOG).read_bytes()
    fsync = os.fsync

    def full(handle: int) -> None:
        if "updates-" in Path(f"/proc/self/fd/{handle}").readlink().name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    before = sorted((tmp_path / "run" / "state").iterdir())
    with pytest.raises(UserError, match=r"updates-\d+.safetensors cannot be written: No space left on device; free"):
        step_with_replies(world)
    assert sorted((tmp_path / "run" / "state").iterdir()) == before
    assert len(world.transport.sent) == sent
    assert (tmp_path / "run" / LOG).read_bytes() == log
