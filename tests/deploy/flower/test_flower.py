"""Flower's transport, with real SuperLink and SuperNode processes; ``make test-flower`` runs all of these tests.

What the engine does is tested over gRPC, where a message costs milliseconds instead of seconds.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from defedavg.deploy.deploy_config import default_settings
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.events import Joined, Left, Refused, Resumed, Trained
from defedavg.deploy.flower.app_template import write_app
from defedavg.deploy.flower.processes import TlsFiles
from defedavg.deploy.replay import replay
from defedavg.deploy.tls_keys import make_keys
from defedavg.errors import UserError
from defedavg.rng import key, uniform
from defedavg.runstore.deployment_status import LogTail
from defedavg.runstore.layout import EVENT_LOG as LOG
from helpers.flower_processes import TASK, CutProxy, Deployment

deploy, long = pytest.mark.deploy, pytest.mark.long


def test_three_clients_train_over_flower(tmp_path: Path) -> None:
    with Deployment(tmp_path, clients=3, stop__max_rounds=3) as run:
        run.start_nodes()
        run.submit()
        entry = run.finish()
    assert entry["status"] == "max_rounds"
    assert entry["best_accuracy"] > 0.6
    log, found = run.checked()
    assert len(found.plan.rounds) == 3
    assert found.measured_clients == (0, 1, 2)
    assert {path.name for path in run.folder.iterdir()} >= {"config.toml", "metrics.jsonl", "summary.json", "plans"}
    assert log.seconds > 0


@deploy
@long
def test_killed_nodes_late_nodes_and_nodes_that_return(tmp_path: Path) -> None:
    """Kill three of six nodes at once, one in a job, one in an upload; one joins late, one returns: training continues.

    The model is large enough that its upload can be cut: a node is killed when the SuperLink has received a part of it.
    """
    slow = 2.5  # seconds for a step of client 1: its job takes 25
    with Deployment(
        tmp_path, clients=6, deploy__min_clients=5, deploy__job_seconds=30.0, stop__max_rounds=100,
        training__updates_per_round=2,
    ) as run, contextlib.closing(CutProxy(run.cluster.port)) as proxy:  # fmt: skip
        text = (run.app / "app" / "task.py").read_text()
        wide = "nn.Sequential(nn.Linear(20, 4000), nn.ReLU(), nn.Linear(4000, width))"
        (run.app / "app" / "task.py").write_text(text.replace("nn.Linear(20, width)", wide))
        run.start_nodes([0, 2, 3])
        run.cluster.start_supernode("1", client=1, step_seconds=slow, warm=True)
        run.cluster.start_supernode("4", superlink=proxy.address, client=4, step_seconds=0.02, warm=True)
        run.submit()
        run.until("an upload of client 4 is half done", proxy.stuck.is_set)
        run.until("client 1 is in its job", lambda: run.has_job(1))
        assert not [line for line in run.seen("trained") if line["client"] in (1, 4)]
        for name in ("1", "3", "4"):
            node = run.cluster.supernodes.pop(name)
            node.kill()  # its helper processes notice that and end
            node.wait()
        assert proxy.passed > 0
        assert proxy.held > 0
        before = run.version()
        run.until("merges after three were killed", lambda: run.version() >= before + 2)
        run.start_nodes([5, 3])
        run.until("a late node", lambda: any(line["client"] == 5 for line in run.seen("trained")))
        run.until("a node that returns", lambda: sum(line["client"] == 3 for line in run.seen("joined")) == 2)
        run.until("the loss of the others", lambda: {line["client"] for line in run.seen("left")} >= {1, 3, 4})
        before = run.version()
        run.until("a merge after all that", lambda: run.version() > before)
    log, found = run.checked()
    assert {event.client for event in log.events if isinstance(event, Left)} >= {1, 3, 4}
    assert not [event for event in log.events if isinstance(event, Trained) and event.client in (1, 4)]
    assert {u.client for r in found.plan.rounds for u, _ in r.merge.updates} <= {0, 2, 3, 5}


@deploy
@pytest.mark.parametrize(
    ("link", "kills", "rounds"),
    [
        pytest.param(True, 1, 3, id="link and server"),
        pytest.param(True, 2, 6, id="link and server, twice", marks=long),
        pytest.param(False, 3, 8, id="server, three times", marks=long),
    ],
)
def test_servers_and_links_are_killed_at_random_moments_and_resumed(
    tmp_path: Path, link: bool, kills: int, rounds: int
) -> None:
    """Kill the ServerApp, alone or with the SuperLink, several times; the run still reaches its last round.

    Every kill hits a working server: one that has resumed the run since the last kill, has merged, and is not done.
    """
    with Deployment(tmp_path, clients=2, database=link, stop__max_rounds=rounds, stop__max_seconds=600.0) as run:
        run.start_nodes()
        run.submit()
        for number in range(kills):
            begun, version = len(run.seen("resumed")), run.version()
            run.until("a merge by this server", lambda version=version: run.version() > version)  # type: ignore[misc]
            time.sleep(1.5 * uniform(key(7, "crash", link, number)))
            assert run.cluster.pids("flwr-serverapp")
            if link:
                assert run.cluster.superlink is not None
                run.cluster.superlink.kill()
                run.cluster.superlink.wait()
            run.kill("flwr-serverapp")
            run.read()
            assert not run.seen("done"), "the run ended before the server was killed"
            assert len(run.seen("resumed")) == begun
            if link:
                run.cluster.start_superlink()
            run.submit(resume=True)
            run.until("the server is back", lambda begun=begun: len(run.seen("resumed")) > begun)  # type: ignore[misc]
        entry = run.finish()
    assert entry["status"] == "max_rounds"
    assert entry["best_accuracy"] > 0.8
    log, found = run.checked()
    assert len(found.plan.rounds) == rounds
    assert sum(isinstance(event, Resumed) for event in log.events) == kills


@deploy
def test_missing_clients_wrong_models_and_nodes_without_a_registered_key(tmp_path: Path) -> None:
    """The first run has no node. In the second one, two of six nodes may take part.

    The node with another model connects alone, and the others start when the log says why it cannot take part.
    """
    make_keys(tmp_path / "keys", 4, ("127.0.0.1",))
    make_keys(tmp_path / "others", 1, ("127.0.0.1",))
    keys = tmp_path / "keys"
    tls = TlsFiles(keys / "ca.crt", keys / "server.crt", keys / "server.key")
    with Deployment(
        tmp_path, tls=tls, clients=5, deploy__min_clients=2, deploy__wait_seconds=600.0, stop__max_rounds=1,
        training__updates_per_round=2,
    ) as run:  # fmt: skip
        text = (run.app / "app" / "task.py").read_text()
        (run.app / "app" / "task.py").write_text(text.replace("width = 2", "width = 3 if client == 2 else 2"))
        run.submit(deploy__wait_seconds=1.0)
        with pytest.raises(UserError, match="0 of the 2 clients expected connected within 1 s; start the others"):
            run.finish()
        run.use_folder(tmp_path / "second")
        for client in range(3):
            done = run.cluster.flwr("supernode", "register", str(keys / f"client-{client}.pub"), "local")
            assert done.returncode == 0, done.stdout + done.stderr
        run.cluster.start_supernode("2", key=keys / "client-2.key", client=2, warm=True)
        run.submit()
        run.until("client 2 is turned away", lambda: bool(run.seen("turned away")))
        run.cluster.start_supernode("unknown", key=keys / "client-3.key", client=3, warm=True)  # it is not registered
        run.cluster.start_supernode("keyless", client=3, warm=True)
        wrong = tmp_path / "others" / "ca.crt"  # the CA of another deployment, which did not sign the certificate
        run.cluster.start_supernode("deceived", key=keys / "client-1.key", ca=wrong, client=4, warm=True)
        for client in range(2):
            run.cluster.start_supernode(str(client), key=keys / f"client-{client}.key", client=client, warm=True)
        entry = run.finish()
    assert entry["status"] == "max_rounds"
    log, _ = run.checked()
    assert {event.client for event in log.events if isinstance(event, Joined)} == {0, 1}
    assert not [event for event in log.events if isinstance(event, Refused)]
    [note] = log.notes("turned away")
    assert note.fields["who"] == "client 2"
    assert "its model differs from the server's" in note.fields["why"]


def _command(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "defedavg", *words], cwd=folder, stdout=-1, stderr=-1, text=True, start_new_session=True
    )


@deploy
@long
def test_a_local_deployment_is_resumed_after_ctrl_c_and_after_a_kill_of_its_command(tmp_path: Path) -> None:
    """Run the commands as a user does: an app with an own task, Ctrl-C, --resume, kill -9, --resume to the end.

    The killed command leaves all its processes, which train on; the last command ends them before it starts its own.
    """
    flat = {**default_settings(clients=2), "training.local_steps": 10, "training.updates_per_round": 1}
    write_app(tmp_path / "own", flat)
    (tmp_path / "own" / "own" / "task.py").write_text(TASK)
    folder = tmp_path / "runs" / "deployment"
    rounds, tail = 12, LogTail(folder)
    local = ("deploy", "local", "--transport", "flower", "--app", "own")
    first = _command(tmp_path, *local, "--set", f"stop.max_rounds={rounds}")
    _until_a_merge(first, tail)
    first.send_signal(signal.SIGINT)
    _, stderr = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "defedavg deploy local --name deployment --resume" in stderr
    assert _started_in(folder) == []
    assert len(logs.read(folder / LOG).notes("merge")) < rounds

    tail.lines()
    second = _command(tmp_path, "deploy", "local", "--resume")
    _until_a_merge(second, tail)
    second.kill()
    second.communicate(timeout=60)
    assert len(_started_in(folder)) > 3
    third = _command(tmp_path, "deploy", "local", "--resume", "--json")
    stdout, stderr = third.communicate(timeout=300)
    assert third.returncode == 0, stderr
    assert "processes of a killed command that still used runs/deployment" in stderr
    [entry] = json.loads(stdout)
    assert (entry["status"], entry["rounds"]) == ("max_rounds", rounds)
    assert _started_in(folder) == []
    log = logs.read(folder / LOG)
    found = replay(log)
    found.plan.check()
    assert len(found.plan.rounds) == rounds
    assert sum(isinstance(event, Resumed) for event in log.events) == 2
    assert (folder / "report.html").stat().st_size > 1000
    for words in (("report", "runs/deployment", "--png"), ("runs", "remove", "deployment", "--yes")):
        done = _command(tmp_path, *words)
        stdout, stderr = done.communicate(timeout=60)
        assert done.returncode == 0, stderr
    assert not folder.exists()


def _until_a_merge(command: subprocess.Popen[str], tail: LogTail) -> None:
    deadline = time.monotonic() + 150.0
    while not any(line.get("note") == "merge" for line in tail.lines()):
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _started_in(folder: Path) -> list[str]:
    """Return the command lines of all processes that a deployment in this folder has left."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("FLWR_HOME") == str(folder / "flower"):
                found.append(" ".join(process.cmdline()))
    return found
