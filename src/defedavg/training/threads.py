"""The threads of a CPU: how many PyTorch computes with, work that is divided among them, and the memory they free."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache, lru_cache
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")

MALLOC_SETTINGS = {-3: 32 << 20, -2: 16 << 20, -1: 1 << 30}  # M_MMAP_THRESHOLD, M_TOP_PAD and M_TRIM_THRESHOLD of glibc


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use ``count`` threads for this thread's operations, and for MKL as a whole; restore the number afterwards."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def in_parallel(work: Sequence[Callable[[], T]], count: int, stop: Callable[[], None] = lambda: None) -> list[T]:
    """Return the results of all calls, computed by ``count`` threads; each call uses one thread.

    On an error or Ctrl-C no call is started, ``stop`` asks those in progress to end, and they are waited for. One call
    after the other in a thread needs no barrier, at which OpenMP's threads wait for each other after every operation.
    """
    with threads(1):  # so that the order of a sum does not depend on other work
        if count == 1 or len(work) == 1:
            return [call() for call in work]
        futures: list[Future[T]] = []
        try:
            futures.extend(_workers(count).submit(call) for call in work)
            return [future.result() for future in futures]
        except BaseException:
            stop()
            for future in futures:
                future.cancel()
            wait(futures)
            raise


@cache
def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory: every step allocates tensors of the same sizes.

    Otherwise it returns them to the system, which has to clear their pages again: a tenth of the time of a ResNet.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return  # the user's choice
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return
    for setting, value in MALLOC_SETTINGS.items():
        mallopt(setting, value)


@lru_cache(maxsize=8)
def _workers(count: int) -> ThreadPoolExecutor:
    workers, all_started = ThreadPoolExecutor(count, "worker", torch.set_num_threads, (1,)), Barrier(count)
    # All start now: the number of MKL's threads is that of the last call of set_num_threads in any thread.
    wait([workers.submit(all_started.wait) for _ in range(count)])
    return workers


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # a child has none of its parent's threads
