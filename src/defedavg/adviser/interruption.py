"""Ctrl-C before any candidate was raced: there is no best so far, so a caller must be told that there is no advice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NothingRacedError(KeyboardInterrupt):
    """An interruption before any candidate was raced."""


@contextmanager
def before_racing() -> Iterator[None]:
    """Raise ``NothingRacedError`` if Ctrl-C ends the block, in which no candidate is raced."""
    try:
        yield
    except KeyboardInterrupt:
        raise NothingRacedError from None
