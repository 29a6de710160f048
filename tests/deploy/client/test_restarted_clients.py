"""Clients whose job a newer version restarts, and background clients under any policy."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms.protocol import ClientMachine, ClientPolicy
from defedavg.deploy.client.background_training import BackgroundTrainer, LocalJob
from defedavg.deploy.engine.client_tracker import ClientLink, Tracker
from defedavg.deploy.engine.event_log import read_reports
from defedavg.deploy.engine.events import Exchanged, UpdateInfo
from defedavg.deploy.server.coordinator import RESTART_SECONDS
from defedavg.deploy.transport import Vector
from defedavg.training import Status
from helpers.background_clients import WAIT, ManualTrainer, RealClock, kinds, real
from helpers.deployments import World, agrees, checked
from helpers.state_algorithms import RestartsStale, registered
from helpers.strategies import bounded

RESTART = ClientPolicy(hold_until_requested=True, restart_on_model=True)


def leaks(trainer: BackgroundTrainer) -> list[Any]:
    """Return what the trainer keeps of jobs."""
    return [*trainer._queue, *trainer._stopped, *trainer._dropped, *trainer._done]


def test_a_newer_version_stops_the_running_job() -> None:
    trainer = ManualTrainer(RESTART)
    trainer.exchange(0, wanted=True)
    trainer.until_started(1)
    reply, update = trainer.exchange(1, wanted=True)
    assert update is None
    assert kinds(reply) == ["model", "request", "go"]
    trainer.until_started(2)
    assert trainer.started == [0, 1]
    trainer.step.release(2)
    reply, update = trainer.exchange(None, wanted=True, patience=WAIT)
    assert (reply["index"], reply["version"], reply["steps"]) == (1, 1, 2)
    assert update is not None
    assert leaks(trainer.background) == []


class BlockedTrainer(ManualTrainer):
    """A client that cannot stop within a step: its jobs wait for ``unblocked``."""

    def __init__(self, policy: ClientPolicy) -> None:
        self.unblocked = threading.Event()
        self.fails: set[int] = set()
        super().__init__(policy)

    def _train_job(self, job: LocalJob, should_continue: Any) -> tuple[Vector, int, float]:
        self.started.append(job.update.version)
        assert self.unblocked.wait(WAIT)
        if job.update.version in self.fails:
            raise RuntimeError("no data")
        steps = job.update.steps if should_continue(0) else 0
        return np.full(2, float(steps)), steps, 0.1


def test_versions_that_arrive_while_a_job_stops_leave_only_the_newest_job() -> None:
    trainer = BlockedTrainer(RESTART)
    trainer.exchange(0, wanted=False)
    trainer.until_started(1)
    for version in (1, 2, 3):
        trainer.exchange(version, wanted=False)
    assert [job.update.version for job in trainer.background._queue] == [3]
    trainer.unblocked.set()
    reply, _ = trainer.exchange(None, wanted=True, patience=WAIT)
    assert trainer.started == [0, 3]
    assert (reply["index"], reply["version"], reply["steps"]) == (3, 3, 2)
    assert leaks(trainer.background) == []


def test_an_error_of_a_job_that_was_dropped_is_ignored() -> None:
    trainer = BlockedTrainer(RESTART)
    trainer.fails = {0}
    trainer.exchange(0, wanted=False)
    trainer.until_started(1)
    trainer.exchange(1, wanted=False)
    trainer.unblocked.set()
    reply, _ = trainer.exchange(None, wanted=True, patience=WAIT)
    assert (reply["index"], reply["version"]) == (1, 1)
    assert leaks(trainer.background) == []


def test_a_new_epoch_forgets_dropped_jobs() -> None:
    trainer = BlockedTrainer(RESTART)
    trainer.exchange(0, wanted=False)
    trainer.until_started(1)
    trainer.exchange(1, wanted=False)
    trainer.epoch = 2
    trainer.exchange(2, wanted=False)  # its job has the number of the one that is still running
    trainer.unblocked.set()
    reply, _ = trainer.exchange(None, wanted=True, patience=WAIT)
    assert (reply["index"], reply["version"], reply["steps"]) == (0, 2, 2)
    assert trainer.started == [0, 2]
    assert leaks(trainer.background) == []


POLICIES = [
    ClientPolicy(True, pause, interruptible, same, restart)
    for pause, interruptible, same, restart in itertools.product((False, True), repeat=4)
]


class TrackedTrainer:
    """A background client, and the server's copy of its machine."""

    def __init__(self, policy: ClientPolicy) -> None:
        self.trainer = ManualTrainer(policy)
        self.machine, self.link = ClientMachine(3, policy), ClientLink()

    def exchange(self, version: int | None, wanted: bool) -> None:
        """Exchange a message, and apply the reply to the copy as the engine does."""
        if version is not None:
            self.link.versions_sent.append(version)
        reply, _ = self.trainer.exchange(version, wanted, patience=0.001)
        update = UpdateInfo(reply["index"], reply["version"], reply["steps"]) if reply["update"] else None
        event = Exchanged(0.0, 3, read_reports(json.loads(reply["reports"])), update, 0.0, 0)
        tracker = Tracker(self.machine, self.link, 2, event)
        self.machine, self.link.open_jobs = tracker.machine, tracker.open_jobs

    def agrees(self) -> bool:
        """Return whether both machines are in the same state, and no more jobs are open than a client has."""
        client = self.trainer.background._machine
        assert len(self.link.open_jobs) <= 2
        names = set(ClientMachine.__slots__) - {"policy"}
        return all(getattr(client, name) == getattr(self.machine, name) for name in names)


@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12),
)
@bounded(40)
def test_the_servers_copy_follows_a_background_client_under_any_policy(
    policy: ClientPolicy, messages: list[tuple[bool, bool, int]]
) -> None:
    both, version = TrackedTrainer(policy), -1
    for newer, wanted, steps in messages:
        version += newer
        both.exchange(version if newer else None, wanted)
        for _ in range(steps):
            both.trainer.step.release()
    deadline = time.monotonic() + WAIT
    while not both.agrees():
        assert time.monotonic() < deadline
        both.exchange(None, wanted=False)
    both.trainer.epoch += 1  # ends what is running
    both.trainer.exchange(None, wanted=False)
    assert leaks(both.trainer.background) == []


# Deployments in memory.


@pytest.fixture
def _real_time(worlds: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("helpers.deployments.Clock", RealClock)
    monkeypatch.setattr("defedavg.deploy.server.coordinator.NODES_SECONDS", 0.05)
    with registered(RestartsStale):
        yield


def uneven(folder: Path, **more: Any) -> World:
    """Return a deployment with two clients so slow that their jobs become stale."""
    world = real(folder, {"algorithm": "restarts-stale"}, **more)
    for client in (4, 5):
        world.node_of(client).handler._step_seconds = 0.3
    return world


@pytest.mark.usefixtures("_real_time")
def test_stale_jobs_are_restarted_and_the_replayed_plan_says_so(tmp_path: Path) -> None:
    world = uneven(tmp_path / "run", stop__max_rounds=60)
    assert world.session.engine.background
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    _, found = checked(world)
    assert not found.refused
    lost = [job for job in found.plan.jobs if job.outcome == "lost"]
    assert {job.client for job in lost} >= {4, 5}
    assert max(max(record.merge.staleness) for record in found.plan.rounds) < RestartsStale.MAX_DELAY
    agrees(world, found)
    assert {m.fields["restart_on_model"] for m in world.transport.sent if m.kind == "exchange"} == {True}


@pytest.mark.usefixtures("_real_time")
def test_restarted_clients_disconnect_return_and_outlive_a_crash_of_the_server(tmp_path: Path) -> None:
    world = uneven(tmp_path / "run", stop__max_rounds=60)
    world.until(lambda: world.session.engine.server.version >= 10)
    world.node_of(1).alive = False
    world.node_of(4).alive = False
    world.until(lambda: world.session.engine.server.version >= 20)
    world.connect(4, delay=0.01)
    world.until(lambda: world.session.engine.server.version >= 30)
    world.crash()
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    _, found = checked(world)
    agrees(world, found)


@pytest.mark.usefixtures("_real_time")
@pytest.mark.parametrize(("algorithm", "longest"), [("restarts-stale", RESTART_SECONDS), ("defedavg-niid", 20.0)])
def test_a_client_that_can_restart_waits_a_second_at_most(algorithm: str, longest: float, tmp_path: Path) -> None:
    world = World(tmp_path / "run", algorithm=algorithm)
    world.until(lambda: any(message.kind == "exchange" for message in world.transport.sent))
    assert {m.fields["patience"] for m in world.transport.sent if m.kind == "exchange"} == {longest}
