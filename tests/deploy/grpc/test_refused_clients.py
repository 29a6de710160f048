"""Clients that leave, are started again or cannot take part, and keys that are not keys: what each side says."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from defedavg import make_task
from defedavg.cli.main import app
from defedavg.deploy import tls_keys
from defedavg.deploy.client.handler import Answer
from defedavg.deploy.grpc import stream_client
from defedavg.deploy.grpc.identities import check_keys
from defedavg.deploy.grpc.refusals import final_fault, plain_reason
from defedavg.deploy.grpc.stream_client import StreamClient
from defedavg.deploy.ports import free_port
from defedavg.deploy.tls_keys import make_keys
from defedavg.deploy.transport import Vector
from defedavg.errors import UserError
from defedavg.tasks import Task
from helpers.command_line import call, refuse
from helpers.stream_steps import until
from helpers.streams import StreamWorld, in_loop

LONG: dict[str, Any] = {"deploy__reconnect_seconds": 600.0, "deploy__min_clients": 6, "stop__max_rounds": 100_000}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    make_keys(folder, 6, ("127.0.0.1",))
    return folder


def test_a_client_that_is_stopped_leaves_at_once(tmp_path: Path, keys: Path) -> None:
    with StreamWorld(tmp_path, keys, **LONG) as world:
        world.join(*range(6))
        world.coordinator.wait_for_clients()
        world.jobs.pop(5).cancel()
        until(world, lambda: 5 not in world.session.engine.connected)


def test_a_restarted_client_takes_the_place_of_the_process_that_crashed(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: Any) -> None:
        """A killed process does not say that it leaves."""

    with StreamWorld(tmp_path, keys, **LONG) as world:
        world.join(*range(6))
        world.coordinator.wait_for_clients()
        monkeypatch.setattr(stream_client.Stream, "_say_bye", silent)
        world.jobs.pop(5).cancel()
        in_loop(asyncio.sleep(0.2)).result()
        assert 5 in world.session.engine.connected
        world.join(5)
        until(world, lambda: "client 5 disconnected: its node disconnected" in world.log_lines)
        until(world, lambda: 5 in world.session.engine.connected)
    assert not [line for line in world.log_lines if "second process" in line]


def test_a_client_with_another_model_ends_and_says_why(tmp_path: Path, keys: Path) -> None:
    def other(config: Mapping[str, Any], client: int | None) -> Task:
        from torch import nn

        x = np.zeros((12, 7), dtype="float32")
        data = (x, np.arange(12) % 2)
        return make_task(model=lambda: nn.Linear(7, 2), train=data, test=data, clients=np.array_split(np.arange(12), 6))

    with StreamWorld(tmp_path, keys, **LONG | {"deploy__min_clients": 5}) as world:
        world.join(0, 1, 2, 3, 4)
        world.join(5, task=other)
        world.coordinator.wait_for_clients()
        until(world, lambda: world.jobs[5].done())
        with pytest.raises(UserError, match="refuses this client: its model differs from the server's: use the same"):
            world.jobs.pop(5).result(0.0)
        assert sum("client 5 cannot take part: its model differs" in line for line in world.log_lines) == 1


def test_a_quarantined_client_ends_and_says_why(tmp_path: Path, keys: Path) -> None:
    def without_numbers(fields: dict[str, Any], update: Vector | None) -> Answer:
        return fields, None if update is None else np.full_like(update, np.nan)

    with StreamWorld(tmp_path, keys, **LONG) as world:
        world.join(0, 1, 2, 3, 4)
        world.join(5, change=without_numbers)
        world.coordinator.wait_for_clients()
        until(world, lambda: world.jobs[5].done())
        with pytest.raises(UserError, match=r"it is quarantined after repeated faults; the last one: .* not finite"):
            world.jobs.pop(5).result(0.0)


def test_a_client_without_a_server_says_what_to_do_and_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_client, "REMIND_SECONDS", 0.3)
    lines: list[str] = []

    def never(settings: Mapping[str, Any], client: int) -> Any:
        raise AssertionError

    address = f"127.0.0.1:{free_port()}"
    client = StreamClient(address, None, never, client=0, retry_seconds=1.5, log_line=lines.append)
    with pytest.raises(UserError, match=r"no connection to .* s: nothing listens there; start the server, or correct"):
        in_loop(client.run()).result(30.0)
    told = f"not connected to {address}: nothing listens there; start the server, or correct HOST:PORT; "
    assert set(lines) == {told + "trying again for at most 1.5 s"}
    assert len(lines) >= 2


def test_a_client_with_keys_ends_at_a_server_without() -> None:
    text = "failed to connect; last error: UNKNOWN: Ssl handshake failed: SSL_ERROR_SSL: ... WRONG_VERSION_NUMBER: ..."
    assert "the server sends plain text" in str(final_fault(text))
    assert final_fault("Socket closed") is None
    assert "join with --keys, too" in plain_reason("last error: UNAVAILABLE: Socket closed", secure=False)
    assert (
        plain_reason("all failed; last error: UNAVAILABLE: Socket closed", secure=True) == "UNAVAILABLE: Socket closed"
    )


def _copied(keys: Path, to: Path) -> Path:
    shutil.copytree(keys, to)
    return to


def test_files_that_are_not_the_keys_of_a_deployment_are_one_line(tmp_path: Path, keys: Path) -> None:
    check_keys(keys, "server")
    check_keys(keys / "client-3", "client")
    make_keys(tmp_path / "other", 1, ("127.0.0.1",))
    changes = {
        "server.key": (b"garbage", "server.key is not a key or a certificate"),
        "server.crt": (b"garbage", "server.crt is not a key or a certificate"),
        "ca.crt": ((tmp_path / "other" / "ca.crt").read_bytes(), "server.crt is not of the CA in"),
    }
    for number, (name, (data, message)) in enumerate(changes.items()):
        changed = _copied(keys, tmp_path / str(number))
        (changed / name).write_bytes(data)
        with pytest.raises(UserError, match=message):
            check_keys(changed, "server")
    swapped = _copied(keys / "client-1", tmp_path / "swapped")
    shutil.copy(keys / "client-2" / "client.key", swapped / "client.key")
    with pytest.raises(UserError, match=r"client.crt is not the certificate of client.key; create keys"):
        check_keys(swapped, "client")
    with pytest.raises(UserError, match=r"has the keys of all clients: give the folder of one, such as .*/client-0"):
        check_keys(keys, "client")
    with pytest.raises(UserError, match="client-0 is the folder of a client: give the one that"):
        check_keys(keys / "client-0", "server")


def test_an_expired_certificate_says_since_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_keys, "DAYS", 0)  # valid until now
    make_keys(tmp_path / "keys", 1, ("127.0.0.1",))
    today = datetime.datetime.now(datetime.UTC).year
    with pytest.raises(UserError, match=rf"client.crt expired on {today}-\d\d-\d\d; create keys"):
        check_keys(tmp_path / "keys" / "client-0", "client")


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["deploy", *words])
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def test_a_server_that_cannot_start_leaves_no_folder_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text('name = "one"\n[task]\nmodel = "softmax"\n[clients]\nnum_clients = 2\n')
    with socket.create_server(("127.0.0.1", 0)) as busy:
        at = f"127.0.0.1:{busy.getsockname()[1]}"
        busy_port = refused("serve", "study.toml", "--insecure", "--listen", at)
    assert busy_port == f"the server cannot listen at {at}: Address already in use; choose another address or port"
    local = ("serve", "study.toml", "--insecure", "--listen", "127.0.0.1:0")
    assert "name is '../two'; use letters" in refused(*local, "--name", "../two")
    (tmp_path / "typo.toml").write_text("[deply]\njob_seconds = 3\n")
    assert refused("serve", "typo.toml", *local[2:]) == "unknown key 'deply'; did you mean 'deploy'?"
    (tmp_path / "typo.toml").write_text("[trainin]\nlocal_steps = 3\n")
    assert refused("serve", "typo.toml", *local[2:]) == "unknown key 'trainin'; did you mean 'training'?"
    assert "no Python file" in refused("join", at, "--insecure", "--client", "0", "--task", "none.py:make")
    assert not (tmp_path / "runs").exists()


def test_the_table_of_an_algorithm_whose_name_resembles_deploy_is_read(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(
        "from defedavg.algorithms import register\nfrom defedavg.algorithms.fedavg import FedAvg\n\n\n"
        "class Deployed(FedAvg):\n    name = 'deployed'\n    summary = 'FedAvg.'\n\n\nregister(Deployed)\n"
    )
    (tmp_path / "own.toml").write_text('plugins = ["plugin.py"]\nalgorithms = ["deployed"]\n[deployed]\nspeed = 3\n')
    words = ("deploy", "serve", "own.toml", "--insecure", "--listen", "127.0.0.1:0")
    refuse(call(*words, cwd=tmp_path), "'speed'", "deployed")


def test_a_server_whose_clients_do_not_come_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(
        'name = "one"\nalgorithms = ["fedavg"]\n[task]\nmodel = "softmax"\n[clients]\nnum_clients = 2\n'
        "[training]\nupdates_per_round = 1\n[deploy]\nwait_seconds = 0.1\n"
    )
    words = ("serve", "study.toml", "--insecure", "--listen", "127.0.0.1:0")
    waited = "0 of the 2 clients expected connected within 0.1 s; start the others, or lower deploy.min_clients, then"
    assert refused(*words) == f"{waited} resume the run"
    assert "holds an unfinished run; continue it with --resume, replace it with --force" in refused(*words)
    assert refused(*words, "--resume") == f"{waited} resume the run"
