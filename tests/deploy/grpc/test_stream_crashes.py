"""Clients and servers over gRPC that are killed or stopped, and a full disk: merged exactly once, nothing lost."""

from __future__ import annotations

import contextlib
import importlib.util
import resource
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import psutil
import pytest
import torch
from safetensors.torch import load_file

from defedavg.config.build import make_executor
from defedavg.deploy.deploy_config import read_deploy_config
from defedavg.deploy.engine.events import Joined, Left, Resumed, Trained
from defedavg.deploy.grpc import stream_server
from defedavg.deploy.grpc.local_clients import local_clients
from defedavg.deploy.tls_keys import make_keys
from defedavg.rng import key, uniform
from defedavg.runstore.layout import EVENT_LOG
from defedavg.runstore.reader import read_run
from helpers.deployments import World, agrees, checked
from helpers.stream_processes import SECONDS, STUDY, Site
from helpers.streams import CuttingProxy, StreamWorld
from helpers.user_code import TASK

pytestmark = pytest.mark.deploy

WIDE = TASK.replace("nn.Linear(4, 2)", "nn.Sequential(nn.Linear(4, 40_000), nn.Linear(40_000, 2))")
"""A model of 1.1 MB: its upload can be cut."""

STATEFUL = STUDY.replace("local_steps = 4", 'local_steps = 4\nserver_optimizer = "amsgrad"\nglobal_lr = 0.1').replace(
    "updates_per_round = 2", "updates_per_round = 1"
)


def module_of(path: Path) -> ModuleType:
    """Return a task file as a module."""
    spec = importlib.util.spec_from_file_location("site_task", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_killed_clients_late_clients_and_clients_that_return(tmp_path: Path) -> None:
    """Kill three of five clients, one in a job, one in an upload; one joins late, one returns: training continues."""
    with (
        Site(tmp_path, "defedavg-iid", 100_000, task=WIDE) as site,
        contextlib.closing(CuttingProxy(site.port, 500_000, cuts=1, hold=True)) as proxy,
    ):
        site.serve("--set", "deploy.min_clients=5")
        clients = {client: site.join(client) for client in (0, 2, 3)}
        clients[1] = site.join(1, step_seconds=600.0)
        clients[4] = site.join(4, address=proxy.address)
        site.until(lambda: any(note.fields["client"] == 1 for note in notes(site, "sent")))
        site.until(proxy.cut.is_set)
        assert not site.events(Trained, 1)
        assert not site.events(Trained, 4)
        for client in (1, 3, 4):
            clients.pop(client).kill()
        site.until_merged(2)
        clients |= {5: site.join(5), 3: site.join(3)}
        site.until(lambda: bool(site.events(Trained, 5)))
        site.until(lambda: len(site.events(Joined, 3)) == 2)
        site.until(lambda: {event.client for event in site.events(Left)} >= {1, 3, 4})
        site.until_merged(2)
        log, found = site.checked()
    assert not [event for event in log.events if isinstance(event, Trained) and event.client in (1, 4)]
    assert {update.client for r in found.plan.rounds for update, _ in r.merge.updates} <= {0, 2, 3, 5}


def notes(site: Site, name: str) -> list[Any]:
    return site.log().notes(name) if (site.run / EVENT_LOG).exists() else []


def test_a_server_with_state_vectors_is_killed_five_times_and_loses_nothing(tmp_path: Path) -> None:
    """Every client keeps its last update on the server, and the server has an optimiser.

    Every kill hits a working server: one that has resumed the run since the last kill, has merged, and is not done.
    """
    rounds, kills = 80, 5
    with Site(tmp_path, "mifa", rounds, study=STATEFUL) as site:
        server = site.serve()
        clients = [site.join(client, step_seconds=0.03) for client in range(2)]
        for number in range(kills):
            site.until_merged(1)
            time.sleep(0.3 * uniform(key(7, "crash", number)))
            server.kill()
            assert not notes(site, "done"), "the run ended before the server was killed"
            assert len(site.events(Resumed)) == number
            server = site.serve("--resume")
            site.until(lambda number=number: len(site.events(Resumed)) > number)  # type: ignore[misc]
        assert server.exit_code() == 0, site.output()
        assert [client.exit_code() for client in clients] == [0, 0], site.output()
        log, found = site.checked()
        task = module_of(site.folder / "my_task.py").make({"seed": 3}, None)
        config = read_deploy_config(log.head["settings"], stored=True)
    assert len(found.plan.rounds) == rounds
    [entry] = read_run(site.run).entries
    assert entry.status == "max_rounds"
    assert read_run(site.run).finished
    executor = make_executor(config.settings, config.seed, task)
    for record in found.plan.rounds:
        executor.apply(record)
    saved = site.run / "state"
    newest = load_file(saved / f"version-{rounds}.safetensors")["weights"]
    torch.testing.assert_close(newest, executor.versions[rounds], rtol=1e-5, atol=1e-6)
    files = {path.name.rsplit("-", 1)[0]: path for path in saved.glob("state-*.safetensors")}
    assigned = executor.state.assigned()
    assert len(files) == len(assigned) == len(list(saved.glob("state-*.safetensors")))
    for vector, value in assigned.items():
        found_value = load_file(files[f"state-{vector.name}-{vector.index}"])["state"]
        torch.testing.assert_close(found_value, value, rtol=1e-4, atol=1e-6)


def test_a_full_disk_ends_the_server_with_one_line_and_the_run_is_resumed(tmp_path: Path) -> None:
    """A limit on the size of its files refuses the writes of a running server, as a full disk does."""
    with Site(tmp_path, "defedavg-niid", 60) as site:
        server = site.serve()
        clients = [site.join(client) for client in range(2)]
        site.until(lambda: site.merges() >= 3)
        size = (site.run / EVENT_LOG).stat().st_size
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
        assert server.exit_code() == 2, site.output()
        lines = server.output.read_text().splitlines()
        assert lines[-1] == f"defedavg: runs/served/{EVENT_LOG} cannot be written: File too large"
        assert not [line for line in lines if "Traceback" in line]
        merged = len(site.checked()[1].plan.rounds)
        assert 0 < merged < 60
        server = site.serve("--resume")
        assert server.exit_code() == 0, site.output()
        assert [client.exit_code() for client in clients] == [0, 0], site.output()
        _, found = site.checked()
    assert len(found.plan.rounds) == 60
    assert read_run(site.run).finished


def test_a_client_that_stands_still_for_longer_than_the_keep_alive_leaves_and_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is in this process, with a shorter keep-alive; the clients are processes."""
    names = ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    shorter = {"grpc.keepalive_time_ms": 1000, **dict.fromkeys(names, 2000)}
    options = tuple((name, shorter.get(name, value)) for name, value in stream_server.SERVER_OPTIONS)
    monkeypatch.setattr(stream_server, "SERVER_OPTIONS", options)
    changes: dict[str, Any] = {"deploy__reconnect_seconds": 1.0, "deploy__min_clients": 2, "stop__max_rounds": 100_000}
    with Site(tmp_path, "fedbuff", 1, task=TASK.replace('int(config["seed"])', "3")) as site:
        task = module_of(site.folder / "my_task.py").make
        with StreamWorld(tmp_path / "run", tmp_path / "keys", task, algorithm="defedavg-niid", **changes) as world:
            clients = [site.join(client, step_seconds=0.05, address=world.address) for client in range(2)]
            world.coordinator.wait_for_clients()
            engine = world.session.engine
            step_until(world, lambda: engine.server.version >= 3)
            clients[1].signal(signal.SIGSTOP)
            step_until(world, lambda: 1 not in engine.connected)
            left_at = engine.server.version
            step_until(world, lambda: engine.server.version >= left_at + 3)
            assert 1 not in engine.connected
            clients[1].signal(signal.SIGCONT)
            step_until(world, lambda: 1 in engine.connected)
            returned_at = engine.server.version
            step_until(world, lambda: engine.server.version >= returned_at + 3)
            log, found = checked(cast(World, world))
            agrees(cast(World, world), found)
    assert 1 in {event.client for event in log.events if isinstance(event, Left)}
    assert [event.client for event in log.events if isinstance(event, Joined)].count(1) >= 2
    senders = [{update.client for update, _ in record.merge.updates} for record in found.plan.rounds]
    assert 1 not in set().union(*senders[left_at:returned_at])
    assert 1 in set().union(*senders[returned_at:])


def test_clients_that_are_not_forked_train_and_end_with_their_command(tmp_path: Path) -> None:
    """As on macOS, where a process that has loaded PyTorch must not fork."""
    make_keys(tmp_path / "keys", 6, ("127.0.0.1",))
    task = tmp_path / "my_task.py"
    task.write_text(TASK.replace('int(config["seed"])', "3"))
    changes: dict[str, Any] = {"deploy__min_clients": 2, "stop__max_rounds": 100_000}
    with StreamWorld(tmp_path / "run", tmp_path / "keys", module_of(task).make, **changes) as world:
        with local_clients() as clients:
            clients.prepare(
                {
                    "settings": world.flat, "task": f"{task}:make", "sys_path": [], "keys": str(tmp_path / "keys"),
                    "clients": [[0, 0.01], [1, 0.01]], "log": str(tmp_path / "clients.log"), "fork": False,
                }
            )  # fmt: skip
            clients.start(world.address)
            world.coordinator.wait_for_clients()
            step_until(world, lambda: world.session.engine.server.version >= 5)
            processes = psutil.Process(clients._process.pid).children()
            assert len(processes) == 2
        assert not psutil.wait_procs(processes, timeout=SECONDS)[1]
        _, found = checked(cast(World, world))
    assert {update.client for record in found.plan.rounds for update, _ in record.merge.updates} == {0, 1}


def step_until(world: StreamWorld, condition: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, world.log_lines[-5:]
        if not world.coordinator.step():
            world.transport.wait(0.05)
