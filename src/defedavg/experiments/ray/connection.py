"""Connects to a Ray cluster and reads what it consists of; every failure is one line."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import platform
import signal
import socket
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ...errors import UserError, first_line
from ..deferred_stop import SIGNALS, DeferredStop

MAX_CORES = 4  # of a worker without a GPU: with more, the part that threads do not share dominates
PROBE_SECONDS = 10.0
LOCAL = "local"  # without an address, Ray would join a cluster of this machine, if there is one

# Ray uses HTTP/2: a server answers the client preface and an empty SETTINGS frame with its own SETTINGS frame.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@dataclass(frozen=True, slots=True)
class WorkerSlots:
    """The workers that fit on a node, and the cores of each."""

    node: str
    name: str
    workers: int
    cores: int


def versions() -> dict[str, str]:
    """Return the versions that must be equal on every node."""
    return {
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "ray", "defedavg")},
    }


def connect(address: str | None) -> None:
    """Connect to the cluster at an address (or at RAY_ADDRESS); without one, start a cluster on this machine."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--executor ray needs Ray, which is not installed; pip install 'defedavg[ray]'")
    import ray

    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    if address not in ("auto", LOCAL):
        _probe(address)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a worker without a GPU leaves CUDA alone
    try:
        with DeferredStop() as stop:  # Ray crashes at exit if it is interrupted here, and replaces the SIGTERM handler
            _init(address)
            atexit.register(_finish_shutdown)  # is called before Ray's own handler
            stop.stop_if_requested()
    except SystemExit:  # of Ray's SIGTERM handler
        signal.raise_signal(signal.SIGTERM)
        raise


def _init(address: str) -> None:
    import ray

    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address == LOCAL else None,
        )
    except Exception as error:  # of Ray, gRPC, sockets, …
        message = " ".join(str(error).split())
        if address == LOCAL:
            raise UserError(f"Ray cannot start a cluster on this machine: {first_line(error)[:300]}") from None
        if "mismatch" in message.lower():
            raise UserError(
                f"the cluster at {address} has other versions: {message[:300]}; install the same versions"
            ) from None
        raise UserError(
            f"cannot connect to the Ray cluster at {address}: {first_line(error)[:300]}; if it requires a token, "
            "set RAY_AUTH_MODE=token and provide the token on this machine too"
        ) from None


def _finish_shutdown() -> None:
    """Let Ray end its processes at exit: another Ctrl-C would print a traceback and leave some of them running."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _probe(address: str) -> None:
    """Check that a Ray cluster answers, because Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        raise UserError(f"--ray-address {address!r} cannot be read; write it as HOST:PORT, or auto")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS) as connection:
            connection.sendall(PREFACE)
            answer = connection.recv(9, socket.MSG_WAITALL)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"there is no Ray cluster at {address}: {first_line(error)}; start one with `ray start --head`"
        ) from None
    if answer[3:4] != b"\x04":
        raise UserError(f"the server at {address} is not a Ray cluster; give the port of `ray start --head`")


def nodes() -> list[dict[str, Any]]:
    """Return the nodes that are alive."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def has_gpus() -> bool:
    """Return whether any node has a GPU."""
    return any(node["Resources"].get("GPU", 0) >= 1 for node in nodes())


def worker_slots(device: str) -> list[WorkerSlots]:
    """Return the workers that fit on each node; all have equally many cores, so that none changes the results."""
    alive = nodes()
    cores = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in alive}
    gpus = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) if device == "cuda" else 0 for node in alive}
    per_worker = [
        count // max(1, gpus[node]) for node, count in cores.items() if count and (gpus[node] or device == "cpu")
    ]
    each = max(1, min([MAX_CORES, *per_worker]))
    slots = []
    for node in alive:
        name = node["NodeID"]
        workers = min(gpus[name], cores[name] // each) if device == "cuda" else cores[name] // each
        if workers:
            slots.append(WorkerSlots(name, node.get("NodeManagerAddress", name), workers, each))
    return slots
