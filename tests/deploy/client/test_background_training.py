"""Clients that train on between messages: real threads, short jobs, and a server in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from defedavg.algorithms.protocol import ClientPolicy, Update
from defedavg.deploy.client.background_training import Background, Work
from defedavg.deploy.client.client_socket import Key, ask, born, folder
from defedavg.deploy.engine.clock_sync import Clocks
from defedavg.deploy.engine.events import Report
from defedavg.deploy.transport import Message, Reply, Vector
from defedavg.errors import UserError
from defedavg.training import LocalTraining, Status
from helpers.deployments import Clock, World, agrees, checked

WAIT = 60.0


class RealClock(Clock):
    """The clock on the wall."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    @now.setter
    def now(self, value: float) -> None:
        pass

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.005))


class Trial:
    """A background client whose jobs end when the test says so."""

    def __init__(self, policy: ClientPolicy) -> None:
        self.policy = policy
        self.step = threading.Semaphore(0)
        self.started: list[int] = []
        self.background = Background(3, policy, self._carry_out)
        self.epoch = 1

    def _carry_out(self, work: Work, goes_on: Any) -> tuple[Vector, int, float]:
        self.started.append(work.update.version)
        done = 0
        while done < work.update.steps and goes_on(done):
            if self.step.acquire(timeout=0.01):
                done += 1
        return np.full(2, float(done)), done, 0.1

    def say(self, version: int | None, wanted: bool, patience: float = 0.05) -> tuple[dict[str, Any], Vector | None]:
        """One message."""
        fields: dict[str, Any] = {"wanted": wanted, "version": -1 if version is None else version, "epoch": self.epoch}
        fields |= {"jobs": 0, "trained": -1, "patience": patience}
        weights = None if version is None else np.zeros(2)
        return self.background.exchange(fields, weights, self._make)

    def _make(self, fields: Any, index: int, version: int, weights: Vector) -> Work:
        return Work(Update(3, index, version, 2), LocalTraining(seed=0), weights)

    def until_started(self, count: int) -> None:
        deadline = time.monotonic() + WAIT
        while len(self.started) < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def kinds(told: dict[str, Any]) -> list[str]:
    return [kind for kind, _, _ in json.loads(told["reports"])]


def test_an_eager_client_trains_on_and_a_newer_update_overwrites() -> None:
    trial = Trial(ClientPolicy(hold_until_requested=True))
    assert trial.say(0, wanted=False)[0]["update"] is False
    trial.until_started(1)
    trial.say(1, wanted=False)
    trial.say(2, wanted=False)  # the receive buffer holds the newest only
    trial.step.release(2)
    trial.until_started(2)
    assert trial.started == [0, 2]
    trial.step.release(2)
    seen: list[str] = []
    deadline = time.monotonic() + WAIT
    while seen.count("ended") < 2:
        assert time.monotonic() < deadline
        seen += kinds(trial.say(None, wanted=False)[0])
    told, update = trial.say(None, wanted=True, patience=WAIT)
    assert (told["index"], told["version"], told["steps"]) == (1, 2, 2)  # job 0 was overwritten
    assert update is not None
    assert trial.say(None, wanted=True)[0]["update"] is False  # uploading empties the send buffer


def test_a_request_waits_for_the_running_job() -> None:
    trial = Trial(ClientPolicy(hold_until_requested=True))
    trial.say(0, wanted=False)
    assert trial.say(None, wanted=True)[0]["update"] is False
    trial.step.release(2)
    told, _ = trial.say(None, wanted=True, patience=WAIT)
    assert (told["update"], told["index"], told["steps"]) == (True, 0, 2)


def test_an_interruptible_client_hands_over_what_it_has() -> None:
    trial = Trial(ClientPolicy(hold_until_requested=True, pause_when_full=True, interruptible=True))
    trial.say(0, wanted=False)
    trial.until_started(1)
    trial.step.release(1)
    deadline = time.monotonic() + WAIT
    while trial.step.acquire(blocking=False):  # until the step was taken
        trial.step.release()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    told, update = trial.say(1, wanted=True, patience=WAIT)
    assert (told["index"], told["version"], told["steps"]) == (0, 0, 1)
    assert update is not None
    trial.until_started(2)
    assert trial.started == [0, 1]


def test_a_new_epoch_forgets_everything() -> None:
    trial = Trial(ClientPolicy(hold_until_requested=True))
    trial.say(0, wanted=False)
    trial.until_started(1)
    trial.epoch = 2
    told, _ = trial.say(5, wanted=False)
    assert kinds(told) == ["model", "go"]
    trial.until_started(2)
    trial.step.release(2)
    told, _ = trial.say(None, wanted=True, patience=WAIT)
    assert (told["index"], told["version"]) == (0, 5)


def test_what_a_job_raises_is_told_to_who_asks() -> None:
    def broken(work: Work, goes_on: Any) -> tuple[Vector, int, float]:
        raise RuntimeError("no data")

    trial = Trial(ClientPolicy(hold_until_requested=True))
    trial.background = Background(3, trial.policy, broken)
    with pytest.raises(RuntimeError, match="no data"):
        trial.say(0, wanted=True, patience=WAIT)


BACKGROUND: list[dict[str, Any]] = [
    {"algorithm": "defedavg-niid"},
    {"algorithm": "favano", "favano__wait_seconds": 0.05},
    {"algorithm": "favano", "favano__wait_seconds": 0.05, "favano__reweight": "deterministic"},
]


@pytest.fixture(autouse=True)
def _real_time(worlds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploying.Clock", RealClock)
    monkeypatch.setattr("defedavg.deploy.server.coordinator.NODES_SECONDS", 0.05)


def real(folder_: Path, changes: dict[str, Any], **more: Any) -> World:
    world = World(folder_, deploy__patience_seconds=0.05, deploy__poll_seconds=0.001, **changes, **more)
    for node in world.port.members.values():
        node.delay = 0.002 * (1 + node.desk.client)
    return world


@pytest.mark.parametrize("changes", BACKGROUND, ids=lambda c: "-".join(map(str, c.values())))
def test_the_machine_of_the_server_follows_those_of_the_clients(changes: dict[str, Any], tmp_path: Path) -> None:
    world = real(tmp_path / "run", changes)
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    _, found = checked(world)
    assert not found.refused
    assert len(found.plan.rounds) == 8
    agrees(world, found)


@pytest.mark.parametrize("changes", BACKGROUND[:2], ids=lambda c: c["algorithm"])
def test_background_clients_die_return_and_see_the_server_crash(changes: dict[str, Any], tmp_path: Path) -> None:
    world = real(tmp_path / "run", changes, stop__max_rounds=16)
    world.until(lambda: world.session.engine.server.version >= 3)
    world.node_of(1).alive = False
    world.node_of(2).alive = False
    world.until(lambda: world.session.engine.server.version >= 5)
    world.connect(2, delay=0.01)
    world.until(lambda: world.session.engine.server.version >= 8)
    world.crash()
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    _, found = checked(world)
    agrees(world, found)


LIES: dict[str, dict[str, Any]] = {
    "no reports": {"reports": None},
    "nonsense": {"reports": "[[1]]"},
    "a version it was not given": {"reports": '[["model", 99, 0.0]]'},
    "a start from nothing": {"reports": '[["go", -1, 0.0], ["go", -1, 0.0]]'},
    "the future": {"reports": '[["request", -1, 1e12]]'},
    "an unknown event": {"reports": '[["explode", -1, 0.0]]'},
    "no clock": {"clock": "now"},
}


@pytest.mark.parametrize("lie", LIES)
def test_reports_that_make_no_sense_are_refused(lie: str, tmp_path: Path) -> None:
    world = real(tmp_path / "run", BACKGROUND[0], stop__max_rounds=12)

    def twist(node: Any, message: Message, reply: Reply) -> Reply:
        return reply if message.kind == "hello" else Reply(reply.to, {**reply.fields, **LIES[lie]}, reply.update)

    world.node_of(2).twist = twist
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    _, found = checked(world)
    assert {event.client for event in found.refused} == {2}


def test_clocks_never_run_back_and_never_ahead() -> None:
    clocks = Clocks()
    first = clocks.moved((0, 1), (Report("go", -1, 5.0), Report("ended", -1, 8.0)), 10.0, 110.0)
    assert [report.at for report in first] == [105.0, 108.0]
    # A reply that came quicker shows that the clocks are nearer than they seemed.
    second = clocks.moved((0, 1), (Report("go", -1, 10.5),), 12.0, 109.0)
    assert [report.at for report in second] == [108.0]
    third = clocks.moved((0, 2), (Report("go", -1, 1.0),), 1.0, 120.0)
    assert [report.at for report in third] == [120.0]


# The worker process.


def test_a_worker_answers_only_who_knows_the_secret_and_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        order = {"task": "deploying:tiny_task", "config": {"clients.num_clients": 6}, "client": 2, "step_seconds": 0.0}
        code = (
            "import os, json, sys\n"
            "from defedavg.deploy.client import client_socket as workers\n"
            f"os.getppid = lambda: {parent.pid}\n"
            f"order = json.loads({json.dumps(json.dumps(order))})\n"
            "key, told, _ = workers.ask(None, 'test', order, 'hello', {}, None)\n"
            "print(json.dumps([key.path, key.secret.hex(), told]))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
            timeout=120,
        )
        path, secret, told = json.loads(done.stdout)
        assert told["client"] == 2
        assert Path(path).parent == folder()
        assert Path(path).stat().st_mode & 0o077 == 0
        key = Key(path, bytes.fromhex(secret))
        _, again, _ = ask(key, "test", order, "hello", {}, None)
        assert again == told
        with pytest.raises(UserError, match="not known here"):
            ask(key, "test", order, "dance", {}, None)
        from defedavg.deploy.client.client_socket import _connect

        assert _connect(Key(path, b"another secret")) is None
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + WAIT
    while Path(path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert born(parent.pid) is None
