"""Signals that ask the program to stop while it has child processes, all of which must end with it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # a kill, and a closed terminal


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C inside this block."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (the signature of a signal handler)
        raise KeyboardInterrupt

    with _handled_by(interrupt, *STOP_SIGNALS):
        yield


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP inside this block."""
    with _handled_by(signal.SIG_IGN, signal.SIGINT, *STOP_SIGNALS):
        yield


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
