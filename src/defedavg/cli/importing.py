"""Imports of many modules at once, PyTorch above all, which the garbage collector need not search."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from ..planning.plan import without_gc


@contextmanager
def importing() -> Iterator[None]:
    """Import modules in the block without the garbage collector, and exclude them from its later searches.

    PyTorch makes hundreds of thousands of objects that live until the process ends. Searching them for garbage, while
    they are made, during a run and at the end of the process, takes longer than planning a run.
    """
    with without_gc():
        yield
    gc.freeze()
