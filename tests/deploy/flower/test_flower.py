"""Deployments with real SuperLink and SuperNode processes on this machine; ``make test-deploy`` runs all of them."""

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
import torch

from defedavg.config.build import build_task, make_executor
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.events import Joined, Left, Refused, Resumed, Trained
from defedavg.deploy.flower.app_template import default_settings, write_app
from defedavg.deploy.flower.processes import TlsFiles
from defedavg.deploy.replay import replay
from defedavg.deploy.tls_keys import make_keys
from defedavg.errors import UserError
from defedavg.rng import key, uniform
from defedavg.runstore.deployment_status import LogTail
from defedavg.runstore.layout import EVENT_LOG as LOG
from helpers.flower_processes import TASK, CutProxy, Deployment

deploy = pytest.mark.deploy


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
def test_six_uneven_clients_learn_digits_with_defedavg_iid(tmp_path: Path) -> None:
    with Deployment(
        tmp_path, own_task=False, clients=6, training__updates_per_round=3, training__local_steps=100,
        clients__step_seconds=0.01, stop__target_accuracy=0.9, stop__max_rounds=100,
    ) as run:  # fmt: skip
        run.start_nodes()
        run.submit()
        entry = run.finish()
    assert entry["status"] == "target", entry
    assert entry["final_accuracy"] >= 0.9
    _, found = run.checked()
    executor = make_executor(run.config.settings, run.config.seed, build_task(run.config.settings, run.config.seed))
    weights = executor.versions[0]
    for record in found.plan.rounds:
        weights = executor.apply(record)
    from safetensors.torch import load_file

    saved = load_file(run.folder / "state" / f"version-{len(found.plan.rounds)}.safetensors")["weights"]
    torch.testing.assert_close(weights, saved, rtol=1e-4, atol=1e-5)


@deploy
def test_six_uneven_clients_of_two_classes_learn_digits_with_defedavg_niid(tmp_path: Path) -> None:
    with Deployment(
        tmp_path, own_task=False, algorithm="defedavg-niid", clients=6, task__split="classes",
        training__updates_per_round=24, training__local_steps=30, training__local_lr=0.1, stop__target_accuracy=0.8,
        stop__max_rounds=100, stop__max_seconds=400.0,
    ) as run:  # fmt: skip
        run.start_nodes()
        run.submit()
        entry = run.finish()
    assert entry["status"] == "target", entry
    assert entry["final_accuracy"] >= 0.8
    _, found = run.checked()
    assert sum(job.outcome == "ended" for job in found.plan.jobs) > 0


@deploy
def test_favano_interrupts_over_flower(tmp_path: Path) -> None:
    with Deployment(
        tmp_path, algorithm="favano", clients=3, favano__wait_seconds=1.0, stop__max_rounds=2, clients__step_seconds=2.0
    ) as run:
        run.start_nodes()
        run.submit()
        entry = run.finish()
    assert entry["status"] == "max_rounds"
    _, found = run.checked()
    assert any(job.outcome == "interrupted" for job in found.plan.jobs)


@deploy
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
    [pytest.param(False, 3, 8, id="server"), pytest.param(True, 2, 6, id="link and server")],
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
def test_tls_admits_authenticated_nodes_only(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 3, ("127.0.0.1",))
    make_keys(tmp_path / "others", 1, ("127.0.0.1",))
    keys = tmp_path / "keys"
    tls = TlsFiles(keys / "ca.crt", keys / "server.crt", keys / "server.key")
    with Deployment(
        tmp_path, tls=tls, clients=4, deploy__min_clients=2, stop__max_rounds=2, training__updates_per_round=2
    ) as run:
        for client in range(2):
            done = run.cluster.flwr("supernode", "register", str(keys / f"client-{client}.pub"), "local")
            assert done.returncode == 0, done.stdout + done.stderr
            run.cluster.start_supernode(str(client), key=keys / f"client-{client}.key", client=client, warm=True)
        run.cluster.start_supernode(
            "unknown", key=keys / "client-2.key", client=2, warm=True
        )  # its key is not registered
        run.cluster.start_supernode("keyless", client=2, warm=True)
        wrong = (
            tmp_path / "others" / "ca.crt"
        )  # the CA of another deployment, which did not sign the server's certificate
        run.cluster.start_supernode("deceived", key=keys / "client-1.key", ca=wrong, client=3, warm=True)
        run.submit()
        entry = run.finish()
    assert entry["status"] == "max_rounds"
    log, _ = run.checked()
    assert {event.client for event in log.events if isinstance(event, Joined)} == {0, 1}
    assert not [event for event in log.events if isinstance(event, Refused)]


@deploy
def test_missing_clients_and_wrong_models_yield_one_line(tmp_path: Path) -> None:
    with Deployment(tmp_path, clients=3, deploy__wait_seconds=25.0) as run:
        text = (run.app / "app" / "task.py").read_text()
        (run.app / "app" / "task.py").write_text(text.replace("width = 2", "width = 3 if client == 1 else 2"))
        run.start_nodes([0, 1])
        run.submit()
        with pytest.raises(
            UserError, match=r"1 of the 3 clients expected connected within 25 s \(client 1: its model differs"
        ):
            run.finish()


BAD_CLIENTS = '''"""Clients 1, 2 and 3 send bad updates: NaN, another shape, a wrong job."""

import numpy as np
from flwr.app import ConfigRecord
from flwr.clientapp import ClientApp

from defedavg.deploy.flower.client_entry import client_number, handle
from defedavg.deploy.flower.vector_record import read_vector, vector_record

app = ClientApp()


def answer(message, context):
    reply = handle("app.task:make", message, context)
    client = client_number(context)
    if "update" not in reply.content:
        return reply
    values = read_vector(reply.content["update"])
    if client == 1:
        reply.content["update"] = vector_record(np.full_like(values, np.nan))
    elif client == 2:
        reply.content["update"] = vector_record(values[:-1])
    elif client == 3:
        reply.content["fields"] = ConfigRecord({**reply.content["fields"], "index": 10**6})
    return reply


app.query()(answer)
app.train()(answer)
'''


@deploy
def test_bad_clients_are_quarantined_while_the_others_train(tmp_path: Path) -> None:
    with Deployment(tmp_path, clients=4, stop__max_rounds=100) as run:
        (run.app / "app" / "client.py").write_text(BAD_CLIENTS)
        run.start_nodes()
        run.submit()
        run.until("the quarantine of three", lambda: len(run.seen("quarantined")) == 3)
        before = run.version()
        run.until("a merge without them", lambda: run.version() > before)
    log, found = run.checked()
    assert set(found.quarantined) == {1, 2, 3}
    reasons = {event.client: event.why for event in log.events if isinstance(event, Refused)}
    assert "finite" in reasons[1]
    assert "shape" in reasons[2]
    assert "job 1000000" in reasons[3]
    assert {u.client for r in found.plan.rounds for u, _ in r.merge.updates} == {0}


def _command(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "defedavg", *words], cwd=folder, stdout=-1, stderr=-1, text=True, start_new_session=True
    )


@deploy
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
