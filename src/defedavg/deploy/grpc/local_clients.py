"""The clients of ``deploy local``: one process per client, started from a process that has loaded PyTorch once.

``python -m defedavg.deploy.grpc.local_clients`` reads its task from standard input, one JSON object, and then the
server's address. It loads PyTorch and the data while the server starts, and then forks. All processes end when
standard input is closed: the command that started them has ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import UserError
from ...fileio import writing

END_SECONDS = 5.0


@contextmanager
def local_clients(launch: Mapping[str, Any], log: Path) -> Any:
    """Start the process, and yield it; give it the address with ``send_address``. At the end of the block, end it.

    ``launch`` has the settings, the task or None, the folder of keys, the clients with their seconds per step, and
    folders for imports.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with writing(log), log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "defedavg.deploy.grpc.local_clients"],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
    try:
        _write_line(process, launch)
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def send_address(process: subprocess.Popen[bytes], address: str) -> None:
    """Tell the process where the server listens; it starts the clients then."""
    _write_line(process, address)


def _write_line(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(value).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise UserError("the process of the clients ended; see clients.log in the run folder") from None


def _read_line(stream: BinaryIO) -> Any:
    """Read a line without a buffer: the processes that are forked later must find the rest."""
    data = bytearray()
    while not data.endswith(b"\n"):
        byte = os.read(stream.fileno(), 1)
        if not byte:
            sys.exit(0)
        data += byte
    return json.loads(data)


def main() -> None:
    """Load what all clients need, fork a process for each, and wait for them."""
    launch = _read_line(sys.stdin.buffer)
    sys.path[:0] = launch["sys_path"]
    import torch

    from ...plugins import load_plugins
    from ..client import handler as _handler  # noqa: F401 (loaded once, for all clients)
    from .join import task_of_settings

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    load_plugins(filter(None, str(launch["settings"].get("plugins", "")).split(os.pathsep)))
    task: Any = launch["task"]
    if task is None:
        made = task_of_settings(launch["settings"], None)
        task = lambda _config, _client: made  # noqa: E731 (the same task for every client, whose part is in it)
    address = _read_line(sys.stdin.buffer)
    children = [_fork(launch, address, number, seconds, task) for number, seconds in launch["clients"]]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for child in children:
        os.waitpid(child, 0)


def _fork(launch: Mapping[str, Any], address: str, number: int, step_seconds: float, task: Any) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        # gRPC is imported here: it must not have started before the fork.
        from .identities import client_credentials
        from .join import run_client

        def log_line(line: str) -> None:
            print(f"client {number} (process {os.getpid()}): {line}", flush=True)

        credentials = client_credentials(Path(launch["keys"]) / f"client-{number}")
        run_client(address, credentials, task=task, step_seconds=step_seconds, log_line=log_line)
        status = 0
    except UserError as error:
        print(f"client {number}: {error}", flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
