"""A plan computed over a Ray cluster: runs spread over workers, each of which is a batched executor.

Whoever drives it plans nothing and trains nothing: it hands out runs, hears of their measurements, and keeps where each
stood last, so that a lost worker costs what it had done since. Ray is imported only where it is used.
"""

from .connect import choose_device, connect
from .driver import Crew

__all__ = ["Crew", "choose_device", "connect"]
