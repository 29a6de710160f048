"""The ServerApp: it runs a session over Flower's Grid."""

from __future__ import annotations

import time
import traceback
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ...config.task_module import MakeTask, task_from_module
from ...errors import UserError
from ...fileio import FolderLock, InUseError
from ...runstore.layout import RunFiles
from ...runstore.reader import read_run
from ..deploy_config import read_deploy_config
from ..engine import event_log as logs
from ..server.coordinator import Coordinator
from ..server.deployment_folder import finish, open_run
from ..server.metrics_endpoint import metrics_endpoint
from ..server.session import Session
from ..transport import Transport
from .grid_transport import GridTransport

LOCK_SECONDS = 30.0
"""Flower may start a second server of a run when it has lost contact with the first; the second waits this long."""


def server_app(task: str | MakeTask) -> ServerApp:
    """Return a ServerApp for the run that the app's configuration describes; ``task`` is ``module:function``."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(GridTransport(grid), dict(context.run_config), task, str(context.run_id))

    return app


def serve(transport: Transport, flat: dict[str, Any], task: str | MakeTask, run: str) -> None:
    """Run the server of a deployment; a user's error is one line, also in the file ``error.txt`` of the run folder."""
    folder = Path(str(flat.get("deploy.folder") or ".")).absolute()
    log_line = partial(_log_line, folder)
    try:
        config = read_deploy_config(flat)
        if not config.deploy.folder:
            raise UserError("deploy.folder is empty; set it to the folder in which the server keeps the run")  # noqa: TRY301 (see below)
        with FolderLock(folder, LOCK_SECONDS, launched=True):
            log = RunFiles(folder).event_log
            restarted = log.exists() and logs.read(log).head.get("run") == run  # Flower has restarted its server
            if restarted and read_run(folder).finished:
                return
            resume = restarted or config.deploy.resume
            open_run(config, folder, resume=resume)
            made = task_from_module(task, flat, None)
            if resume:
                session = Session.resume(config, flat, made, folder, log_line)
            else:
                session = Session(config, flat, made, folder, run=run)
            deploy = config.deploy
            with closing(session.log), metrics_endpoint(folder, deploy.metrics_host, deploy.metrics_port):
                if resume:
                    session.resumed()
                Coordinator(session, transport, log_line=log_line).run()
                finish(session, log_line)
    except UserError as error:
        if folder.is_dir() and not isinstance(error, InUseError):  # then only the server that runs there may write
            with suppress(OSError):  # a full disk, which the reader of an empty file finds out
                RunFiles(folder).error.write_text(f"{error}\n", encoding="utf-8")
        log_line(f"defedavg: {error}")
        raise SystemExit(2) from None
    except Exception:
        log_line(traceback.format_exc())
        raise


def _log_line(folder: Path, line: str) -> None:
    """Write a line to Flower's own log, and to ``server.log`` in the run folder."""
    print(line, flush=True)
    with suppress(OSError), RunFiles(folder).server_log.open("a", encoding="utf-8") as out:  # the disk may be full
        out.write(f"{time.strftime('%H:%M:%S')} {line}\n")
