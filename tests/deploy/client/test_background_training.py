"""Clients that train between messages: real threads, short jobs, and a server in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from defedavg.algorithms.protocol import ClientPolicy
from defedavg.deploy.client.background_training import BackgroundTrainer, LocalJob
from defedavg.deploy.client.client_socket import ProcessAddress, connect, process_start_time, request, socket_path
from defedavg.deploy.engine.client_tracker import ClockSync
from defedavg.deploy.engine.events import Report
from defedavg.deploy.transport import Message, Reply, Vector
from defedavg.errors import UserError
from defedavg.training import Status
from helpers.background_clients import WAIT, ManualTrainer, RealClock, kinds, real
from helpers.deployments import BACKGROUND, agrees, checked
from helpers.shifted_inputs import deployed_task


def test_a_client_trains_between_messages_and_a_newer_update_replaces_the_older() -> None:
    trainer = ManualTrainer(ClientPolicy(hold_until_requested=True))
    assert trainer.exchange(0, wanted=False)[0]["update"] is False
    trainer.until_started(1)
    trainer.exchange(1, wanted=False)
    trainer.exchange(2, wanted=False)  # the receive buffer holds the newest only
    trainer.step.release(2)
    trainer.until_started(2)
    assert trainer.started == [0, 2]
    trainer.step.release(2)
    seen: list[str] = []
    deadline = time.monotonic() + WAIT
    while seen.count("ended") < 2:
        assert time.monotonic() < deadline
        seen += kinds(trainer.exchange(None, wanted=False)[0])
    reply, update = trainer.exchange(None, wanted=True, patience=WAIT)
    assert (reply["index"], reply["version"], reply["steps"]) == (1, 2, 2)  # the update of job 0 was replaced
    assert update is not None
    assert trainer.exchange(None, wanted=True)[0]["update"] is False  # uploading empties the send buffer


def test_a_request_waits_for_the_running_job() -> None:
    trainer = ManualTrainer(ClientPolicy(hold_until_requested=True))
    trainer.exchange(0, wanted=False)
    assert trainer.exchange(None, wanted=True)[0]["update"] is False
    trainer.step.release(2)
    reply, _ = trainer.exchange(None, wanted=True, patience=WAIT)
    assert (reply["update"], reply["index"], reply["steps"]) == (True, 0, 2)


def test_an_interruptible_client_sends_the_steps_it_has_done() -> None:
    trainer = ManualTrainer(ClientPolicy(hold_until_requested=True, pause_when_full=True, interruptible=True))
    trainer.exchange(0, wanted=False)
    trainer.until_started(1)
    trainer.step.release(1)
    deadline = time.monotonic() + WAIT
    while trainer.step.acquire(blocking=False):  # until the step was taken
        trainer.step.release()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    reply, update = trainer.exchange(1, wanted=True, patience=WAIT)
    assert (reply["index"], reply["version"], reply["steps"]) == (0, 0, 1)
    assert update is not None
    trainer.until_started(2)
    assert trainer.started == [0, 1]


def test_a_new_epoch_discards_everything() -> None:
    trainer = ManualTrainer(ClientPolicy(hold_until_requested=True))
    trainer.exchange(0, wanted=False)
    trainer.until_started(1)
    trainer.epoch = 2
    reply, _ = trainer.exchange(5, wanted=False)
    assert kinds(reply) == ["model", "go"]
    trainer.until_started(2)
    trainer.step.release(2)
    reply, _ = trainer.exchange(None, wanted=True, patience=WAIT)
    assert (reply["index"], reply["version"]) == (0, 5)


def test_an_error_of_a_job_is_raised_by_the_exchange() -> None:
    def broken(job: LocalJob, should_continue: Any) -> tuple[Vector, int, float]:
        raise RuntimeError("no data")

    trainer = ManualTrainer(ClientPolicy(hold_until_requested=True))
    trainer.background = BackgroundTrainer(3, trainer.policy, broken)
    with pytest.raises(RuntimeError, match="no data"):
        trainer.exchange(0, wanted=True, patience=WAIT)


@pytest.fixture(autouse=True)
def _real_time(worlds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.deployments.Clock", RealClock)
    monkeypatch.setattr("defedavg.deploy.server.coordinator.NODES_SECONDS", 0.05)


@pytest.mark.parametrize("changes", BACKGROUND, ids=lambda c: "-".join(map(str, c.values())))
def test_the_servers_copies_of_the_client_machines_agree_with_them(changes: dict[str, Any], tmp_path: Path) -> None:
    world = real(tmp_path / "run", changes)
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    _, found = checked(world)
    assert not found.refused
    assert len(found.plan.rounds) == 8
    agrees(world, found)


def test_background_jobs_have_the_rate_of_their_version(tmp_path: Path) -> None:
    options = {"optimizer": "adam", "local_schedule": "inverse-sqrt(0.01)", "schedule_by": "seconds", "prox": 0.1}
    world = real(tmp_path / "run", BACKGROUND[0], **{f"training__{name}": value for name, value in options.items()})
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    _, found = checked(world)
    agrees(world, found)
    rates = [float(message.fields["rate"]) for message in world.transport.sent if message.weights is not None]
    assert max(rates) > 1.5 * min(rates)


@pytest.mark.parametrize("changes", BACKGROUND[1:3], ids=lambda c: c["algorithm"])
def test_interrupted_clients_send_running_statistics(changes: dict[str, Any], tmp_path: Path) -> None:
    world = real(tmp_path / "run", changes, task=deployed_task)
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    _, found = checked(world)
    assert not found.refused
    agrees(world, found)
    newest = world.session.executor.versions[world.session.engine.server.version]
    assert bool((newest[-6:] > 0).all())


@pytest.mark.parametrize("changes", BACKGROUND[:2] + BACKGROUND[3:], ids=lambda c: c["algorithm"])
def test_background_clients_disconnect_return_and_outlive_a_crash_of_the_server(
    changes: dict[str, Any], tmp_path: Path
) -> None:
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


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "no reports": {"reports": None},
    "nonsense": {"reports": "[[1]]"},
    "a version it was not sent": {"reports": '[["model", 99, 0.0]]'},
    "a start from nothing": {"reports": '[["go", -1, 0.0], ["go", -1, 0.0]]'},
    "the future": {"reports": '[["request", -1, 1e12]]'},
    "an unknown event": {"reports": '[["explode", -1, 0.0]]'},
    "no clock": {"clock": "now"},
}


@pytest.mark.parametrize("fault", BAD_FIELDS)
def test_inconsistent_reports_are_refused(fault: str, tmp_path: Path) -> None:
    world = real(tmp_path / "run", BACKGROUND[0], stop__max_rounds=12)

    def tamper(node: Any, message: Message, reply: Reply) -> Reply:
        return (
            reply if message.kind == "hello" else Reply(reply.to, {**reply.fields, **BAD_FIELDS[fault]}, reply.update)
        )

    world.node_of(2).tamper = tamper
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    _, found = checked(world)
    assert {event.client for event in found.refused} == {2}


def test_translated_times_never_decrease_and_never_exceed_the_server_time() -> None:
    clocks = ClockSync()
    first = clocks.to_server_time((0, 1), (Report("go", -1, 5.0), Report("ended", -1, 8.0)), 10.0, 110.0)
    assert [report.at for report in first] == [105.0, 108.0]
    # A faster reply gives a smaller bound of the offset.
    second = clocks.to_server_time((0, 1), (Report("go", -1, 10.5),), 12.0, 109.0)
    assert [report.at for report in second] == [108.0]
    third = clocks.to_server_time((0, 2), (Report("go", -1, 1.0),), 1.0, 120.0)
    assert [report.at for report in third] == [120.0]


# The client process.


def test_a_client_process_requires_the_secret_and_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        launch = {
            "task": "helpers.deployments:tiny_task",
            "config": {"clients.num_clients": 6},
            "client": 2,
            "step_seconds": 0.0,
        }
        code = (
            "import os, json, sys\n"
            "from defedavg.deploy.client import client_socket\n"
            f"os.getppid = lambda: {parent.pid}\n"
            f"launch = json.loads({json.dumps(json.dumps(launch))})\n"
            "address, reply, _ = client_socket.request(None, 'test', launch, 'hello', {}, None)\n"
            "print(json.dumps([address.path, address.secret.hex(), reply]))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
            timeout=120,
        )
        path, secret, reply = json.loads(done.stdout)
        assert reply["client"] == 2
        assert Path(path).parent == socket_path("x").parent
        assert Path(path).stat().st_mode & 0o077 == 0
        address = ProcessAddress(path, bytes.fromhex(secret))
        _, again, _ = request(address, "test", launch, "hello", {}, None)
        assert again == reply
        with pytest.raises(UserError, match="unknown kind of message"):
            request(address, "test", launch, "dance", {}, None)
        assert connect(ProcessAddress(path, b"another secret")) is None
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + WAIT
    while Path(path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process_start_time(parent.pid) is None
