"""DECIDE: one file per algorithm. Each is a state machine without clock, socket, tensor or global randomness."""

from __future__ import annotations

from ..compat import renamed_names
from .algorithm_registry import ALGORITHMS, BUILT_IN, algorithm, register
from .base import BufferedRound, NoSettings, SampledRound, ServerMachine, Setup

__all__ = [
    "ALGORITHMS",
    "BUILT_IN",
    "BufferedRound",
    "NoSettings",
    "SampledRound",
    "ServerMachine",
    "Setup",
    "algorithm",
    "register",
]

__getattr__ = renamed_names(__name__)
