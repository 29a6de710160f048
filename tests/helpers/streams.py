"""Deployments over gRPC in this process: a real server with TLS, real streams, and clients as tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from defedavg.config.task_module import MakeTask
from defedavg.deploy.client.handler import Answer, ClientHandler
from defedavg.deploy.deploy_config import read_deploy_config
from defedavg.deploy.grpc.identities import REVOKED, RevocationList, client_credentials, server_credentials
from defedavg.deploy.grpc.stream_client import StreamClient
from defedavg.deploy.grpc.stream_server import StreamSettings
from defedavg.deploy.grpc.stream_transport import StreamTransport, grpc_loop
from defedavg.deploy.server.coordinator import Coordinator
from defedavg.deploy.server.session import Session
from defedavg.deploy.transport import Vector
from helpers.deployments import FLAT, tiny_task

Job = concurrent.futures.Future[Any]


def in_loop(coroutine: Coroutine[Any, Any, Any]) -> Job:
    """Start a coroutine in the thread of gRPC."""
    return asyncio.run_coroutine_threadsafe(coroutine, grpc_loop())


class ChangedHandler(ClientHandler):
    """A client whose answers to training messages a test changes."""

    change: Callable[[dict[str, Any], Vector | None], Answer]

    def answer(
        self,
        kind: str,
        fields: Mapping[str, Any],
        weights: Vector | None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Answer:
        """Return the answer of the client, changed."""
        found, update = super().answer(kind, fields, weights, wanted)
        return (found, update) if kind == "hello" else self.change(found, update)


class StreamWorld:
    """A server that listens; ``run`` trains to the end. Clients are started with ``join``."""

    def __init__(self, folder: Path, keys: Path, task: MakeTask = tiny_task, **changes: Any) -> None:
        self.flat = {**FLAT, **{name.replace("__", "."): value for name, value in changes.items()}}
        self.folder, self.keys, self.task = folder, keys, task
        self.config = read_deploy_config(self.flat)
        self.total = self.config.settings.clients.num_clients
        self.log_lines: list[str] = []
        self.session = Session(self.config, self.flat, task(self.flat, None), folder)
        model = self.session.executor.versions[0]
        settings = StreamSettings(
            "127.0.0.1:0",
            server_credentials(keys),
            self.total,
            model.numel() * model.element_size(),
            {"clients.num_clients": self.total},
            self.config.deploy.reconnect_seconds,
            self.config.deploy.min_upload_rate,
            RevocationList(keys / REVOKED, self.log_lines.append),
        )
        self.transport = StreamTransport(settings, self.log_lines.append)
        self.coordinator = Coordinator(self.session, self.transport, log_line=self.log_lines.append)
        self.jobs: dict[int, Job] = {}
        self._clients: list[StreamClient] = []
        self._ended = False

    def __enter__(self) -> StreamWorld:
        self.transport.__enter__()
        self.transport.finished = True
        return self

    def __exit__(self, *raised: object) -> None:
        self.end_training()
        self.session.log.close()

    def end_training(self) -> None:
        """Close all streams, and end the threads of the clients; see ``World``."""
        if self._ended:
            return
        self._ended = True
        self.transport.__exit__()
        for job in self.jobs.values():
            job.cancel()
            with suppress(Exception, concurrent.futures.CancelledError):
                job.result(5.0)
        for client in self._clients:
            client.close()
            client._pool.shutdown()

    @property
    def address(self) -> str:
        """Where the server listens."""
        return f"127.0.0.1:{self.transport.port}"

    def client(
        self,
        number: int,
        change: Callable[[dict[str, Any], Vector | None], Answer] | None = None,
        address: str = "",
        task: MakeTask | None = None,
        step_seconds: float = 0.0,
    ) -> StreamClient:
        """Return a client that is not connected yet."""
        own = task or self.task

        def make(found: Mapping[str, Any], client: int) -> ClientHandler:
            if change is None:
                return ClientHandler(own, found, client, step_seconds)
            handler = ChangedHandler(own, found, client, step_seconds)
            handler.change = change
            return handler

        credentials = client_credentials(self.keys / f"client-{number}")
        options: dict[str, Any] = {"retry_seconds": 20.0, "log_line": lambda _: None}
        self._clients.append(StreamClient(address or self.address, credentials, make, **options))
        return self._clients[-1]

    def join(self, *numbers: int, **options: Any) -> None:
        """Connect clients."""
        for number in numbers:
            self.jobs[number] = in_loop(self.client(number, **options).run())

    def run(self) -> None:
        """Train until the run is over."""
        self.coordinator.run()


class CuttingProxy:
    """A TCP proxy that cuts a connection when a number of bytes has been sent to the server, a number of times.

    With ``hold``, the connection stays open, but nothing more arrives. ``cut`` is set at the first cut.
    """

    def __init__(self, port: int, cut_after: int, cuts: int, *, hold: bool = False) -> None:
        self._target, self._cut_after, self.cuts_left, self._hold = port, cut_after, cuts, hold
        self.cut = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the run is over, and a client has tried to connect once more
                client.close()
                continue
            threading.Thread(target=self._copy, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, False), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        sent = 0
        with suppress(OSError):
            while data := source.recv(65536):
                sent += len(data)
                if counted and self.cuts_left > 0 and sent > self._cut_after:
                    self.cuts_left -= 1
                    self.cut.set()
                    while self._hold and source.recv(65536):
                        pass
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
