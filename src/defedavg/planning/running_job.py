"""The job of a client, as the simulators follow it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RunningJob:
    """The job that a client is training, or trained last."""

    index: int
    version: int
    start: float
    end: float
    step: float
