"""A text task with named inputs, a record as output, lazy layers and a metric of its own in a deployment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from defedavg.deploy.local_progress import LocalProgress
from defedavg.tasks import Task, make_task
from helpers.deployments import World, agrees, checked
from helpers.text_models import CLIENTS, LABELS, SAMPLES, TEXTS, RecordOutput, TextClassifier

pytestmark = pytest.mark.usefixtures("worlds")


class Lazy(TextClassifier):
    """A text classifier with a lazy layer."""

    def __init__(self) -> None:
        super().__init__(RecordOutput)
        self.leave = nn.LazyLinear(3)


def score(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float() + 1


def text_task(config: Mapping[str, Any], client: int | None) -> Task:
    """Return the whole task on the server, and the data of one client there."""
    owners = np.arange(SAMPLES) % CLIENTS
    rows = np.arange(SAMPLES) if client is None else np.flatnonzero(owners == client)
    train = {name: part[rows] for name, part in TEXTS.items()}, LABELS[rows]
    return make_task(model=Lazy, train=train, test=(TEXTS, LABELS), clients=owners[rows], metric=score)


def test_a_deployment_of_a_text_task_agrees_with_its_replay(tmp_path: Path) -> None:
    world = World(tmp_path, task=text_task)
    world.until(lambda: world.session.engine.server.version >= 4)
    world.crash()
    world.until(lambda: world.session.finished)
    log, found = checked(world)
    agrees(world, found)
    lines = [json.loads(line) for line in world.session.files.metrics.read_text().splitlines()]
    assert {line["metric"] for line in lines} == {"score"}
    assert all(1 <= line["accuracy"] <= 2 for line in lines)
    progress = LocalProgress(CLIENTS)
    for note in log.notes("measured"):
        progress.update({"note": "measured", **note.fields})
    assert ", score 1." in str(progress)
    assert bool(torch.isfinite(world.session.executor.versions[max(world.session.executor.versions)]).all())
