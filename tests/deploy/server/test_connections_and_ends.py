"""Who may be a client, and how a deployment ends: stalled and resumable, or finished with all its files."""

from __future__ import annotations

import dataclasses
import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.events import Joined
from defedavg.deploy.flower.server_entry import serve
from defedavg.deploy.local_progress import followed, progress_display
from defedavg.deploy.replay import replay
from defedavg.deploy.server import coordinator
from defedavg.deploy.server.deployment_folder import StalledError, finish
from defedavg.deploy.transport import Message, Reply
from defedavg.errors import UserError
from defedavg.report import page
from defedavg.runstore.deployment_status import LogTail
from defedavg.runstore.reader import read_run
from defedavg.runstore.writer import begin_run
from defedavg.training import Status
from helpers.background_clients import RealClock
from helpers.deployments import Node, World, checked, tiny_task

pytestmark = pytest.mark.usefixtures("worlds")


def test_a_second_node_that_claims_a_client_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path / "run", stop__max_rounds=60)
    world.until(lambda: world.session.engine.server.version >= 2)
    first_node = next(node for node, member in world.transport.members.items() if member.handler.client == 2)
    second = world.connect(2, delay=0.1)
    world.until(lambda: any("client 2 cannot take part: another node" in line for line in world.log_lines))
    before = world.session.engine.server.version
    world.until(lambda: world.session.engine.server.version >= before + 3)
    assert world.session.engine.links[2].node == str(first_node)
    world.transport.members[first_node].alive = False
    world.until(lambda: world.session.engine.links[2].node == str(second))
    world.transport.members[second].alive = False  # the impostor is gone; the honest client returns
    world.transport.members[first_node].alive = True
    world.until(lambda: world.session.engine.links[2].node == str(first_node))
    log, _ = checked(world)
    joined = [event.node for event in log.events if isinstance(event, Joined) and event.client == 2]
    assert joined == [str(first_node), str(second), str(first_node)]
    assert all(note.fields["who"] == "client 2" for note in log.notes("turned away"))


def test_a_node_cannot_be_a_client_that_belongs_to_another_node(tmp_path: Path) -> None:
    nodes = ",".join(str(node) for node in range(101, 107))
    world = World(tmp_path / "run", connected=range(5), deploy__nodes=nodes, deploy__min_clients=4)
    world.transport.members[101].alive = False
    impostor = world.connect(0)  # node 106, which belongs to client 5
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    log, _ = checked(world)
    assert {int(event.node) for event in log.events if isinstance(event, Joined)} == {102, 103, 104, 105}
    assert f"to node 101, not to node {impostor}" in log.notes("turned away")[0].fields["why"]
    for wrong in ("1,2", "1,1,2,3,4,5", "1,2,3,4,5,x"):
        with pytest.raises(UserError, match=r"deploy\.nodes"):
            World(tmp_path / "other", deploy__nodes=wrong)


def test_a_client_whose_task_cannot_be_made_is_named_with_its_own_message(tmp_path: Path) -> None:
    def failing(node: Node, message: Message, reply: Reply) -> Reply:
        return dataclasses.replace(reply, fields={"client": 4, "error": "FileNotFoundError: my/data.csv"})

    world = World(tmp_path / "run", connected=range(4), deploy__min_clients=4)
    world.connect(4, failing)
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    line = "client 4 cannot take part: its task cannot be made: FileNotFoundError: my/data.csv"
    assert line in world.log_lines
    [note] = checked(world)[0].notes("turned away")
    assert (note.t, note.fields["who"]) == (0.0, "client 4")  # before the first version was sent


def test_a_run_without_clients_stalls_after_the_wait_and_can_be_resumed(tmp_path: Path) -> None:
    world = World(tmp_path / "run", deploy__wait_seconds=20.0)
    begin_run(world.session.files, world.config.toml)
    world.until(lambda: world.session.engine.server.version >= 1)
    for client in range(6):
        world.node_of(client).alive = False
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert str(world.session.progress.status) == "stalled"
    before = world.session.engine.server.version
    with pytest.raises(StalledError, match=rf"stalled after round {before}: no client .* for 20 s; .* resume"):
        finish(world.session, world.log_lines.append)
    found = read_run(tmp_path / "run")
    assert not found.finished
    assert [(entry.status, entry.numbers["rounds"]) for entry in found.entries] == [("stalled", before)]
    checked(world)

    for client in range(6):
        world.node_of(client).alive = True
    world.crash()
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    assert world.session.progress.status is Status.ROUNDS
    _, replayed = checked(world)
    assert len(replayed.plan.rounds) == 8
    finish(world.session, world.log_lines.append)
    found = read_run(tmp_path / "run")
    assert found.finished
    assert [entry.status for entry in found.entries] == ["max_rounds"]


def test_the_real_time_of_a_resumed_run_is_that_of_all_its_servers(tmp_path: Path) -> None:
    world = World(tmp_path / "run", stop__max_rounds=6)
    begin_run(world.session.files, world.config.toml)
    world.until(lambda: world.session.engine.server.version >= 2)
    time.sleep(0.4)  # longer than the second server needs for the rest
    world.until(lambda: world.session.engine.server.version >= 3)
    world.crash()
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    finish(world.session, world.log_lines.append)
    log = checked(world)[0]
    spent = [note.fields["wall_seconds"] for note in log.notes("measured")]
    assert len(spent) == 7
    assert spent == sorted(spent)
    (entry,) = read_run(tmp_path / "run").entries
    assert entry.numbers["wall_seconds"] >= spent[-1] > 0.4


def test_a_run_counts_as_finished_when_its_page_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "run", stop__max_rounds=2)
    begin_run(world.session.files, world.config.toml)
    world.until(lambda: world.session.progress.status is not Status.RUNNING)
    seen: list[bool] = []
    real = page.write

    def observed(*words: Any) -> int:
        seen.append(read_run(tmp_path / "run").finished)
        return real(*words)

    monkeypatch.setattr(page, "write", observed)
    finish(world.session, world.log_lines.append)
    assert seen == [False]
    assert read_run(tmp_path / "run").finished
    data = (tmp_path / "run" / "report.html").read_bytes()
    assert b'"finished":true' in data
    assert b'"ended":"max_rounds"' in data
    assert b'"clock":"seconds of the deployment"' in data
    assert b"simulated seconds to" not in data
    with pytest.raises(UserError, match="is finished"):
        world.crash()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize("faults", [True, False])
def test_a_page_that_does_not_fit_on_the_disk_is_one_line_on_the_terminal(tmp_path: Path, faults: bool) -> None:
    folder = tmp_path / "run"
    console = Console(file=io.StringIO(), width=80)
    with progress_display(console, 6, faults=faults) as on_line, followed(LogTail(folder), on_line):
        world = World(folder, stop__max_rounds=2)
        begin_run(world.session.files, world.config.toml)
        world.until(lambda: world.session.progress.status is not Status.RUNNING)
        (folder / "report.html").symlink_to("/dev/full")
        finish(world.session, world.log_lines.append)
    expected = (
        f"there is no page: {folder}/report.html cannot be written: No space left on device; the results are saved, "
        f"and later `defedavg report {folder} -o {folder}/report.html` writes it"
    )
    assert world.log_lines[-1] == expected
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue().splitlines()
    assert printed.count(expected) == faults, "otherwise the server prints it itself"
    assert read_run(folder).finished
    assert [str(note.fields["why"]) for note in checked(world)[0].notes("no page")] == [expected.partition(": ")[2]]


def test_the_server_of_a_stalled_run_fails_with_one_line_and_a_second_one_completes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "NODES_SECONDS", 0.01)
    world = World(tmp_path / "unused")
    nodes = world.transport.members.values()
    world.transport.clock = RealClock()

    def leave_with_all(node: Node, message: Message, reply: Reply) -> Reply:
        for each in nodes if sum(one.answered for one in nodes) > 16 else ():
            each.alive = False
        return reply

    for node in nodes:
        node.delay, node.tamper = 0.0, leave_with_all
    folder = tmp_path / "run"
    changes = {"deploy.folder": str(folder), "deploy.poll_seconds": 0.001, "deploy.wait_seconds": 0.5}
    with pytest.raises(SystemExit) as ended:
        serve(world.transport, {**world.flat, **changes}, tiny_task, "17")
    assert ended.value.code == 2
    assert "is stalled after round" in (folder / "error.txt").read_text()
    assert not read_run(folder).finished
    for node in nodes:
        node.alive, node.tamper = True, None
    serve(world.transport, {**world.flat, **changes, "deploy.resume": True}, tiny_task, "18")
    assert read_run(folder).finished
    assert not (folder / "error.txt").exists()
    found = replay(logs.read(folder / "events.jsonl"))
    found.plan.check()
    assert len(found.plan.rounds) == 8
