"""SIGTERM and SIGHUP stop a command as Ctrl-C does: it keeps what it has, says so in one line, and ends."""

from __future__ import annotations

import signal
from types import FrameType

_received: list[signal.Signals] = []


def stop_on_signals() -> None:
    """Treat a kill and a closed terminal like Ctrl-C; a signal that the parent process ignores (nohup) is ignored."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _received.append(signal.Signals(number))
    raise KeyboardInterrupt


def stopped_by() -> str:
    """Return what stopped the command: "stopped by Ctrl-C", "stopped by SIGTERM" or "stopped by SIGHUP"."""
    return f"stopped by {_received[0].name if _received else 'Ctrl-C'}"


def stopped_code() -> int:
    """Return the exit code of a stopped command: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    return 128 + (_received[0] if _received else signal.SIGINT)
