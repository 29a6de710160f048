"""A client of a deployment over gRPC, as one long-lived process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...config.build import build_task
from ...config.task_module import MakeTask, file_of
from ...errors import UserError
from ..deploy_config import read_deploy_config
from .stream_client import StreamClient

if TYPE_CHECKING:
    from ...tasks import Task
    from ..client.handler import ClientHandler


def task_of_settings(config: Mapping[str, Any], client: int | None) -> Task:
    """Return the task that the settings of a run name."""
    found = read_deploy_config(config)
    return build_task(found.settings, found.seed, client)


def make_handler(
    settings: Mapping[str, Any], client: int, task: str | MakeTask | None, step_seconds: float
) -> ClientHandler:
    """Return the handler of a client. Code comes from this machine: ``task``, never from what the server sends."""
    flat = {name: value for name, value in settings.items() if name not in ("plugins", "task.module")}
    module = str(settings.get("task.module") or "")
    if task is None and module:
        named = file_of(module) or module
        raise UserError(f"the run has a task of its own ({named[:80]}); give this client's with --task FILE.py:make")
    import torch  # importing it takes seconds, and a connection that is refused does not need it

    from ..client.handler import ClientHandler

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    return ClientHandler(task or task_of_settings, flat, client, step_seconds)


def run_client(
    address: str,
    credentials: Any,
    *,
    client: int | None = None,
    task: str | MakeTask | None = None,
    step_seconds: float = 0.0,
    retry_seconds: float = 600.0,
    log_line: Callable[[str], None] = print,
) -> None:
    """Answer the server's messages until the run is over. ``client`` is the number of a client without credentials."""

    def handler(settings: Mapping[str, Any], number: int) -> ClientHandler:
        return make_handler(settings, number, task, step_seconds)

    stream = StreamClient(address, credentials, handler, client=client, retry_seconds=retry_seconds, log_line=log_line)
    try:
        asyncio.run(stream.run())
    finally:
        stream.close()
