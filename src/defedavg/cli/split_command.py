"""``defedavg split``: show how the samples are split among the clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from typer import Option

from ..config.build import build_task
from ..errors import UserError
from ..report import tables
from .data_command import DataDir
from .options import Json, Plugin, Set, StudyFile, load_study, out, print_json, print_note, working

SHOWN_CLIENTS = 1_000  # of a split that is drawn lazily, which may have a million


def split(
    file: StudyFile,
    overrides: Set = None,
    plot: Annotated[Path | None, Option(metavar="FILE.png", help="Draw clients × classes (.png or .pdf).")] = None,
    _data_dir: DataDir = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Show which client holds which samples, for the first setting and seed of a study.

    Example: `defedavg split my.toml --set task.split=classes --plot split.png`
    """
    from ..tasks import LazyPartition, class_counts

    study = load_study(file, overrides, plugin)
    with working("splitting the data …"):
        task = build_task(study.points()[0].settings, study.seeds[0])
        clients = task.clients[:SHOWN_CLIENTS] if isinstance(task.clients, LazyPartition) else task.clients
        classes = task.classes or 0
        counts = class_counts(clients, task.train.targets.numpy(), classes) if classes else np.zeros((len(clients), 0))
    if plot and not classes:
        raise UserError("the task has no classes, so there is nothing to plot; leave out --plot")
    if plot:
        from ..report.plots import save, split_map

        save(split_map(counts, task.name), plot)
        print_note(f"plot: {plot}")
    if as_json:
        print_json([{"client": i, "samples": samples.tolist()} for i, samples in enumerate(clients)])
        return
    rows = [(str(i), str(len(samples)), *map(str, counts[i])) for i, samples in enumerate(clients)]
    out.print(tables.make(task.name, ("client", "samples", *map(str, range(classes))), rows))
