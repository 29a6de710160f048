"""The static figures of a run folder, drawn on request: metric and loss over seconds and rounds, and the partition."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ..errors import UserError
from ..fileio import writing
from ..runstore.layout import RunFiles
from ..runstore.metrics import common_metric
from ..runstore.reader import RunEntry, RunFolder
from .groups import differences_of, differing_keys, groups_of, series_of
from .plots import FORMATS, Against, Curve, accuracy_curves, loss_curves, save, split_map
from .series import Series

AXES: tuple[Against, ...] = ("seconds", "rounds")


def curve_of(run: RunEntry) -> Curve:
    """Return the evaluations of a run as a curve, without those whose loss is not finite."""
    trail = run.trail
    known = [(i, loss) for i, loss in enumerate(trail.loss) if loss is not None]
    accuracy = [trail.accuracy[i] for i, _ in known]
    return Curve(
        algorithm=run.algorithm,
        label=run.label,
        seconds=tuple(trail.seconds[i] for i, _ in known),
        rounds=tuple(int(trail.rounds[i]) for i, _ in known),
        accuracy=tuple(math.nan if value is None else value for value in accuracy),
        loss=tuple(loss for _, loss in known),
    )


def draw_run(folder: RunFolder, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw the figures of a run into its folder, in these formats, and return their paths.

    The folder is untrusted: its names are neither paths nor formulas, and a link in it is not written through.
    """
    plots = RunFiles(folder.path).plots
    with writing(plots):
        for path in (plots, *(plots.iterdir() if plots.is_dir() else ())):
            if path.is_symlink():
                raise UserError(f"{path} is a link, and links are not followed; remove it")
        plots.mkdir(exist_ok=True)
    with matplotlib.rc_context({"text.parse_math": False}):
        return [
            path
            for name, figure in figures_of(folder)
            for suffix in formats
            for path in save(figure, plots / f"{name}{suffix}")
        ]


def figures_of(folder: RunFolder) -> Iterator[tuple[str, Figure]]:
    """Yield the figures by name; a run without evaluations has none."""
    panels, target = _panels(folder)
    if not panels:
        return
    metric = common_metric(run.metric for run in folder.runs)
    word = re.sub(r"[^A-Za-z0-9._=-]+", "_", metric)
    for axis in AXES:
        name = f"test {metric}"
        accuracy = accuracy_curves(panels, target=target, against=axis, name=name, clock=folder.clock)
        yield f"{word}-over-{axis}", accuracy
        yield f"loss-over-{axis}", loss_curves(panels, against=axis, clock=folder.clock)
    if folder.partition is not None:
        yield "split", split_map(np.array(folder.partition.counts), folder.partition.title)


def _panels(folder: RunFolder) -> tuple[dict[str, list[Curve]], dict[str, float]]:
    """Return the curves of every panel, and targets: tasks and fleets that a study sweeps have a panel each.

    A study without evaluations has no panel.
    """
    drawn = [(group, curves) for group in groups_of(series_of(folder)) if (curves := _curves(group))]
    if not drawn:
        return {}, {}
    groups = [group for group, _ in drawn]
    titles = [folder.title] if len(groups) == 1 else differences_of(groups)
    if len(set(titles)) < len(groups):  # a damaged folder: nothing that a title could name differs
        return {folder.title: [curve for _, curves in drawn for curve in curves]}, {}
    named = differing_keys(groups)
    panels = {
        title: _relabelled(curves, _short_labels(group, named))
        for title, (group, curves) in zip(titles, drawn, strict=True)
    }
    targets = {title: group[0].target for title, group in zip(titles, groups, strict=True)}
    return panels, {title: target for title, target in targets.items() if target}


def _curves(group: Sequence[Series]) -> list[Curve]:
    return [curve for series in group for run in series.runs if (curve := curve_of(run)).seconds]


def _relabelled(curves: Sequence[Curve], labels: Mapping[str, str]) -> list[Curve]:
    return [replace(curve, label=labels.get(curve.label, curve.label)) for curve in curves]


def _short_labels(group: Sequence[Series], named: Sequence[str]) -> dict[str, str]:
    """Return the labels of a panel without the values that its title names, if they still differ without them."""
    short = {series.label: series.label for series in group}
    for series in group:
        for key in named:
            value = f" {key.split('.')[-1]}={series.settings.get(key)}"
            short[series.label] = short[series.label].replace(value, "", 1)
    return short if len(set(short.values())) == len(short) else {}
