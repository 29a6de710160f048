"""A server with state vectors that crashes at any moment of writing: the state after it equals that without a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from defedavg import fileio
from defedavg.algorithms.protocol import StateVector
from defedavg.deploy.deploy_config import read_deploy_config
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.events import Event
from defedavg.deploy.server import session as sessions
from defedavg.deploy.server import state_store
from defedavg.deploy.server.session import Session
from defedavg.errors import UserError
from defedavg.runstore import writer
from defedavg.runstore.layout import EVENT_LOG as LOG
from defedavg.training import Status
from helpers.background_clients import RealClock, real
from helpers.deployments import World, agrees, checked, tiny_task
from helpers.state_algorithms import MergesOneByOne, OwnModels, registered

STATEFUL: list[dict[str, Any]] = [
    {"algorithm": "mifa", "training__updates_per_round": 2},
    {"algorithm": "fedbuff", "training__updates_per_round": 2, "training__server_optimizer": "amsgrad"},
    {"algorithm": "own-models", "training__updates_per_round": 2},
    {"algorithm": "one-by-one", "training__updates_per_round": 2},
    {"algorithm": "area", "training__updates_per_round": 2},
    {"algorithm": "quafl", "training__updates_per_round": 2, "quafl__wait_seconds": 0.02},
    {"algorithm": "defedavg-niid", "defedavg-niid__mode": "thrifty", "training__server_optimizer": "momentum"},
]


def named(changes: dict[str, Any]) -> str:
    return "-".join(str(value) for name, value in changes.items() if "per_round" not in name)


@pytest.fixture(autouse=True)
def _algorithms(worlds: None) -> Iterator[None]:
    with registered(OwnModels, MergesOneByOne):
        yield


class CrashError(Exception):
    """The server crashes here."""


@dataclass
class Disk:
    """Counts everything that a server writes, flushes or deletes; a write that crashes leaves a part of its content.

    A crash before the log is flushed loses what was written to it since the last flush, as a loss of power may.
    """

    crashes: Callable[[int], bool]
    count: int = 0
    flushed: int = 0

    def _due(self) -> bool:
        self.count += 1
        return self.crashes(self.count)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._install_files(monkeypatch)
        self._install_log(monkeypatch)

    def _install_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole, flushed, unlink, append = fileio.write_whole, fileio.write_flushed, Path.unlink, writer.append_lines

        def write_whole(path: Path, data: bytes) -> None:
            if self._due():
                path.with_name(path.name + ".part").write_bytes(data[: len(data) // 2])
                raise CrashError
            whole(path, data)

        def write_flushed(path: Path, data: bytes) -> None:
            if self._due():
                path.write_bytes(data[: len(data) // 2])
                raise CrashError
            flushed(path, data)

        def delete(path: Path, missing_ok: bool = False) -> None:
            if path.suffix == ".safetensors" and self._due():
                raise CrashError
            unlink(path, missing_ok)

        def append_lines(*given: Any) -> None:
            if self._due():
                raise CrashError
            append(*given)

        monkeypatch.setattr(os, "fsync", lambda _: None)  # this disk decides what is lost
        monkeypatch.setattr(state_store, "write_whole", write_whole)
        monkeypatch.setattr(state_store, "write_flushed", write_flushed)
        monkeypatch.setattr(Path, "unlink", delete)
        monkeypatch.setattr(sessions, "append_lines", append_lines)

    def _install_log(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log_write, log_flush = logs.EventLogWriter._write, logs.EventLogWriter._flush

        def write_log(log: logs.EventLogWriter, objects: list[dict[str, Any]]) -> None:
            if self._due():
                complete = "".join(json.dumps(item) + "\n" for item in objects[:-1])  # the last line is cut
                log._file.write((complete + json.dumps(objects[-1])[:-3]).encode())
                log.abandon()
                raise CrashError
            log_write(log, objects)

        def flush_log(log: logs.EventLogWriter) -> None:
            if self._due():
                log.abandon()
                os.truncate(log.path, self.flushed)
                if not self.flushed:
                    log.path.unlink()  # nothing had begun
                raise CrashError
            log_flush(log)
            self.flushed = log.path.stat().st_size

        monkeypatch.setattr(logs.EventLogWriter, "_write", write_log)
        monkeypatch.setattr(logs.EventLogWriter, "_flush", flush_log)


Step = tuple[int, int, Any] | Event
"""An update that is added (client, index, values), or an event that is handled."""

AT_ONCE, TOGETHER = (1, 0.0), (4, math.inf)
"""Events that are committed together, and ``save_seconds``: everything at once, or as late as possible."""


def recorded_script(folder: Path, changes: dict[str, Any]) -> tuple[dict[str, Any], list[Step]]:
    """Return the settings of a short run in memory, and everything that its session was given."""
    script: list[Step] = []
    add, handle = Session.add_update, Session.handle

    def add_update(self: Session, client: int, index: int, values: Any) -> None:
        script.append((client, index, values.copy()))
        add(self, client, index, values)

    def handled(self: Session, event: Event) -> Any:
        script.append(event)
        return handle(self, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "add_update", add_update)
        patch.setattr(Session, "handle", handled)
        short: dict[str, Any] = {**changes, "clients__num_clients": 4, "stop__max_rounds": 5}
        if changes["algorithm"] == "quafl":  # its clients train in threads
            patch.setattr("helpers.deployments.Clock", RealClock)
            world = real(folder, short)
        else:
            world = World(folder, **short)
        world.until(lambda: world.session.progress.status is not Status.RUNNING)
    return world.flat, script


@dataclass
class Result:
    """What a run left: every version that it made, its state vectors, and its files."""

    versions: dict[int, Tensor]
    state: dict[StateVector, Tensor]
    files: dict[str, bytes]
    updates: dict[tuple[int, int], Tensor]  # not merged yet


def play(
    folder: Path, flat: dict[str, Any], script: list[Step], disk: Disk, mode: tuple[int, float] = AT_ONCE
) -> tuple[Result, int]:
    """Give a session a script; after every crash resume it and continue after the last event in its log."""
    together, save_seconds = mode
    config, versions, crashes, position = read_deploy_config(flat), dict[int, Tensor](), 0, 0
    ends = [0, *(number for number, step in enumerate(script, start=1) if not isinstance(step, tuple))]
    task = tiny_task(flat, None)
    disk.flushed = 0
    session: Session | None = None
    saved = False
    while not saved:
        try:
            if session is None:
                if (folder / LOG).exists():
                    session = Session.resume(config, flat, task, folder, save_seconds=save_seconds)
                    position = ends[sum(1 for _ in logs.read(folder / LOG).events)]
                else:
                    session = Session(config, flat, task, folder, save_seconds=save_seconds)
            elif position < len(script):
                position += _take(session, script[position:], together)
            else:
                session.save()
                saved = True
            versions |= {version: weights.clone() for version, weights in session.executor.versions.items()}
        except CrashError:
            crashes += 1
            assert crashes < 100
            if session is not None:
                session.log.abandon()
            session = None
            if (folder / LOG).exists() and b"\n" not in (folder / LOG).read_bytes():
                (folder / LOG).unlink()  # nothing had begun
    assert session is not None
    session.log.abandon()
    files = {path.name: path.read_bytes() for path in (folder / "state").glob("*.safetensors*")}
    files = {name: data for name, data in files.items() if not name.startswith("updates-")}  # numbered by lines
    updates = {key: session.store.update(update) for key, update in session.engine.received.items()}
    return Result(versions, session.executor.state.assigned(), files, updates), crashes


def _take(session: Session, script: list[Step], together: int) -> int:
    """Handle that many events of a script, or fewer if a version is evaluated; return the number of steps."""
    taken = 0
    while taken < len(script) and together and not session.commit_due:
        step = script[taken]
        taken += 1
        if isinstance(step, tuple):
            session.add_update(*step)
        else:
            session.handle(step)
            together -= 1
    session.commit()
    session.evaluate()
    session.save_if_due()
    return taken


def assert_same(found: Result, expected: Result) -> None:
    """Compare with every bit."""
    assert found.versions.keys() == expected.versions.keys()
    assert all(torch.equal(found.versions[version], expected.versions[version]) for version in expected.versions)
    assert found.state.keys() == expected.state.keys()
    assert all(torch.equal(found.state[vector], expected.state[vector]) for vector in expected.state)
    assert found.files == expected.files
    assert found.updates.keys() == expected.updates.keys()
    assert all(torch.equal(found.updates[key], expected.updates[key]) for key in expected.updates)


@pytest.mark.no_cover
@pytest.mark.parametrize("changes", STATEFUL, ids=named)
@pytest.mark.parametrize("mode", [AT_ONCE, TOGETHER], ids=["at once", "together"])
def test_a_crash_at_any_moment_of_writing_changes_no_bit(
    changes: dict[str, Any], mode: tuple[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat, script = recorded_script(tmp_path / "recorded", changes)
    disk = Disk(lambda count: False)
    disk.install(monkeypatch)
    expected, _ = play(tmp_path / "whole", flat, script, disk)
    assert max(expected.versions) == 5
    assert expected.state
    disk.count = 0
    assert_same(play(tmp_path / "mode", flat, script, disk, mode)[0], expected)
    assert disk.count > 25
    for moment in range(1, disk.count + 1):
        disk.count, disk.crashes = 0, lambda count, moment=moment: count == moment  # type: ignore[misc]
        found, crashes = play(tmp_path / f"crash-{moment}", flat, script, disk, mode)
        assert crashes == 1
        assert_same(found, expected)
    monkeypatch.undo()


@pytest.mark.parametrize("changes", STATEFUL, ids=named)
@pytest.mark.parametrize(("every", "mode"), [(13, AT_ONCE), (17, AT_ONCE), (11, TOGETHER)])
def test_a_server_that_crashes_again_and_again_changes_no_bit(
    changes: dict[str, Any], every: int, mode: tuple[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it resumes."""
    flat, script = recorded_script(tmp_path / "recorded", changes)
    disk = Disk(lambda count: False)
    disk.install(monkeypatch)
    expected, _ = play(tmp_path / "whole", flat, script, disk)
    disk.crashes = lambda count: count % every == 0
    found, crashes = play(tmp_path / "crashing", flat, script, disk, mode)
    monkeypatch.undo()
    assert crashes >= 3
    assert_same(found, expected)


@pytest.mark.parametrize("changes", [c for c in STATEFUL if c["algorithm"] != "quafl"], ids=named)
def test_a_resumed_deployment_with_state_replays_as_its_executor_computes_it(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    world = World(tmp_path / "run", stop__max_rounds=12, **changes)
    for version in (3, 4, 9):
        world.until(lambda version=version: world.session.engine.server.version >= version)  # type: ignore[misc]
        before = world.session.executor.state.assigned()
        world.crash()
        after = world.session.executor.state.assigned()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[vector], after[vector]) for vector in before)
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    _, found = checked(world)
    agrees(world, found)


def _state_files(folder: Path) -> list[Path]:
    return sorted((folder / "state").glob("state-*.safetensors"))


def test_only_the_newest_value_of_a_vector_is_kept_and_only_what_a_merge_assigned_is_written(tmp_path: Path) -> None:
    world = World(tmp_path / "run", stop__max_rounds=30, **STATEFUL[0])
    written: list[str] = []
    save = world.session.store.save_vector
    world.session.store.save_vector = lambda *given: (written.append(str(given[0])), save(*given))[1]  # type: ignore[method-assign,func-returns-value]
    for version in range(1, 8):
        written.clear()
        world.until(lambda version=version: world.session.engine.server.version >= version)  # type: ignore[misc]
        assert len(written) == 3  # the sum, and the last updates of two clients
        names = [path.name.rsplit("-", 1)[0] for path in _state_files(tmp_path / "run")]
        assert len(names) == len(set(names)) == len(world.session.executor.state.assigned())


def _other_shape(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"state": torch.zeros(3)}, path)


def _other_type(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"state": torch.zeros(10, dtype=torch.float64)}, path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "no tensor": lambda path: path.write_bytes(b"nothing"),
    "another shape": _other_shape,
    "another number type": _other_type,
    "a folder": _folder,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_vector_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    world = World(tmp_path / "run", **STATEFUL[2])
    world.until(lambda: world.session.engine.server.version >= 3)
    DAMAGE[damage](_state_files(tmp_path / "run")[0])
    with pytest.raises(UserError, match=r"^the saved state is damaged: .*state-model-0-\d\.safetensors") as raised:
        world.crash()
    assert "\n" not in str(raised.value)


def test_a_version_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    world = World(tmp_path / "run")
    world.until(lambda: world.session.engine.server.version >= 3)
    save_file({"weights": torch.zeros(3)}, tmp_path / "run" / "state" / "version-3.safetensors")
    with pytest.raises(UserError, match=r"damaged: .*has other values than this model"):
        world.crash()


def test_a_vector_that_becomes_zero_takes_no_space_and_stays_zero(tmp_path: Path) -> None:
    world = World(tmp_path / "run", **STATEFUL[0])
    world.until(lambda: world.session.engine.server.version >= 3)
    store, vector = world.session.store, StateVector("last", 0)
    store.save_vector(vector, 8, torch.ones(10))
    loaded = store.vector(vector, 8)
    assert loaded is not None
    assert torch.equal(loaded, torch.ones(10))
    store.save_vector(vector, 9, None)
    assert store.vector(vector, 9) is None
    assert len((tmp_path / "run" / "state" / "state-last-0-9.safetensors").read_bytes()) < 100
