"""Checks of ``[task]`` before any data are read."""

from __future__ import annotations

from collections.abc import Iterable

from .settings import Settings


def check_tasks(runs: Iterable[Settings]) -> None:
    """Raise ``UserError`` for the first run whose data set, model or split does not exist or cannot have its options.

    What a task module makes is not checked.
    """
    from ..tasks.partition import OPTIONS
    from ..tasks.task_names import check_task

    for task in dict.fromkeys(run.task for run in runs if not run.task.module):
        options = {name: getattr(task, name) for name in OPTIONS}
        check_task(task.data, task.model, task.split, normalise=task.normalise, test_share=task.test_share, **options)
