"""Running statistics in a deployment: the server's merge, its checks of replies, and a crash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from defedavg.deploy.engine.client_tracker import MAX_FAULTS
from defedavg.deploy.engine.events import Refused
from defedavg.deploy.server.session import Session
from defedavg.deploy.transport import Message, Reply, Vector, model_signature
from defedavg.errors import UserError
from defedavg.planning.records import Round
from defedavg.tasks import Task
from defedavg.training import Status
from helpers.deployments import PLAIN, World, agrees, checked
from helpers.shifted_inputs import deployed_task, shifted_task

pytestmark = pytest.mark.usefixtures("worlds")

STATISTICS = 2 * 4 + 2 * 6


def double_task(config: Mapping[str, Any], client: int | None) -> Task:
    return shifted_task(clients=int(config["clients.num_clients"]))


@pytest.mark.parametrize("changes", PLAIN, ids=lambda c: "-".join(map(str, c.values())))
def test_the_server_averages_the_statistics_that_clients_send(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[tuple[int, int], Vector] = {}
    versions: dict[int, Vector] = {}
    add_update, merge = Session.add_update, Session._merge

    def recorded_update(self: Session, client: int, index: int, values: Vector) -> None:
        sent[client, index] = values.copy()
        add_update(self, client, index, values)

    def recorded_merge(self: Session, record: Round) -> None:
        merge(self, record)
        versions[record.merge.version] = self.executor.versions[record.merge.version].numpy().copy()

    monkeypatch.setattr(Session, "add_update", recorded_update)
    monkeypatch.setattr(Session, "_merge", recorded_merge)
    world = World(tmp_path / "run", task=double_task, **changes)
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    _, found = checked(world)
    for record in found.plan.rounds:
        weights = {(u.client, u.index): abs(b) for u, b in record.merge.updates}
        if not any(weights.values()):  # all updates enter through state vectors: they have equal weights
            weights = dict.fromkeys(weights, 1.0)
        expected = np.sum([b * sent[key][-STATISTICS:] for key, b in weights.items()], axis=0) / sum(weights.values())
        np.testing.assert_allclose(versions[record.merge.version][-STATISTICS:], expected, rtol=1e-10)
    agrees(world, found)
    assert not found.refused


def test_a_crash_changes_no_statistics(tmp_path: Path) -> None:
    world = World(tmp_path / "run", task=deployed_task, algorithm="fedbuff")
    world.until(lambda: world.session.engine.server.version >= 4)
    world.crash()
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    _, found = checked(world)
    agrees(world, found)


def test_a_negative_variance_is_refused(tmp_path: Path) -> None:
    def tamper(node: Any, message: Message, reply: Reply) -> Reply:
        if reply.update is None:
            return reply
        update = reply.update.copy()
        update[-1] = -1e-3  # in the variance of the last layer
        return Reply(reply.to, reply.fields, update)

    world = World(tmp_path / "run", task=deployed_task, stop__max_rounds=20)
    world.until(lambda: world.session.engine.server.version >= 1)
    world.node_of(2).tamper = tamper
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    log, found = checked(world)
    refused = [event for event in log.events if isinstance(event, Refused)]
    assert len(refused) == MAX_FAULTS
    assert all(event.client == 2 and "negative variance in 2.running_var" in event.why for event in refused)
    assert bool((world.session.executor.versions[20][-6:] > 0).all())
    agrees(world, found)


def test_a_client_that_knows_no_statistics_cannot_take_part(tmp_path: Path) -> None:
    """A client of an earlier version would send differences of statistics."""
    world = World(tmp_path / "run", task=deployed_task, deploy__min_clients=5)

    def earlier(node: Any, message: Message, reply: Reply) -> Reply:
        module = world.session.executor.module
        return Reply(reply.to, {**reply.fields, "signature": model_signature(module)}, reply.update)

    world.node_of(2).tamper = earlier
    world.until(lambda: world.session.engine.server.version >= 2)
    assert any("client 2 cannot take part: its model differs" in line for line in world.log_lines)


def test_a_server_refuses_batches_of_one_sample(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"batch_size is 1, .*GroupNorm"):
        World(tmp_path / "run", task=deployed_task, training__batch_size=1)
