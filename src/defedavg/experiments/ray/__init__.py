"""A plan computed over a Ray cluster: runs spread over workers, each of which is a batched executor.

Whoever drives it plans nothing and trains nothing: it hands out runs, hears of their measurements, and keeps where each
stood last, so that a lost worker costs what it had done since. Ray is imported only where it is used.
"""

from .connection import choose_device, connect
from .scheduler import RayScheduler

__all__ = ["RayScheduler", "choose_device", "connect"]
