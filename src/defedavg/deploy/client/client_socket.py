"""The connection from a ClientApp to its client process: a Unix socket in a private folder, protected by a secret.

Nothing is unpickled: a message is a line of JSON and the raw bytes of a vector. This module does not import PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ...errors import UserError
from ..transport import Vector

START_SECONDS = 60.0
MAX_PATH_BYTES = 103
"""The longest path of a Unix socket on macOS; Linux allows 107."""

START_TIME_TOLERANCE = 2.0
"""Start times are seconds since the epoch and differ a little when the clock of the machine is adjusted."""


@dataclass(frozen=True, slots=True)
class ProcessAddress:
    """Where a client process listens, and the secret that authenticates its peers."""

    path: str
    secret: bytes = field(repr=False)


def socket_path(name: str) -> Path:
    """Return a path for a socket in a private folder that is short enough for every platform."""
    # TMPDIR may be long; /tmp is safe as well, because the folder must belong to this user alone.
    for parent in (Path(tempfile.gettempdir()), Path("/tmp")):  # noqa: S108 (see the comment above)
        folder = parent / f"defedavg-{os.getuid()}"
        path = folder / name
        if len(os.fsencode(path)) <= MAX_PATH_BYTES and parent.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise UserError(f"{folder} is not private to this user; remove it, or set TMPDIR to another folder")
            return path
    raise UserError(f"{path} is too long for a Unix socket; set TMPDIR to a folder with a path below 60 characters")


def send(connection: Connection, head: dict[str, Any], vector: Vector | None) -> None:
    """Send one message."""
    described = {"dtype": str(vector.dtype), "size": int(vector.size)} if vector is not None else None
    connection.send_bytes(json.dumps({"head": head, "vector": described}).encode())
    if vector is not None:
        connection.send_bytes(np.ascontiguousarray(vector).tobytes())


def receive(connection: Connection) -> tuple[dict[str, Any], Vector | None]:
    """Receive one message."""
    message = json.loads(connection.recv_bytes())
    vector = None
    if message["vector"] is not None:
        vector = np.frombuffer(connection.recv_bytes(), dtype=np.dtype(message["vector"]["dtype"]))
        if vector.size != message["vector"]["size"]:
            raise ValueError("a vector is incomplete")
    return message["head"], vector


def request(
    address: ProcessAddress | None,
    node: str,
    launch: dict[str, Any],
    kind: str,
    fields: dict[str, Any],
    weights: Vector | None,
) -> tuple[ProcessAddress, dict[str, Any], Vector | None]:
    """Send a message to the client process of a node and return its address and its answer.

    If no process listens at ``address``, start one with ``launch``: task, config, client and step_seconds.
    """
    connection = None if address is None else connect(address)
    if address is None or connection is None:
        address = _start_process(node, launch)
        connection = _connect_when_ready(address)
    with connection:
        send(connection, {"kind": kind, "fields": fields}, weights)
        head, update = receive(connection)
    if "error" in head:
        raise UserError(str(head["error"]))
    return address, head["fields"], update


def connect(address: ProcessAddress) -> Connection | None:
    """Connect to a client process, or return None if none listens there or it refuses the secret."""
    try:
        return Client(address.path, "AF_UNIX", authkey=address.secret)
    except (OSError, EOFError, AuthenticationError):
        return None


def _connect_when_ready(address: ProcessAddress) -> Connection:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        connection = connect(address)
        if connection is not None:
            return connection
        time.sleep(0.05)
    raise UserError(f"the process of this client did not start within {START_SECONDS:g} s; see its SuperNode's log")


def _start_process(node: str, launch: dict[str, Any]) -> ProcessAddress:
    """Start a client process that ends with the parent of this process, the executor of the SuperNode."""
    address = ProcessAddress(str(socket_path(f"{node}-{os.urandom(3).hex()}.sock")), os.urandom(32))
    remove_dead_sockets(Path(address.path).parent)
    newest = Path(address.path).with_name(f"{node}.newest")
    newest.write_text(address.path)  # an older process of this node ends when it finds another path here
    parent = os.getppid()
    complete = {**launch, "path": address.path, "newest": str(newest), "secret": address.secret.hex()}
    complete |= {"parent": parent, "parent_started": process_start_time(parent)}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    process = subprocess.Popen(
        [sys.executable, "-m", "defedavg.deploy.client.client_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(complete).encode() + b"\n")
    process.stdin.close()
    return address


def remove_dead_sockets(folder: Path) -> None:
    """Remove what killed client processes have left: sockets to which nothing listens, and files that name them."""
    for path in (*folder.glob("*.sock"), *folder.glob("*.newest")):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime < START_SECONDS:
                continue  # its process may not listen yet
            if path.suffix == ".sock" and _listens(path):
                continue
            if path.suffix == ".newest" and Path(path.read_text()).exists():
                continue
            path.unlink()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def process_start_time(pid: int) -> float | None:
    """Return when a process started, or None if it has ended."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def is_running(pid: int, started: float | None) -> bool:
    """Return whether the process that started at that time still runs; a later process may have the same number."""
    found = process_start_time(pid)
    return found is not None and started is not None and abs(found - started) <= START_TIME_TOLERANCE
