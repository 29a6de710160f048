"""Everything that imports Flower, or starts its processes. Apps import ``server_app`` and ``client_app`` from here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client_entry import client_app as client_app
    from .server_entry import server_app as server_app

_LAZY = {"server_app": "server_entry", "client_app": "client_entry"}


def __getattr__(name: str) -> Any:
    """Import an entry point when it is first used: a client must not wait for the server's imports."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
