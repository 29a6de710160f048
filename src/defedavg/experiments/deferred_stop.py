"""Ctrl-C as a request: the runs in progress are saved when their batch ends, and then the command stops.

SIGTERM and SIGHUP are deferred in the same way where a command handles them. A second signal stops at once, unless it
follows within a second: some programs, such as ``timeout``, send one to the process and one to its group.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
SAME_REQUEST = 1.0  # seconds


class DeferredStop:
    """Within the block, the first signal is a request that ``stop_if_requested`` answers; ``notify`` receives a line.

    Outside the main thread, which alone receives signals, and for signals without a handler, nothing changes.
    """

    def __init__(self, notify: Callable[[str], None] = lambda _line: None) -> None:
        self._notify = notify
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._received: int | None = None
        self._since = 0.0

    @property
    def requested(self) -> bool:
        """Whether a signal was received."""
        return self._received is not None

    def __enter__(self) -> DeferredStop:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            if time.monotonic() - self._since >= SAME_REQUEST:
                self._handlers[number](number, frame)
            return
        self._received, self._since = number, time.monotonic()
        self._notify("stopping when the current batch ends, to save it; Ctrl-C again stops at once")

    def stop_if_requested(self) -> None:
        """Do what the signal would have done, which is to raise ``KeyboardInterrupt``."""
        if self._received is not None:
            self._handlers[self._received](self._received, None)
