"""The server of a deployment over gRPC: it listens, runs the session, and writes the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...fileio import FolderLock
from ...runstore.layout import RunFiles
from ...tasks import Task
from ...training import Status
from ..deploy_config import DeployConfig
from ..ports import check_address
from ..server.coordinator import Coordinator
from ..server.deployment_folder import finish, open_run
from ..server.metrics_endpoint import metrics_endpoint
from ..server.session import LogLine, Session
from .identities import REVOKED, RevocationList, check_keys, check_loopback, host_and_port, server_credentials
from .stream_server import StreamSettings
from .stream_transport import StreamTransport

PRIVATE_SETTINGS = ("plugins", "task.module")
"""Settings that name files of the server's machine. Clients do not receive them, nor those of [deploy]."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a server listens, and the folder with its keys; without keys it is plain text, on loopback only."""

    address: str
    keys: Path | None

    def check(self) -> None:
        """Refuse an address or keys that cannot be used, and plain text for other machines."""
        host, port = host_and_port(self.address)
        if self.keys is None:
            check_loopback(self.address)
        else:
            check_keys(self.keys, "server")
        check_address(host, port)


def client_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that clients receive; of the server's task module, its name alone."""
    shared = {
        name: value for name, value in flat.items() if name not in PRIVATE_SETTINGS and not name.startswith("deploy.")
    }
    module = str(flat.get("task.module") or "")
    return {**shared, "task.module": module and Path(module).name}


def run_server(
    config: DeployConfig,
    flat: Mapping[str, Any],
    make_task: Callable[[], Task],
    folder: Path,
    listening: Listening,
    *,
    log_line: LogLine,
    on_listening: Callable[[int], None] = lambda _: None,
) -> None:
    """Run a deployment to its end; ``on_listening`` receives the port. The run folder exists."""
    with FolderLock(folder, launched=True):
        open_run(config, folder, resume=config.deploy.resume)
        task = make_task()
        if config.deploy.resume:
            session = Session.resume(config, dict(flat), task, folder, log_line)
        else:
            session = Session(config, dict(flat), task, folder)
        deploy = config.deploy
        with closing(session.log), metrics_endpoint(folder, deploy.metrics_host, deploy.metrics_port):
            if config.deploy.resume:
                session.resumed()
            with StreamTransport(_stream_settings(session, flat, listening, log_line), log_line) as transport:
                on_listening(transport.port)
                Coordinator(session, transport, log_line=log_line).run()
                transport.finished = session.progress.status is not Status.STALLED  # its clients may connect again
            finish(session, log_line)


def _stream_settings(
    session: Session, flat: Mapping[str, Any], listening: Listening, log_line: LogLine
) -> StreamSettings:
    config, keys, versions = session.config, listening.keys, session.executor.versions
    model = versions[max(versions)]
    return StreamSettings(
        address=listening.address,
        credentials=None if keys is None else server_credentials(keys),
        num_clients=config.settings.clients.num_clients,
        update_bytes=model.numel() * model.element_size(),
        settings=client_settings(flat),
        reconnect_seconds=config.deploy.reconnect_seconds,
        min_upload_rate=config.deploy.min_upload_rate,
        revocations=RevocationList(None if keys is None else keys / REVOKED, log_line),
    )


class ServerLog:
    """Writes lines to ``server.log`` of a run folder, and passes them on."""

    def __init__(self, folder: Path, also: LogLine = lambda _: None) -> None:
        self._path, self._also = RunFiles(folder).server_log, also

    def __call__(self, line: str) -> None:
        """Write a line."""
        self._also(line)
        try:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        except OSError as error:
            raise UserError(f"{self._path} cannot be written: {error.strerror or error}") from None
