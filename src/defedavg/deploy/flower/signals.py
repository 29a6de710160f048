"""Signals that ask the program to stop while it has child processes, all of which must end with it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

# A kill, and a closed terminal.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


def signals_as_interrupts() -> AbstractContextManager[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C inside this block, unless they are handled or ignored already."""
    default = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    return _handled_by(signal.default_int_handler, *default)


def signals_ignored() -> AbstractContextManager[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP inside this block."""
    return _handled_by(signal.SIG_IGN, signal.SIGINT, *STOP_SIGNALS)


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], Any] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
