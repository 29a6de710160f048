"""The clients of ``deploy local``: one process per client, forked from a process that has loaded PyTorch once.

The command forks this process, the starter, when it has loaded PyTorch and before it uses gRPC, which does not survive
a fork. If the command has threads already, the starter is ``python -m defedavg.deploy.grpc.local_clients`` instead,
which loads PyTorch itself. The starter reads two lines of JSON from standard input: what to run, and the server's
address. Then it forks. On macOS, a process that has loaded PyTorch must not fork: there the starter runs
``python -m defedavg.deploy.grpc.local_clients NUMBER`` for every client, which reads the same two lines. All processes
end when standard input is closed: the command has ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ...errors import UserError

END_SECONDS = 5.0


class ForkedStarter:
    """A starter that is a fork of this process, with the methods of ``subprocess.Popen`` that are needed here."""

    def __init__(self) -> None:
        # Loaded once, here, for the starter and for all clients.
        from ..client import handler as _handler  # noqa: F401
        from .join import run_client as _run_client  # noqa: F401

        read_end, write_end = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()  # the child must not write it again
        self.pid = os.fork()
        if not self.pid:
            _be_starter(read_end)
        os.close(read_end)
        self.stdin = os.fdopen(write_end, "wb")

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert timeout is not None
            assert deadline is not None
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the starter of the clients", timeout)
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill the process."""
        os.kill(self.pid, signal.SIGKILL)


def _be_starter(read_end: int) -> NoReturn:
    """Detach from the command that was forked: its terminal, its signals, and its open files, locks among them."""
    status = 1
    try:
        os.setsid()  # Ctrl-C reaches the command alone
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for standard, source in enumerate((read_end, null, null)):
            os.dup2(source, standard)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        main()
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


class LocalClients:
    """The process that starts the clients."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedStarter) -> None:
        self._process = process

    def prepare(self, launch: Mapping[str, Any]) -> None:
        """Say what to run: settings, task or None, keys, clients, folders for imports, log file, whether to fork."""
        self._write_line(launch)

    def start(self, address: str) -> None:
        """Start the clients: the server listens."""
        self._write_line(address)

    def _write_line(self, value: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise UserError("the process of the clients ended; see clients.log in the run folder") from None

    def end(self) -> None:
        """End all clients."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def local_clients() -> Iterator[LocalClients]:
    """Start the process, and end it and the clients with the block."""
    # A fork has only the thread that forked: locks that other threads hold would stay locked in it.
    forked = sys.platform != "darwin" and threading.active_count() == 1
    clients = LocalClients(ForkedStarter() if forked else _fresh_starter())
    try:
        yield clients
    finally:
        clients.end()


def _fresh_starter() -> subprocess.Popen[bytes]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-m", "defedavg.deploy.grpc.local_clients"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches the command alone
    )


def _read_line() -> Any:
    """Read a line of standard input without a buffer: no other process may miss its end."""
    data = bytearray()
    while not data.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(0)
        data += byte
    return json.loads(data)


def main(number: int | None = None) -> None:
    """Start all clients and wait for them; with a number, be that client."""
    import torch

    from ...plugins import load_plugins
    from ..client import handler as _handler  # noqa: F401 (loaded once, for all clients)
    from .join import task_of_settings

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    launch = _read_line()
    sys.path[:0] = launch["sys_path"]
    log = os.open(launch["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(log, standard)
    if number is None and not launch["fork"]:
        _spawn(launch, _read_line())
        return
    load_plugins(filter(None, str(launch["settings"].get("plugins", "")).split(os.pathsep)))
    task: Any = launch["task"]
    if task is None:
        made = task_of_settings(launch["settings"], None)
        task = lambda _config, _client: made  # noqa: E731 (the same task for every client, whose part is in it)
    address = _read_line()
    if number is not None:
        _be_client(launch, address, number, dict(launch["clients"])[number], task)
    children = [_fork(launch, address, client, seconds, task) for client, seconds in launch["clients"]]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for child in children:
        os.waitpid(child, 0)


def _spawn(launch: Mapping[str, Any], address: str) -> None:
    """Start a process for every client and wait for them. Their standard input is closed when this process ends."""
    lines = b"".join(json.dumps(line).encode() + b"\n" for line in (launch, address))
    children = []
    for client, _ in launch["clients"]:
        words = [sys.executable, "-m", "defedavg.deploy.grpc.local_clients", str(client)]
        child = subprocess.Popen(words, stdin=subprocess.PIPE)
        assert child.stdin is not None
        child.stdin.write(lines)
        child.stdin.flush()
        children.append(child)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for child in children:
        child.wait()


def _fork(launch: Mapping[str, Any], address: str, number: int, step_seconds: float, task: Any) -> int:
    child = os.fork()
    if not child:
        _be_client(launch, address, number, step_seconds, task)
    return child


def _be_client(launch: Mapping[str, Any], address: str, number: int, step_seconds: float, task: Any) -> NoReturn:
    """Run a client in this process, and end the process."""
    status = 1
    try:
        threading.Thread(target=_end_with_parent, daemon=True).start()
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
    main(*map(int, sys.argv[1:]))
