"""Algorithms with state in deployments: starts of jobs, notes of merges, replays, weights by samples, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from defedavg.algorithms import ALGORITHMS, ServerMachine
from defedavg.algorithms.protocol import ClientPolicy, Update
from defedavg.config.build import make_executor, make_setup
from defedavg.deploy.deploy_config import read_deploy_config
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.replay import replay
from defedavg.deploy.transport import Message, Reply
from defedavg.deploy.whatif import whatif_plans
from defedavg.errors import UserError
from defedavg.planning.plan import Plan
from defedavg.runstore.layout import EVENT_LOG as LOG
from defedavg.tasks import Task
from defedavg.training import Status
from helpers.deployments import FLAT, World, agrees, checked, tiny_task
from helpers.state_algorithms import OwnModels, RestartsStale, registered

pytestmark = pytest.mark.usefixtures("worlds", "_algorithms")

STATEFUL: list[dict[str, Any]] = [
    {"algorithm": "mifa"},
    {"algorithm": "own-models"},
    {"algorithm": "area"},
    {"algorithm": "fadas", "training__global_lr": 0.01},
    {"algorithm": "fedbuff", "training__server_optimizer": "amsgrad"},
]


@pytest.fixture
def _algorithms() -> Iterator[None]:
    with registered(OwnModels, RestartsStale):
        yield


def uneven_task(config: Any, client: int | None) -> Task:
    """Return the tiny task with clients of 10, 20, … samples."""
    import dataclasses

    parts = np.split(np.arange(210), np.cumsum([10, 20, 30, 40, 50]))
    return dataclasses.replace(tiny_task(config, client), clients=tuple(parts))


@pytest.mark.parametrize("changes", STATEFUL, ids=lambda c: c["algorithm"])
def test_the_executor_computes_the_deployed_versions_exactly(changes: dict[str, Any], tmp_path: Path) -> None:
    world = World(tmp_path / "run", **changes)
    versions: dict[int, torch.Tensor] = {}
    while world.session.progress.status is Status.RUNNING:
        seen = world.session.engine.server.version
        world.until(lambda seen=seen: world.session.engine.server.version > seen or world.session.finished)  # type: ignore[misc]
        versions |= {version: weights.clone() for version, weights in world.session.executor.versions.items()}
        world.until(lambda: True)
    _, found = checked(world)
    assert found.plan.header.state == ALGORITHMS[changes["algorithm"]].state_vectors(
        world.session.engine.server.setup, world.config.settings.algorithm_settings
    )
    path = tmp_path / "plan.jsonl.gz"
    found.plan.save(path)
    executor = make_executor(world.config.settings, world.config.seed, tiny_task(world.flat, None))
    for record in Plan.load(path).rounds:
        assert torch.equal(executor.apply(record), versions[record.merge.version])
    for vector, value in executor.state.assigned().items():
        assert torch.equal(value, world.session.executor.state.assigned()[vector])


def test_jobs_start_from_the_vectors_of_their_clients(tmp_path: Path) -> None:
    world = World(tmp_path / "run", algorithm="own-models")
    executor = world.session.executor
    push, starts = world.transport.push, 0

    def checked_push(messages: list[Message]) -> list[str]:
        nonlocal starts
        for message in messages:
            if message.kind == "train":
                client, version = int(message.fields["client"]), int(message.fields["version"])
                expected = executor.start_of(Update(client, 0, version, 0))
                assert np.array_equal(message.weights, expected.numpy())  # type: ignore[arg-type]
                starts += not torch.equal(expected, executor.versions[version])
        return push(messages)

    world.transport.push = checked_push  # type: ignore[assignment,method-assign]
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert starts > 6
    _, found = checked(world)
    assert found.plan.header.job_start == OwnModels.job_start
    agrees(world, found)


def test_the_bound_of_an_update_is_that_of_its_start(tmp_path: Path) -> None:
    """A client whose model is a hundred times larger than the version may send an update as large."""
    world = World(tmp_path / "run", algorithm="own-models", deploy__norm_bound=1.0, stop__max_rounds=20)
    world.until(lambda: world.session.engine.server.version >= 2)
    version = world.session.engine.server.version
    norm = float(np.linalg.norm(world.session.vector(version)))
    state = world.session.executor.state
    from defedavg.algorithms.protocol import StateVector

    state[StateVector("model", 5)] = 100.0 * world.session.executor.versions[version]
    start = world.session.start(5, version)
    assert float(np.linalg.norm(start)) > 40 * max(1.0, norm)
    from defedavg.deploy.server.reply_checks import BadReplyError, update_values

    large = Reply("m", {}, np.full_like(start, 30.0 * max(1.0, norm) / np.sqrt(start.size)))
    assert update_values(large, start, 1.0, {}) is large.update
    with pytest.raises(BadReplyError, match="norm"):
        update_values(large, world.session.vector(version), 1.0, {})


@pytest.mark.parametrize("changes", STATEFUL[:2], ids=lambda c: c["algorithm"])
def test_the_notes_of_merges_name_state_vectors_and_a_replay_compares_them(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    world = World(tmp_path / "run", **changes)
    world.coordinator.run()
    path = tmp_path / "run" / LOG
    rows = path.read_text().splitlines()
    merges = [number for number, row in enumerate(rows) if '"note":"merge"' in row]
    noted = json.loads(rows[merges[2]])
    assert noted["extension"].keys() & {"before", "after"}
    replay(logs.read(path))
    noted["extension"]["states"][0][2] *= 2.0
    rows[merges[2]] = json.dumps(noted, separators=(",", ":"))
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(UserError, match=r"the log is inconsistent: at .* it contains merge number 2"):
        replay(logs.read(path))


def test_notes_of_merges_without_state_are_those_of_earlier_versions(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    world.coordinator.run()
    merges = logs.read(tmp_path / "run" / LOG).notes("merge")
    assert {tuple(note.fields) for note in merges} == {("version", "past", "updates", "freed")}


@pytest.mark.parametrize("algorithm", ["defedavg-iid", "asysg"])
@pytest.mark.parametrize("upload", ["auto", "blocking"])
def test_uploads_of_a_deployment_and_of_its_what_if_plans_are_blocking(
    algorithm: str, upload: str, tmp_path: Path
) -> None:
    world = World(tmp_path / "run", algorithm=algorithm, clients__upload=upload)
    world.coordinator.run()
    assert not world.session.engine.policy.background_upload
    _, found = checked(world)
    plans, _ = whatif_plans(found, ("updates_per_round=1,3",), 20)
    for plan in (found.plan, *(plan for _, plan in plans)):
        ends = {(upload.client, upload.index): upload.end for upload in plan.uploads}
        earlier = [(job.start, ends[job.client, job.index - 1]) for job in plan.jobs if job.index]
        assert len(earlier) > 5
        assert all(start >= end for start, end in earlier)


def test_a_deployment_refuses_background_uploads_where_they_would_matter() -> None:
    def read(algorithm: str, **own: Any) -> Any:
        return read_deploy_config({"algorithm": algorithm, "clients.upload": "background", **own})

    for name in ("defedavg-iid", "asysg"):
        with pytest.raises(UserError, match=r"a client is occupied until its reply has arrived; remove it, or set it"):
            read(name)
    assert read("fedbuff").settings.clients.upload == "background"
    assert read("asysg", **{"asysg.concurrency": 3}).settings.clients.upload == "background"


def test_a_deployment_of_asysg_with_a_concurrency_replays(tmp_path: Path) -> None:
    world = World(tmp_path / "run", algorithm="asysg", asysg__concurrency=2)
    world.coordinator.run()
    _, found = checked(world)
    agrees(world, found)


def test_what_if_plans_of_algorithms_with_state(tmp_path: Path) -> None:
    world = World(tmp_path / "run", algorithm="mifa")
    world.coordinator.run()
    found = replay(logs.read(tmp_path / "run" / LOG))
    names = "mifa", "own-models", "fedbuff", "restarts-stale"
    plans, impossible = whatif_plans(found, (f"algorithm={','.join(names)}", "updates_per_round=1,3"), 10)
    assert not impossible
    assert len(plans) == 2 * len(names)
    assert all(len(plan.rounds) == 10 for _, plan in plans)


# Updates weighted by samples.


def test_a_deployment_weights_updates_by_the_samples_of_its_own_task(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"algorithm": "fedavg", "fedavg__replacement": False, "training__weighting": "samples"}
    world = World(tmp_path / "run", task=uneven_task, **changes)
    world.until(lambda: world.session.engine.server.version >= 3)
    world.crash()
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    log, found = checked(world)
    shares = [count / 210 for count in (10, 20, 30, 40, 50, 60)]
    assert log.head["shares"] == shares
    for record in found.plan.rounds:
        total = sum(shares[update.client] for update, _ in record.merge.updates)
        for update, weight in record.merge.updates:
            assert weight == pytest.approx(-shares[update.client] / total)
    agrees(world, found)
    plans, _ = whatif_plans(found, ("algorithm=fedbuff",), 5)
    assert len({weight for record in plans[0][1].rounds for _, weight in record.merge.updates}) > 2


@pytest.mark.parametrize("shares", [None, [1.0], [0.5, 0.5, 0, 0, 0, "x"], [-1, 2, 0, 0, 0, 0], [0.1] * 6, {}])
def test_a_log_without_valid_shares_is_refused_in_one_line(shares: Any, tmp_path: Path) -> None:
    world = World(tmp_path / "run", algorithm="fedavg", training__weighting="samples")
    world.coordinator.run()
    path = tmp_path / "run" / LOG
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(head), "shares": shares}), *rows]) + "\n")
    with pytest.raises(UserError, match=r"^the log .* cannot be used$"):
        replay(logs.read(path))


def test_the_setup_of_a_deployment_is_that_of_the_simulation(tmp_path: Path) -> None:
    for algorithm in ("mifa", "own-models", "restarts-stale", "fedbuff", "asysg"):
        world = World(tmp_path / algorithm, algorithm=algorithm)
        setup = world.session.engine.server.setup
        assert setup == make_setup(world.config.settings, world.config.seed, setup.timeout_seconds)


# Algorithms that a deployment cannot run.


class Corrected(OwnModels):
    """Corrects gradients."""

    name = "corrected"
    correction = (("model", 1.0),)


class RestartsUnrequested(RestartsStale):
    """Restarts clients that send updates unrequested."""

    name = "restarts-unrequested"
    policy = ClientPolicy(restart_on_model=True)


@pytest.mark.parametrize(
    ("kind", "words"), [(Corrected, "corrects the gradients"), (RestartsUnrequested, "hold_until_requested=True")]
)
def test_what_a_deployment_cannot_run_is_refused_before_it_starts(kind: type[ServerMachine], words: str) -> None:
    with registered(kind), pytest.raises(UserError, match=words) as raised:
        read_deploy_config({**FLAT, "algorithm": kind.name})
    assert "\n" not in str(raised.value)
