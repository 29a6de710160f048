"""Ports of this machine."""

from __future__ import annotations

import socket

from ..errors import UserError

HOST = "127.0.0.1"


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Raise ``UserError`` if a port is in use."""
    why = _fault(HOST, port)
    if why is not None:
        raise UserError(f"port {port} cannot be used: {why}; choose another with --port")


def check_address(host: str, port: int) -> None:
    """Raise ``UserError`` if a server cannot listen at an address."""
    why = _fault(host, port)
    if why is not None:
        raise UserError(f"the server cannot listen at {host}:{port}: {why}; choose another address or port")


def _fault(host: str, port: int) -> str | None:
    """Return why no server can listen at an address; None: it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be a host's
        return getattr(error, "strerror", None) or str(error)
    return None
