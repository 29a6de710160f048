"""Being asked to stop, while processes of ours are running: whatever asks, all of them are ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGHUP)  # a kill, and a terminal that is closed


@contextmanager
def as_interrupts() -> Iterator[None]:
    """A kill, or a terminal that is closed, is a Ctrl-C in here."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled_by(interrupt, *ASKING):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Nobody who is impatient gets in here."""
    with _handled_by(signal.SIG_IGN, signal.SIGINT, *ASKING):
        yield


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], Any] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread is asked
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
