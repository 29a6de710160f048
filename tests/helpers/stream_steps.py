"""Steps of a server over gRPC until something has happened."""

from __future__ import annotations

import time
from collections.abc import Callable

from helpers.streams import StreamWorld


def until(world: StreamWorld, condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Let the server of a world work until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, world.log_lines[-5:]
        if not world.coordinator.step():
            world.transport.wait(0.05)
