"""Options of local training in a deployment: a job yields the update that the simulation computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from defedavg.config.build import make_executor
from defedavg.deploy.server.session import Session
from defedavg.deploy.transport import TRAINING_FIELDS, Vector
from defedavg.tasks import Task, make_task
from defedavg.training import LocalTraining, Status
from helpers.deployments import World, checked
from helpers.local_options import OPTIONS

pytestmark = pytest.mark.usefixtures("worlds")

SERVER_FIELDS = {"global_lr", "local_schedule", "global_schedule", "schedule_by", "server"}
IMAGES = np.random.default_rng(3).normal(size=(120, 1, 6, 6))


def image_task(config: Mapping[str, Any], client: int | None) -> Task:
    data = IMAGES, np.arange(120) % 3
    model = lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).double()  # noqa: E731
    parts = np.array_split(np.arange(120), int(config["clients.num_clients"]))
    return make_task(model=model, train=data, test=data, clients=parts, keep_dtype=True)


def test_every_field_is_sent_or_read_by_the_server() -> None:
    assert set(LocalTraining.__dataclass_fields__) == {*TRAINING_FIELDS, *SERVER_FIELDS}


@pytest.mark.parametrize(
    "algorithm", [{"algorithm": "fedbuff"}, {"algorithm": "defedavg-niid", "defedavg-niid__mode": "thrifty"}]
)
@pytest.mark.parametrize("option", ["nesterov", "adamw", "seconds", "together", "adam to rate zero"])
def test_a_job_yields_the_same_update_as_in_the_simulation(
    option: str, algorithm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a crash of the server, with every bit; the merges are those of the executor, too."""
    sent: dict[tuple[int, int], Vector] = {}
    add_update = Session.add_update

    def recorded(self: Session, client: int, index: int, values: Vector) -> None:
        sent[client, index] = values.copy()
        add_update(self, client, index, values)

    monkeypatch.setattr(Session, "add_update", recorded)
    given = {f"training__{name}": value for name, value in {"local_lr": 0.1, **OPTIONS[option]}.items()}
    world = World(tmp_path / "run", task=image_task, stop__max_rounds=10, **algorithm, **given)
    world.until(lambda: world.session.engine.server.version >= 5)
    world.crash()
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    _, found = checked(world)
    executor = make_executor(world.config.settings, world.config.seed, image_task(world.flat, None))
    for record in found.plan.rounds:
        merge = record.merge
        for update, _ in merge.updates:
            if update.steps:
                delta, _ = executor.train(update, executor.versions[update.version])
                assert torch.equal(delta, torch.from_numpy(sent[update.client, update.index]))
        executor.apply(record)
    newest = world.session.engine.server.version
    assert newest >= 9
    assert torch.equal(executor.versions[newest], world.session.executor.versions[newest])
    assert executor.version_seconds == world.session.executor.version_seconds
    assert len({message.fields["rate"] for message in world.transport.sent if message.weights is not None}) > 1 or (
        "local_schedule" not in OPTIONS[option]
    )
