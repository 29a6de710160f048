"""The last handler of errors: what was not foreseen is one line, and a file with the details."""

from __future__ import annotations

import os
import tempfile
import traceback

from ..errors import first_line

DEBUG_VARIABLE = "DEFEDAVG_DEBUG"
"""If this environment variable is set, the traceback is also printed."""

_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed; PyTorch reports it as a ``RuntimeError``."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def memory_line(error: BaseException) -> str:
    """Return what to do about an allocation that failed."""
    what = f" ({first_line(error)})" if str(error) else ""
    return (
        f"there is not enough memory{what}; reduce clients.num_clients, training.local_steps, training.batch_size, "
        "the model or --max-batch-jobs"
    )


def unforeseen_line(error: BaseException) -> str:
    """Return one line for an error that was not foreseen; it names the file to which the details were written."""
    what = f"unexpected {type(error).__name__}: {first_line(error)}"
    try:
        return f"{what}; the details are in {write_details(error)}"
    except OSError as failure:
        return f"{what}; no details could be written ({first_line(failure)}); set {DEBUG_VARIABLE}=1 to print them"


def write_details(error: BaseException) -> str:
    """Write versions, command line and traceback to a file that only this user can read, and return its path."""
    from ..runstore.provenance import provenance

    lines = [f"{name}: {value}\n" for name, value in provenance().items()]
    text = "".join([*lines, "\n", *traceback.format_exception(error)])
    handle, path = tempfile.mkstemp(prefix="defedavg-error-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return path


def is_debugging() -> bool:
    """Return whether tracebacks are to be printed."""
    return bool(os.environ.get(DEBUG_VARIABLE))
