"""Runs over real gRPC streams with TLS: merged exactly once, and nobody but a client itself speaks for it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import grpc
import numpy as np
import pytest

from defedavg import make_task
from defedavg.deploy.client.handler import Answer, ClientHandler
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.events import Failed, Left, Refused
from defedavg.deploy.grpc import frames, stream_client, stream_server
from defedavg.deploy.grpc.identities import client_credentials
from defedavg.deploy.grpc.stream_client import StreamClient
from defedavg.deploy.tls_keys import make_keys
from defedavg.deploy.transport import Vector
from defedavg.errors import UserError
from defedavg.runstore.layout import EVENT_LOG
from defedavg.tasks import Task
from helpers.deployments import World, agrees, checked
from helpers.stream_steps import until
from helpers.streams import CuttingProxy, StreamWorld, in_loop


@pytest.fixture(scope="module")
def made_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    make_keys(folder, 6, ("127.0.0.1",))
    return folder


@pytest.fixture
def keys(made_keys: Path) -> Path:
    (made_keys / "revoked.txt").unlink(missing_ok=True)
    return made_keys


def large_task(config: Mapping[str, Any], client: int | None) -> Task:
    """A model of 0.8 MB, whose update needs several frames."""
    from torch import nn

    rng = np.random.Generator(np.random.Philox(key=5))
    x = rng.normal(size=(60, 1000)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int64")
    return make_task(
        model=lambda: nn.Sequential(nn.Linear(1000, 200), nn.Linear(200, 2)),
        train=(x[:48], y[:48]),
        test=(x[48:], y[48:]),
        clients=np.array_split(np.arange(48), int(config["clients.num_clients"])),
    )


def finished(world: StreamWorld) -> logs.EventLog:
    """Check the log of a world: every update is merged exactly once, and the weights are those of the replayed plan."""
    log, found = checked(cast(World, world))
    agrees(cast(World, world), found)
    return log


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "defedavg-iid"},
        {"algorithm": "fedavg"},
        {"algorithm": "defedavg-niid"},
        {"algorithm": "favano", "favano__wait_seconds": 0.05},
        {"algorithm": "ringmaster", "ringmaster__stop": True, "ringmaster__threshold": 3},
        {"algorithm": "mifa"},
    ],
    ids=lambda changes: changes["algorithm"],
)
def test_a_run_over_streams_replays_as_logged(tmp_path: Path, keys: Path, changes: dict[str, Any]) -> None:
    with StreamWorld(tmp_path, keys, **changes) as world:
        world.join(*range(6))
        world.run()
        log = finished(world)
    assert not [event for event in log.events if isinstance(event, Left | Refused | Failed)]
    assert [job.result(5.0) for job in world.jobs.values()] == [None] * 6  # told that the run is over


@pytest.mark.parametrize("algorithm", ["defedavg-iid", "defedavg-niid"])
def test_an_upload_that_is_cut_is_sent_again_and_merged_once(tmp_path: Path, keys: Path, algorithm: str) -> None:
    with StreamWorld(tmp_path, keys, large_task, algorithm=algorithm, stop__max_rounds=5) as world:
        proxy = CuttingProxy(world.transport.port, 500_000, cuts=4)
        world.join(0, 1, 2, 3)
        world.join(4, 5, address=proxy.address)
        world.run()
        log = finished(world)
        proxy.close()
    assert proxy.cuts_left < 4
    assert not [event for event in log.events if isinstance(event, Left | Refused | Failed)]


def test_a_client_that_stays_away_leaves_and_joins_again(tmp_path: Path, keys: Path) -> None:
    changes: dict[str, Any] = {"deploy__reconnect_seconds": 0.2, "deploy__min_clients": 5, "stop__max_rounds": 1000}
    with StreamWorld(tmp_path, keys, **changes) as world:
        world.join(*range(6))
        world.coordinator.wait_for_clients()
        in_loop(asyncio.sleep(0)).result()
        world.jobs.pop(5).cancel()
        until(world, lambda: 5 not in world.session.engine.connected)
        world.join(5)
        until(world, lambda: 5 in world.session.engine.connected)
        checked(cast(World, world))


def test_a_second_process_of_a_client_is_refused_and_the_first_stays(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_client, "CLAIM_SECONDS", 0.3)
    with StreamWorld(tmp_path, keys) as world:
        world.join(*range(6))
        world.coordinator.wait_for_clients()
        second = in_loop(world.client(3).run())
        with pytest.raises(UserError, match="client 3 is connected from another process; end that process"):
            second.result(10.0)
        world.run()
        log = finished(world)
    assert not [event for event in log.events if isinstance(event, Left)]
    assert world.log_lines.count("refused a second process that connects as client 3") == 1  # of several attempts


def test_a_round_over_streams_interrupts_jobs_that_are_not_finished(tmp_path: Path, keys: Path) -> None:
    changes: dict[str, Any] = {"algorithm": "favano", "favano__wait_seconds": 0.2, "stop__max_rounds": 3}
    with StreamWorld(tmp_path, keys, **changes) as world:
        world.join(*range(6), step_seconds=0.15)  # a job has four steps
        world.run()
        finished(world)
        found = checked(cast(World, world))[1]
    assert any(job.outcome == "interrupted" for job in found.plan.jobs)


def test_bad_clients_are_quarantined_while_the_others_train(tmp_path: Path, keys: Path) -> None:
    def without_numbers(fields: dict[str, Any], update: Vector | None) -> Answer:
        return fields, None if update is None else np.full_like(update, np.nan)

    def too_short(fields: dict[str, Any], update: Vector | None) -> Answer:
        return fields, None if update is None else update[:-1]

    def wrong_job(fields: dict[str, Any], update: Vector | None) -> Answer:
        return {**fields, "index": 10**6}, update

    bad = {1: without_numbers, 2: too_short, 3: wrong_job}
    with StreamWorld(tmp_path, keys, stop__max_rounds=10_000) as world:
        for client in range(6):
            world.join(client, change=bad.get(client))
        world.coordinator.wait_for_clients()
        until(world, lambda: all(world.session.engine.links[client].quarantined for client in bad), 120.0)
        before = world.session.engine.server.version
        until(world, lambda: world.session.engine.server.version > before)
        log, found = checked(cast(World, world))
    assert set(found.quarantined) == {1, 2, 3}
    reasons = {event.client: event.why for event in log.events if isinstance(event, Refused)}
    assert "finite" in reasons[1]
    assert "shape" in reasons[2]
    assert "job 1000000" in reasons[3]
    assert {update.client for record in found.plan.rounds for update, _ in record.merge.updates} == {0, 4, 5}


def test_a_client_cannot_speak_for_another(tmp_path: Path, keys: Path) -> None:
    def lie(fields: dict[str, Any], update: Vector | None) -> Answer:
        return {**fields, "client": 0}, update

    with StreamWorld(tmp_path, keys, algorithm="asysg", training__global_lr=0.1, stop__max_rounds=60) as world:
        world.join(0, 1, 2, 4, 5)
        world.join(3, change=lie)
        world.run()
        log = finished(world)
    failed = [event for event in log.events if isinstance(event, Failed)]
    assert {event.client for event in failed} == {3}
    assert all("claims to be client 0" in event.why for event in failed)


def test_an_update_larger_than_the_model_is_refused_before_it_arrives(tmp_path: Path, keys: Path) -> None:
    def enlarge(fields: dict[str, Any], update: Vector | None) -> Answer:
        return fields, np.zeros(100_000_000, dtype="float32")

    with StreamWorld(tmp_path, keys, algorithm="asysg", training__global_lr=0.1, stop__max_rounds=60) as world:
        world.join(0, 1, 2, 4, 5)
        world.join(3, change=enlarge)
        world.run()
        log = finished(world)
    [event, *_] = [event for event in log.events if isinstance(event, Refused)]
    assert event.client == 3
    assert "has shape (100000000,)" in event.why
    assert any("client 3: an update of 400000000 bytes was announced" in line for line in world.log_lines)


class Trickle(stream_client.Stream):
    """A connection on which some clients upload a byte from time to time."""

    slow: ClassVar[set[stream_client.StreamClient]] = set()

    async def _write(self) -> None:
        while self._client in self.slow:
            reply = self._client.reply(await self._queue.get())
            if reply is None:
                continue
            await self._call.write(reply.head)
            for frame in reply.vector.frames() if reply.vector is not None else ():
                for byte in frames.payload(frame):
                    await asyncio.sleep(0.3)
                    await self._call.write(bytes([0, 0, 0, 0, byte]))
        await super()._write()


def test_uploads_that_trickle_do_not_hold_the_memory_of_all_uploads(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients hold all of it, which is that of two updates, until their time is over."""
    monkeypatch.setattr(stream_server, "UPLOAD_BYTES", 0)
    monkeypatch.setattr(stream_server, "CHUNK_SECONDS", 2.0)
    monkeypatch.setattr(stream_client, "Stream", Trickle)
    changes: dict[str, Any] = {"algorithm": "fedbuff", "stop__max_rounds": 100_000, "deploy__min_upload_rate": 1e6}
    with StreamWorld(tmp_path, keys, **changes) as world:
        for number in range(6):
            client = world.client(number)
            Trickle.slow |= {client} if number < 2 else set()
            world.jobs[number] = in_loop(client.run())
        world.coordinator.wait_for_clients()
        until(world, lambda: all(any(f"client {n} failed" in line for line in world.log_lines) for n in (0, 1)), 120.0)
        before = world.session.engine.server.version
        until(world, lambda: world.session.engine.server.version >= before + 5, 120.0)
        log, found = checked(cast(World, world))
    Trickle.slow.clear()
    reasons = [event.why for event in log.events if isinstance(event, Failed)]
    assert all("did not arrive within 2 s, which deploy.min_upload_rate allows" in why for why in reasons)
    assert {update.client for record in found.plan.rounds for update, _ in record.merge.updates} == {2, 3, 4, 5}


def test_a_revoked_client_is_cut_while_the_server_runs(tmp_path: Path, keys: Path) -> None:
    with StreamWorld(tmp_path, keys, stop__max_rounds=10_000, deploy__min_clients=1) as world:
        world.join(*range(6))
        world.coordinator.wait_for_clients()
        until(world, lambda: len(world.session.engine.connected) == 6)
        (keys / "revoked.txt").write_text("# stolen\nclient-2\n")
        until(world, lambda: 2 not in world.session.engine.connected)
        with pytest.raises(UserError, match="revoked"):
            world.jobs.pop(2).result(10.0)
        with pytest.raises(UserError, match="revoked"):
            in_loop(world.client(2).run()).result(10.0)
        assert world.session.engine.connected == [0, 1, 3, 4, 5]
        checked(cast(World, world))


async def status_of(address: str, credentials: Any, *sent: bytes) -> Any:
    """Send frames on a stream of its own; return the status with which the server ends it."""
    async with grpc.aio.secure_channel(address, credentials) as channel:
        call = channel.stream_stream(frames.METHOD)()
        try:
            for frame in sent:
                await call.write(frame)
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()
        return await call.code(), ""


def hello(**changes: Any) -> bytes:
    return frames.encode({"type": "hello", "protocol": frames.PROTOCOL, "process": "p", "received": [], **changes})


def test_connections_that_do_not_follow_the_protocol_are_refused(tmp_path: Path, keys: Path) -> None:
    make_keys(tmp_path / "strangers", 1, ("127.0.0.1",))
    make_keys(tmp_path / "more", 9, ("127.0.0.1",))
    with StreamWorld(tmp_path / "run", keys) as world:
        own = client_credentials(keys / "client-1")
        code, details = in_loop(status_of(world.address, own, hello(protocol=99))).result(10.0)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "version 99 of the protocol" in details
        for sent in (
            [b""],
            [b"\x00\x00\x00\x05hello"],
            [hello(received=3)],
            [hello(), hello()],
            [hello(), b"\0\0\0\0x"],
        ):
            code, _ = in_loop(status_of(world.address, own, *sent)).result(10.0)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        code, _ = in_loop(status_of(world.address, own, b"x" * (frames.MAX_FRAME_BYTES + 1))).result(10.0)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        # A certificate of another CA, or none, does not get as far as a stream.
        ca = (keys / "ca.crt").read_bytes()
        stolen = (tmp_path / "strangers" / "client-0" / "client.key").read_bytes()
        shown = (tmp_path / "strangers" / "client-0" / "client.crt").read_bytes()
        for strange in (
            grpc.ssl_channel_credentials(ca),
            grpc.ssl_channel_credentials(ca, stolen, shown),
            client_credentials(tmp_path / "strangers" / "client-0"),
        ):
            code, _ = in_loop(status_of(world.address, strange, hello())).result(10.0)
            assert code is grpc.StatusCode.UNAVAILABLE
        # The server's own certificate does not make a client.
        server = ((keys / name).read_bytes() for name in ("ca.crt", "server.key", "server.crt"))
        code, _ = in_loop(status_of(world.address, grpc.ssl_channel_credentials(*server), hello())).result(10.0)
        assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
        assert world.transport.nodes() == set()


def test_a_client_whose_keys_do_not_match_those_of_the_server_ends_and_says_so(tmp_path: Path, keys: Path) -> None:
    def refusal(address: str, own: Path) -> str:
        def no_handler(_settings: Mapping[str, Any], _client: int) -> ClientHandler:
            raise AssertionError("the client is connected")

        client = StreamClient(address, client_credentials(own), no_handler, log_line=lambda _: None)
        with pytest.raises(UserError) as raised:
            in_loop(client.run()).result(10.0)
        client._pool.shutdown()
        return str(raised.value)

    make_keys(tmp_path / "strangers", 1, ("127.0.0.1",))
    make_keys(tmp_path / "far", 6, ("fl.example.org",))
    with StreamWorld(tmp_path / "run", keys) as world:
        line = refusal(world.address, tmp_path / "strangers" / "client-0")
        assert line.startswith(f"no secure connection to {world.address}: the server's certificate is not valid for")
    with StreamWorld(tmp_path / "other", tmp_path / "far") as world:
        assert "certificate is for another host; name this one with --host" in refusal(
            world.address, tmp_path / "far" / "client-0"
        )


def test_a_client_without_a_task_ends_with_its_reason_and_the_server_knows_it(tmp_path: Path, keys: Path) -> None:
    def no_task(config: Mapping[str, Any], client: int | None) -> Task:
        raise UserError("there are no data here")

    with StreamWorld(tmp_path, keys, deploy__min_clients=5, deploy__wait_seconds=20.0) as world:
        world.join(0, 1, 2, 3, 4)
        world.join(5, task=no_task)
        world.coordinator.wait_for_clients()
        until(world, lambda: "client 5 cannot take part: no_task: there are no data here" in world.log_lines)
        with pytest.raises(UserError, match="there are no data here"):
            world.jobs.pop(5).result(10.0)


def test_a_port_in_use_is_one_line(tmp_path: Path, keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        world = StreamWorld(tmp_path, keys)
        object.__setattr__(world.transport._settings, "address", f"127.0.0.1:{busy.getsockname()[1]}")
        with pytest.raises(UserError, match="cannot listen at"):
            world.transport.__enter__()
        world.session.log.close()
    assert (tmp_path / EVENT_LOG).exists()
