"""The way from a ClientApp to its worker: a Unix socket in a folder of the user's own, a secret, and bytes.

Nothing is unpickled: a message is a line of JSON and the raw bytes of a vector. This file imports no PyTorch.
"""

from __future__ import annotations

import json
import os
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

from ...errors import UserError
from ..transport import Vector

START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Key:
    """Where a worker listens, and the secret that opens it."""

    path: str
    secret: bytes = field(repr=False)


def folder() -> Path:
    """A folder that only this user can enter."""
    path = Path(tempfile.gettempdir()) / f"defedavg-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{path} is not a folder of this user alone; remove it, or set TMPDIR to another place")
    return path


def send(connection: Connection, head: dict[str, Any], vector: Vector | None) -> None:
    """One message."""
    described = {"dtype": str(vector.dtype), "size": int(vector.size)} if vector is not None else None
    connection.send_bytes(json.dumps({"head": head, "vector": described}).encode())
    if vector is not None:
        connection.send_bytes(np.ascontiguousarray(vector).tobytes())


def receive(connection: Connection) -> tuple[dict[str, Any], Vector | None]:
    """One message."""
    found = json.loads(connection.recv_bytes())
    vector = None
    if found["vector"] is not None:
        vector = np.frombuffer(connection.recv_bytes(), dtype=np.dtype(found["vector"]["dtype"]))
        if vector.size != found["vector"]["size"]:
            raise ValueError("a vector was cut off")
    return found["head"], vector


def ask(
    key: Key | None,
    place: str,
    order: dict[str, Any],
    kind: str,
    fields: dict[str, Any],
    weights: Vector | None,
) -> tuple[Key, dict[str, Any], Vector | None]:
    """A worker's answer; one is started if there is none. Gives also how to reach it the next time."""
    connection = None if key is None else _connect(key)
    if key is None or connection is None:
        key = _start(place, order)
        connection = _first(key)
    with connection:
        send(connection, {"kind": kind, "fields": fields}, weights)
        head, update = receive(connection)
    if "error" in head:
        raise UserError(str(head["error"]))
    return key, head["fields"], update


def _connect(key: Key) -> Connection | None:
    try:
        return Client(key.path, "AF_UNIX", authkey=key.secret)
    except (OSError, EOFError, AuthenticationError):
        return None


def _first(key: Key) -> Connection:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        connection = _connect(key)
        if connection is not None:
            return connection
        time.sleep(0.05)
    raise UserError(f"the worker of this client did not start within {START_SECONDS:g} s")


def _start(place: str, order: dict[str, Any]) -> Key:
    """Start a worker that ends with the process that started this one, the node's executor."""
    key = Key(str(folder() / f"{place}-{os.urandom(3).hex()}.sock"), os.urandom(32))
    newest = folder() / f"{place}.newest"
    newest.write_text(key.path)  # a worker of this node that finds another one named there ends
    parent = os.getppid()
    told = {
        **order,
        "path": key.path,
        "newest": str(newest),
        "secret": key.secret.hex(),
        "parent": parent,
        "born": born(parent),
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    worker = subprocess.Popen(
        [sys.executable, "-m", "defedavg.deploy.client.client_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(told).encode() + b"\n")
    worker.stdin.close()
    return key


def born(pid: int) -> str | None:
    """When a process started, so that another one of the same number is not taken for it; None: it is no more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:  # no such file system here: only whether it is there can be asked
            os.kill(pid, 0)
        except OSError:
            return None
        return "?"
    return None if fields[0] == "Z" else fields[19]
