"""What a log says about a deployment: in the progress line, in the live view, on the page and at /metrics."""

from __future__ import annotations

import dataclasses
import io
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from defedavg.config.settings import MAX_COUNT
from defedavg.deploy import local_progress
from defedavg.deploy.local_progress import LocalProgress, followed, progress_display
from defedavg.deploy.ports import free_port
from defedavg.deploy.server.metrics_endpoint import metrics_endpoint, metrics_text
from defedavg.deploy.transport import Message, Reply
from defedavg.errors import UserError
from defedavg.planning.plan_stats import summarise
from defedavg.report.dashboard.run_index import RunIndex
from defedavg.report.payload import payload
from defedavg.runstore.deployment_status import DeploymentMonitor, DeploymentStatus, LogTail
from defedavg.runstore.forecast import seconds_to_rounds, seconds_to_target
from defedavg.runstore.reader import read_run
from defedavg.runstore.writer import begin_run
from defedavg.training import Status
from helpers.deployments import Node, World, checked

pytestmark = pytest.mark.usefixtures("worlds")


def not_finite(node: Node, message: Message, reply: Reply) -> Reply:
    if reply.update is None:
        return reply
    return dataclasses.replace(reply, update=np.full_like(reply.update, np.nan))


def run_with_a_bad_client(folder: Path) -> World:
    """Run a deployment whose client 5 is quarantined; the server restarts once, and client 0 leaves at the end."""
    world = World(folder, connected=range(5), deploy__min_clients=5, stop__max_rounds=40)
    begin_run(world.session.files, world.config.toml)
    world.connect(5, not_finite)
    world.until(lambda: world.session.engine.links[5].quarantined)
    world.crash()
    world.until(lambda: world.session.engine.server.version >= 38)
    world.node_of(0).alive = False
    world.until(lambda: 0 not in world.session.engine.connected)
    return world


def test_the_status_agrees_with_the_replayed_plan(tmp_path: Path) -> None:
    world = run_with_a_bad_client(tmp_path)
    status = DeploymentMonitor(tmp_path).refresh()
    log, found = checked(world)
    plan = summarise(found.plan, found.fleet)
    trained = [line for line in LogTail(tmp_path).lines() if line.get("event") == "trained"]
    assert status.updates == len(trained) == sum(client.updates for client in status.clients.values())
    assert status.staleness_mean == pytest.approx(plan.staleness_mean)
    assert status.round == world.session.engine.server.version
    assert status.refused == len(found.refused) == 3
    assert status.reasons == {"the update contains values that are not finite": 3}
    assert status.connected == len(world.session.engine.connected)
    states = {client.client: client.state for client in status.clients.values()}
    assert states[5] == "quarantined"
    assert states[0] == "away"
    working = {client for client, link in enumerate(world.session.engine.links) if link.busy}
    assert {client for client, state in states.items() if state == "working"} == working
    assert status.resumed == 1
    assert log.seconds == pytest.approx(status.seconds)


def test_the_progress_line_counts_what_happened_before_a_resume_and_shows_goal_and_time_left(tmp_path: Path) -> None:
    world = World(tmp_path, stop__max_rounds=40)
    world.until(lambda: world.session.engine.server.version >= 6)
    before = LogTail(tmp_path).lines()
    tail = LogTail(tmp_path, from_end=True)
    world.crash()
    progress = LocalProgress(6, before)
    world.until(lambda: world.session.engine.server.version >= 20)
    for line in tail.lines():
        progress.update(line)
    total = sum(line.get("event") == "trained" for line in LogTail(tmp_path).lines())
    assert f", {total} updates, 6 of 6 clients connected; at most 40 rounds, about " in str(progress)
    assert str(progress).endswith(" left (max_rounds)")
    left = DeploymentMonitor(tmp_path).refresh().seconds_left()
    assert left is not None
    now = world.session.seconds
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert left[0] == pytest.approx(world.session.seconds - now, rel=0.25)  # the clients keep their pace
    away = {"note": "turned away", "t": 1.0, "who": "client 4", "node": "17", "why": "its task cannot be made: no file"}
    assert progress.update(away) == "client 4 cannot take part: its task cannot be made: no file"


@pytest.mark.parametrize("faults", [True, False])
def test_a_server_without_a_terminal_prints_lines_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: bool
) -> None:
    monkeypatch.setattr(local_progress, "STATUS_SECONDS", 0.0)
    monkeypatch.setattr(local_progress, "PROGRESS_SECONDS", 0.01)
    console = Console(file=io.StringIO(), width=200)
    with progress_display(console, 6, faults=faults) as on_line, followed(LogTail(tmp_path), on_line):
        world = run_with_a_bad_client(tmp_path)
        world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    last = world.session.progress.evaluations[-1]
    assert f"round {last.round}, {last.seconds:.0f} s, accuracy " in printed.splitlines()[-1]
    assert ("client 5 is quarantined" in printed) == faults  # otherwise the server prints it itself


def test_the_live_view_and_the_page_show_a_deployment_while_it_runs(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    world = run_with_a_bad_client(folder)
    index = RunIndex(tmp_path)
    first = index.curves("one")
    assert first is not None
    assert first["deployment"]["clients"][5]["state"] == "quarantined"
    assert first["deployment"]["reasons"] == {"the update contains values that are not finite": 3}
    assert first["deployment"]["seconds_left"] > 0
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    second = index.curves("one")
    assert second is not None
    assert second["revision"] != first["revision"]
    assert second["deployment"]["updates"] > first["deployment"]["updates"]
    assert second["deployment"]["round"] == 40
    [shown] = payload([read_run(folder)], "t")["folders"]
    assert shown["deployment"] == second["deployment"]
    json.dumps(shown, allow_nan=False)


def test_metrics_are_prometheus_text_that_follows_the_log(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.until(lambda: world.session.engine.server.version >= 2)
    port = free_port()
    with metrics_endpoint(tmp_path, "127.0.0.1", port):
        for rounds in (2, 5):
            world.until(lambda rounds=rounds: world.session.engine.server.version >= rounds)  # type: ignore[misc]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                lines = answer.read().decode().splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            assert int(values["defedavg_round"]) == world.session.engine.server.version
            assert float(values['defedavg_clients{state="idle"}']) + float(
                values['defedavg_clients{state="working"}']
            ) == len(world.session.engine.connected)
            typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
            assert typed == {name.partition("{")[0] for name in values}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/state/version-0.safetensors", timeout=30)
        with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{port} .* deploy.metrics_port"):
            metrics_endpoint(tmp_path, "127.0.0.1", port).__enter__()
    with metrics_endpoint(tmp_path, "127.0.0.1", 0) as off:
        assert off is None


def test_reasons_cannot_add_lines_to_the_metrics() -> None:
    status = DeploymentStatus()
    status.add({"settings": {"clients.num_clients": 1}})
    status.add({"event": "refused", "t": 1.0, "client": 0, "why": 'a "quoted" \\ reason\nfaked 1'})
    [line] = [line for line in metrics_text(status).splitlines() if line.startswith("defedavg_refused_by_reason")]
    assert line == 'defedavg_refused_by_reason_total{reason="a \\"quoted\\" \\\\ reason faked 1"} 1'


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
NAMES = ["joined", "left", "sent", "trained", "exchanged", "refused", "quarantined", "merge", "measured", "turned away"]
KEYS = ["t", "client", "version", "updates", "round", "seconds", "accuracy", "loss", "why", "who", "update", "settings"]


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5)), max_size=8)
)
def test_damaged_lines_are_ignored(lines: list[tuple[str, dict[str, Any]]]) -> None:
    status = DeploymentStatus()
    status.add({"settings": {"clients.num_clients": 3, "stop.max_rounds": 9}})
    for name, fields in lines:
        status.add({"event": name, **fields})
    json.dumps(status.as_dict())
    assert metrics_text(status).startswith("# HELP")


def test_the_largest_number_of_rounds_is_no_goal() -> None:
    status = DeploymentStatus()
    status.add({"settings": {"clients.num_clients": 3, "stop.max_rounds": MAX_COUNT, "stop.max_seconds": 100.0}})
    status.add({"event": "measured", "t": 40.0, "round": 8, "seconds": 40.0, "accuracy": 0.3, "loss": 1.0})
    assert status.goal_text() == "about 60 s left (max_seconds)"


@given(st.floats(0.05, 0.3), st.floats(0.0, 0.3), st.integers(8, 40), st.floats(1.0, 100.0))
def test_forecasts_are_exact_where_the_run_keeps_its_course(a: float, b: float, count: int, pace: float) -> None:
    seconds = [pace * (number + 1) for number in range(count)]
    values: list[float | None] = [b + a * float(np.log(t)) for t in seconds]
    target = b + a * float(np.log(3 * seconds[-1]))
    assert seconds_to_target(seconds, values, target) == pytest.approx(2 * seconds[-1])
    assert seconds_to_target(seconds, values, b + a * float(np.log(seconds[-1]))) == 0.0
    assert seconds_to_target(seconds, [value and -value for value in values], target) is None
    rounds = [float(number + 1) for number in range(count)]
    assert seconds_to_rounds(seconds, rounds, 2.0 * count) == pytest.approx(pace * count)
