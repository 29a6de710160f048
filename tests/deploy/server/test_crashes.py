"""Servers that crash: a deployment that is taken up again loses nothing and merges nothing twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.event_log import LOG
from defedavg.deploy.replay import replay
from defedavg.deploy.server.session import Session
from defedavg.errors import UserError
from defedavg.training import Status
from helpers.deployments import FLAT, PLAIN, World, agrees, checked, tiny_task

pytestmark = pytest.mark.usefixtures("worlds")


class Crash(Exception):
    """The server is lost here."""


@pytest.mark.parametrize("changes", PLAIN[:4] + PLAIN[5:], ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("every", [23, 30, 41])
def test_a_server_that_is_lost_in_the_middle_of_writing_goes_on(
    changes: dict[str, Any], every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every so many writes the server is lost: before the file is there, or just after."""
    count = 0
    real: dict[str, Any] = {"write": logs.EventLogWriter._write, "version": Session._save, "update": Session.save_update}

    def failing(name: str) -> Any:
        def call(self: Any, *args: Any, **words: Any) -> None:
            nonlocal count
            count += 1
            if count % (2 * every) == 0:
                raise Crash
            real[name](self, *args, **words)
            if count % (2 * every) == every:
                raise Crash

        return call

    world = World(tmp_path / "run", **changes)
    monkeypatch.setattr(logs.EventLogWriter, "_write", failing("write"))
    monkeypatch.setattr(Session, "_save", failing("version"))
    monkeypatch.setattr(Session, "save_update", failing("update"))
    crashes = 0
    lost = False
    while world.session.progress.status is Status.RUNNING:
        assert crashes < 500
        try:
            if lost:
                world.crash()
                lost = False
            world.until(lambda: world.session.progress.status is not Status.RUNNING)
        except Crash:
            crashes += 1
            lost = True
    monkeypatch.undo()
    assert crashes >= 2
    _, found = checked(world)
    assert len(found.plan.rounds) == 8
    agrees(world, found)


def test_what_was_measured_before_a_crash_is_kept(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 4)
    before = list(world.session.progress.evaluations)
    world.crash()
    assert world.session.progress.evaluations == before
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [e.round for e in before]
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert [e.round for e in world.session.progress.evaluations] == list(range(9))


def test_a_torn_last_line_is_cut_and_the_rest_goes_on(tmp_path: Path) -> None:
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
    place = next(i for i, row in enumerate(rows) if '"trained"' in row)
    path.write_text("".join(rows[:place] + rows[place + 1 :]))
    with pytest.raises(UserError):
        replay(logs.read(path))
    path.write_text("".join(rows[:place]))
    with pytest.raises(UserError, match="shorter than its state"):
        world.crash()
    path.write_text(text)
    state = tmp_path / "run" / "state" / "state.json"
    found = json.loads(state.read_text())
    found["machine"] = []
    state.write_text(json.dumps(found))
    with pytest.raises(UserError, match="does not lead to the state"):
        world.crash()
    state.unlink()
    next((tmp_path / "run" / "state").glob("version-*")).write_bytes(b"not a tensor")
    with pytest.raises(UserError, match="damaged"):
        world.crash()


def test_a_finished_run_and_other_settings_are_not_resumed(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 1)
    other = World(tmp_path / "other", training__local_lr=0.2)
    with pytest.raises(UserError, match="other settings"):
        Session.resume(other.config, other.flat, tiny_task(FLAT, None), tmp_path / "run")
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    world.session.note("done", status="max_rounds")
    with pytest.raises(UserError, match="is finished"):
        world.crash()
