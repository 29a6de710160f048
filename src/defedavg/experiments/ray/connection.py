"""Reaching a Ray cluster, and what it is made of; everything that can go wrong with it is one line."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import socket
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ...errors import UserError, first_line, unknown

CORES = 4  # of a worker without a GPU, at most: beyond, what is not shared between threads begins to count
SECONDS = 10.0  # to answer

# Ray speaks HTTP/2, whose server answers the client's first words, and a frame of no settings, with its own settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker can be: a node, and what of it is for one worker."""

    node: str
    name: str
    workers: int
    cores: int


def versions() -> dict[str, str]:
    """What must be the same on every node."""
    return {
        "Python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "ray", "defedavg")},
    }


def connect(address: str | None) -> None:
    """Join the cluster at an address (or at RAY_ADDRESS); without one, begin a cluster on this machine alone."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--executor ray needs Ray, which is not installed; pip install 'defedavg[ray]'")
    import ray

    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address not in (None, "auto", "local"):
        _knock(str(address))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a worker without a GPU leaves CUDA alone
    try:
        ray.init(
            address=None if address == "local" else address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=None if address else False,
        )
    except Exception as error:  # Ray's own, those of gRPC, of sockets, …
        said = " ".join(str(error).split())
        if "mismatch" in said.lower():
            raise UserError(f"the cluster at {address} has other versions: {said[:300]}; install the same") from None
        raise UserError(
            f"the Ray cluster at {address} cannot be joined: {first_line(error)[:300]}; if it asks for a token, "
            "RAY_AUTH_MODE=token and the token must be here too"
        ) from None


def _knock(address: str) -> None:
    """Ray itself would try for a long time."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        raise UserError(f"--ray-address {address!r} cannot be read; write it as HOST:PORT, or auto")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS) as line:
            line.sendall(GREETING)
            answer = line.recv(9, socket.MSG_WAITALL)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"there is no Ray cluster at {address}: {first_line(error)}; start one with `ray start --head`"
        ) from None
    if answer[3:4] != b"\x04":
        raise UserError(f"what answers at {address} is no Ray cluster; give the port of `ray start --head`")


def nodes() -> list[dict[str, Any]]:
    """Those that are alive."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def has_gpus() -> bool:
    """Whether any node has a GPU."""
    return any(node["Resources"].get("GPU", 0) >= 1 for node in nodes())


def places(device: str) -> list[Place]:
    """For every node how many workers it takes; all have the same number of cores, so that bits are the same."""
    alive = nodes()
    cores = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in alive}
    units = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) if device == "cuda" else 0 for node in alive}
    counts = [
        count // max(1, units[node]) for node, count in cores.items() if count and (units[node] or device == "cpu")
    ]
    each = max(1, min([CORES, *counts]))
    found = []
    for node in alive:
        name = node["NodeID"]
        workers = min(units[name], cores[name] // each) if device == "cuda" else cores[name] // each
        if workers:
            found.append(Place(name, node.get("NodeManagerAddress", name), workers, each))
    return found


def choose_device(address: str | None, name: str) -> str:
    """``cpu`` or ``cuda`` for the workers, from what was asked for and what the cluster has."""
    if name not in ("auto", "cpu", "cuda"):
        raise unknown("device", name, ("auto", "cpu", "cuda"))
    connect(address)
    if name == "cuda" and not has_gpus():
        raise UserError("no node of the cluster has a GPU; use --device cpu")
    return "cuda" if name != "cpu" and has_gpus() else "cpu"
