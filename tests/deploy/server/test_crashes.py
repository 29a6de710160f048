"""Servers that crash: a resumed deployment loses no update and merges none twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from defedavg.algorithms import ALGORITHMS, ServerMachine, Setup
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.replay import replay
from defedavg.deploy.server.session import Session
from defedavg.deploy.server.state_store import StateStore
from defedavg.errors import UserError
from defedavg.runstore.layout import EVENT_LOG as LOG
from defedavg.training import Status
from helpers.deployments import ARRIVALS, FLAT, PLAIN, World, agrees, checked, tiny_task

pytestmark = pytest.mark.usefixtures("worlds")


class CrashError(Exception):
    """The server crashes here."""


@pytest.mark.parametrize("changes", PLAIN[:4] + PLAIN[5:] + ARRIVALS, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize(("every", "save_seconds"), [(17, 0.0), (23, math.inf), (29, 0.0)])
def test_a_server_that_crashes_while_writing_is_resumed(
    changes: dict[str, Any], every: int, save_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server crashes at regular counts of writes, alternately before and after the file is written.

    Without limit of ``save_seconds``, it computes all merges since it was resumed again.
    """
    count = 0

    def failing(real: Any) -> Any:
        def call(self: Any, *args: Any, **words: Any) -> None:
            nonlocal count
            count += 1
            if count % (2 * every) == 0:
                raise CrashError
            real(self, *args, **words)
            if count % (2 * every) == every:
                raise CrashError

        return call

    rounds = 8 if ALGORITHMS[changes["algorithm"]].uses_updates_per_round else 24
    world = World(tmp_path / "run", stop__max_rounds=rounds, save_seconds=save_seconds, **changes)
    monkeypatch.setattr(logs.EventLogWriter, "_write", failing(logs.EventLogWriter._write))
    for name in ("save_updates", "save_version", "save_state"):
        monkeypatch.setattr(StateStore, name, failing(getattr(StateStore, name)))
    crashes = 0
    crashed = False
    while world.session.progress.status is Status.RUNNING:
        assert crashes < 500
        try:
            if crashed:
                world.crash()
                crashed = False
            world.until(lambda: world.session.progress.status is not Status.RUNNING)
        except CrashError:
            crashes += 1
            crashed = True
    monkeypatch.undo()
    assert crashes >= 2
    _, found = checked(world)
    assert len(found.plan.rounds) == rounds
    agrees(world, found)


def test_evaluations_before_a_crash_are_kept(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 4)
    before = list(world.session.progress.evaluations)
    world.crash()
    assert world.session.progress.evaluations == before
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [e.round for e in before]
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert [e.round for e in world.session.progress.evaluations] == list(range(9))


def test_an_incomplete_last_line_is_removed_and_the_run_resumes(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 2)
    with (tmp_path / "run" / LOG).open("ab") as out:
        out.write(b'{"event":"trained","t":')
    world.crash()
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    checked(world)


def test_a_log_or_state_that_was_changed_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 3)
    path = tmp_path / "run" / LOG
    text = path.read_text()
    rows = text.splitlines(keepends=True)
    position = next(i for i, row in enumerate(rows) if '"trained"' in row)
    path.write_text("".join(rows[:position] + rows[position + 1 :]))
    with pytest.raises(UserError):
        replay(logs.read(path))
    path.write_text("".join(rows[:position]))
    with pytest.raises(UserError, match="shorter than its state"):
        world.crash()
    path.write_text(text)
    state = tmp_path / "run" / "state" / "state.json"
    found = json.loads(state.read_text())
    foreign = ServerMachine.state(ALGORITHMS["asysg"](Setup(6, 3, 4)))
    wrong: Any
    for wrong in ([], None, foreign, {**found["server_state"], "version": 1}, {**found["server_state"], "format": 2}):
        state.write_text(json.dumps({**found, "server_state": wrong}))
        with pytest.raises(UserError, match="does not lead to the state"):
            world.crash()
    for text in ("[]", json.dumps({**found, "lines": "many"})):
        state.write_text(text)
        with pytest.raises(UserError, match="is not the state of a server"):
            world.crash()
    state.unlink()
    next((tmp_path / "run" / "state").glob("version-*")).write_bytes(b"not a tensor")
    with pytest.raises(UserError, match="damaged"):
        world.crash()


@pytest.mark.parametrize("changes", PLAIN + ARRIVALS, ids=lambda c: "-".join(map(str, c.values())))
def test_the_saved_server_state_restores_a_machine_that_decides_the_same(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    world = World(tmp_path / "run", **changes)
    world.until(lambda: world.session.engine.server.version >= 3)
    saved = json.loads((tmp_path / "run" / "state" / "state.json").read_text())["server_state"]
    machine = ALGORITHMS[changes["algorithm"]](
        world.session.engine.server.setup, world.config.settings.algorithm_settings
    )
    machine.restore(saved)
    assert machine.state() == saved
    assert machine.version == world.session.engine.server.version


def test_a_state_of_an_earlier_version_is_accepted_with_one_line(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 3)
    path = tmp_path / "run" / "state" / "state.json"
    state = json.loads(path.read_text())
    del state["server_state"]
    path.write_text(json.dumps({**state, "machine": [["version", 3]]}))
    world.log_lines.clear()
    world.crash()
    assert ["earlier version" in line for line in world.log_lines] == [True]
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    checked(world)
    assert "server_state" in json.loads(path.read_text())


def test_a_finished_run_and_other_settings_are_not_resumed(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 1)
    other = World(tmp_path / "other", training__local_lr=0.2)
    with pytest.raises(UserError, match="other settings"):
        Session.resume(other.config, other.flat, tiny_task(FLAT, None), tmp_path / "run")
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    world.session.note("done", status="max_rounds")
    world.session.log.write()
    with pytest.raises(UserError, match="is finished"):
        world.crash()
