"""Checks of settings that several algorithms have."""

from __future__ import annotations

from ..errors import UserError

MAX_WAIT_SECONDS = 1e9


def check_concurrency(name: str, concurrency: int) -> None:
    """Raise ``UserError`` for a number of concurrent clients below zero."""
    if concurrency < 0:
        raise UserError(f"{name}: concurrency is {concurrency}; give a number of clients, or 0 for all")


def check_wait(name: str, seconds: float) -> None:
    """Raise ``UserError`` for a wait that is not above zero, or too long."""
    if not 0.0 < seconds <= MAX_WAIT_SECONDS:
        limit = f"{MAX_WAIT_SECONDS:,.0f}"
        raise UserError(f"{name}: wait_seconds is {seconds}; give a number above zero, at most {limit}")
