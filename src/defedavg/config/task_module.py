"""``task.module``: the user's own function that makes the task, in a Python file or an installed module.

    def make(config, client):
        ...
        return make_task(model=..., train=..., test=..., clients=...)

``config`` maps names like ``training.local_steps``, and ``seed``, to the settings of the run. ``client`` is None in a
simulation and on the server of a deployment, and then the task has all clients. On a client of a deployment it is the
client's number, and a task that holds the data of this client alone is enough.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, first_line
from ..plugins import failures_in, import_file

if TYPE_CHECKING:
    from ..tasks import Task

MakeTask = Callable[[Mapping[str, Any], int | None], "Task"]
"""(settings of the run, number of the client or None) -> the task."""


def absolute_spec(spec: str, folder: Path | None) -> str:
    """Return ``FILE.py:function`` with an absolute path, relative to a folder; leave ``module:function`` as it is."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise UserError(f"task.module is {spec!r}; write it as my_task.py:make, the file and the function")
    try:
        return f"{((folder or Path()) / place).resolve()}:{name}" if file_of(spec) else spec
    except (OSError, ValueError) as error:
        raise UserError(f"task.module is {spec!r}; its path cannot be used: {first_line(error)}") from None


def file_of(spec: str) -> str:
    """Return the path of the Python file of ``FILE.py:function``; empty for an installed module."""
    place = spec.rpartition(":")[0]
    return place if place.endswith(".py") else ""


def task_from_module(spec: str | MakeTask, config: Mapping[str, Any], client: int | None) -> Task:
    """Return the task that the user's function makes; every failure is one line with file and line number."""
    from ..tasks import Task

    make, where = (spec, getattr(spec, "__name__", "?")) if callable(spec) else _find(spec)
    with failures_in(where):
        task = make(dict(config), client)
    if not isinstance(task, Task):
        raise UserError(f"{where}: the function returned {type(task).__name__}; return what defedavg.make_task makes")
    return task


def _find(spec: str) -> tuple[MakeTask, str]:
    """Import the function, and return it with the path of its file."""
    place, _, name = absolute_spec(spec, None).rpartition(":")
    try:
        module = import_file(place) if file_of(spec) else importlib.import_module(place)
    except UserError:
        raise
    except Exception as error:  # whatever the module raises when it is imported
        raise UserError(f"task.module {spec!r} cannot be imported: {first_line(error)}") from None
    where = module.__file__ or place
    make = getattr(module, name, None)
    if not callable(make):
        raise UserError(f"{where} has no function {name!r}; task.module names it as FILE.py:function")
    return make, where
