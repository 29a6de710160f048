"""Figures of results: one style for all of them, and the same bytes for the same data.

Figures are built with matplotlib's objects and a private style, never through pyplot or global settings. An algorithm
has the same colour, line style and marker in every figure. Between two evaluations a curve holds the last value, so it
shows no value that was not evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from ..errors import UserError, unknown
from ..fileio import replacing, writing
from .palette import Look, looks

Floats: TypeAlias = NDArray[np.float64]
Against: TypeAlias = Literal["seconds", "rounds"]

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9.5,
    "axes.edgecolor": "0.35",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.7,
    **{f"{a}tick.{key}": v for a in "xy" for key, v in (("color", "0.35"), ("labelcolor", "0.15"), ("labelsize", 9))},
    "legend.fontsize": 9,
    "legend.frameon": False,
    **{f"{part}.facecolor": "white" for part in ("figure", "axes", "savefig")},
    "hatch.linewidth": 0.7,
    "pdf.fonttype": 42,
}

# Okabe and Ito's colours, ordered so that neighbours differ in lightness as well as in hue.
PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#CC79A7", "#D55E00")

# Values of one quantity, from dark to light.
_LEVELS: tuple[tuple[str, Any, str], ...] = (
    ("#30123B", "-", "o"),
    ("#7A1F6E", (0, (5, 1.6)), "s"),
    ("#C8423F", (0, (5, 1.4, 1.2, 1.4)), "^"),
    ("#F08B25", (0, (3, 1.2)), "D"),
    ("#E3C02B", (0, (1.4, 1.1)), "v"),
)

_TARGET: dict[str, Any] = {"color": "0.3", "linewidth": 0.9, "linestyle": (0, (4, 3))}
_TICKS: dict[str, Any] = {"steps": [1, 2, 5, 10], "min_n_ticks": 1}

MARKERS = 6  # on every curve
DIVERGED_FACTOR = 3.0  # losses above this multiple of the first one are cut off: the run diverges

_FORMATS: dict[str, dict[str, Any]] = {
    ".png": {"dpi": 150, "metadata": {"Software": None}},
    ".pdf": {"dpi": 300, "metadata": {"CreationDate": None}},
}
FORMATS = tuple(_FORMATS)
"""The endings of the formats in which figures are written."""


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure in the format of the suffix, or as .png and .pdf without one, and return the paths written."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix and suffix not in _FORMATS:
        known = " or ".join(_FORMATS)
        raise UserError(f"a figure cannot be written as {path.suffix!r}; use {known}, or no suffix for both")
    if not path.name:
        raise UserError(f"a figure needs a file name, but {str(path)!r} is a folder; name a file in it")
    written = [path] if suffix else [path.with_name(path.name + each) for each in _FORMATS]
    with matplotlib.rc_context(STYLE):
        for file in written:
            kind = file.suffix.lower()
            with writing(file), replacing(file) as scratch:
                figure.savefig(scratch, format=kind[1:], **_FORMATS[kind])
    return written


@dataclass(frozen=True, slots=True)
class Curve:
    """The evaluations of one run; runs with the same label are seeds of one setting."""

    algorithm: str  # if empty, labels are values of one quantity, drawn from dark to light in the order given
    label: str
    seconds: tuple[float, ...]
    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]


Panels: TypeAlias = Mapping[str, Sequence[Curve]]
Points: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""The x and y of one seed."""


@dataclass(frozen=True, slots=True)
class Band:
    """Mean, minimum and maximum over the seeds that are running at every x."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def band(runs: Iterable[Points]) -> Band:
    """Return the band of seeds on the union of their x; each holds its last value, from its first x to its last."""
    pairs = [(np.asarray(x, float), np.asarray(y, float)) for x, y in runs if len(x)]
    if not pairs:
        return Band(*np.empty((4, 0)))
    grid = np.unique(np.concatenate([x for x, _ in pairs]))
    held, running = np.zeros((len(pairs), grid.size)), np.zeros((len(pairs), grid.size), bool)
    for row, (x, y) in enumerate(pairs):
        # Two merges can share a time: the last evaluation at that time counts.
        last = np.searchsorted(x, grid, side="right") - 1
        held[row] = np.where(np.isfinite(y), y, np.nan)[np.maximum(last, 0)]
        running[row] = (grid >= x[0]) & (grid <= x[-1])
    mean = np.where(running, held, 0.0).sum(axis=0) / running.sum(axis=0)
    low, high = np.where(running, held, np.inf).min(axis=0), np.where(running, held, -np.inf).max(axis=0)
    return Band(grid, mean, low, high)


def accuracy_curves(
    panels: Panels,
    *,
    target: Mapping[str, float] | float | None = None,
    against: Against = "seconds",
    name: str = "test accuracy",
    columns: int = 4,
    clock: str = "simulated seconds",
) -> Figure:
    """Draw test accuracy over a clock or rounds, one panel per title, with target accuracies where given."""
    targets = target if isinstance(target, Mapping) else {} if target is None else dict.fromkeys(panels, target)
    for title in targets:
        if title not in panels:
            raise unknown("panel", title, panels)
    return _curves(panels, "accuracy", against, targets, name, columns, clock)


def loss_curves(
    panels: Panels,
    *,
    against: Against = "seconds",
    name: str = "test loss",
    columns: int = 4,
    clock: str = "simulated seconds",
) -> Figure:
    """Draw loss, on a log axis where every loss is above zero; runs that diverge are cut off to keep others legible."""
    return _curves(panels, "loss", against, {}, name, columns, clock)


def _curves(
    panels: Panels,
    measure: str,
    against: Against,
    targets: Mapping[str, float],
    name: str,
    max_columns: int,
    clock: str,
) -> Figure:
    every = [curve for curves in panels.values() for curve in curves]
    if not any(getattr(curve, against) for curve in every):
        raise UserError("there is nothing to draw: no run has an evaluation")
    styles = _looks(every)
    columns = min(len(panels), max_columns)
    rows = math.ceil(len(panels) / columns)
    width = 1.1 + 3.3 * columns
    legend_columns = max(1, min(2 * columns + 1, int(width / (0.75 + 0.08 * max(map(len, styles))))))
    height = 2.75 * rows + 0.15 + 0.22 * math.ceil((len(styles) + bool(targets)) / legend_columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
        for spare in axes[len(panels) :]:
            spare.remove()
        for position, (title, curves) in enumerate(panels.items()):
            ax = axes[position]
            _panel(ax, curves, measure, against, styles)
            ax.set(title=title, xlabel={"seconds": clock}.get(against, against))
            if position % columns == 0:
                ax.set_ylabel(name)
            if title in targets:
                value = targets[title]  # written outside the axes, where no curve crosses it
                ax.axhline(value, zorder=2.5, gid="target", **_TARGET)
                axis = ax.get_yaxis_transform()
                ax.text(1.01, value, f"{value:g}", transform=axis, va="center", size=8.5, color="0.3")
        if measure == "loss":
            _scale_losses(axes[0], [curve.loss for curve in every])
        handles = [Line2D([], [], label=label, markersize=5, lw=1.6, **style) for label, style in styles.items()]
        handles += [Line2D([], [], label="target", **_TARGET)] if targets else []
        figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns, handlelength=3.2)
        _freeze(figure)
    return figure


def _scale_losses(ax: Axes, losses: Sequence[Sequence[float]]) -> None:
    """Make the y axis logarithmic where every loss is above zero, and cut off what diverges."""
    values = [value for run in losses for value in run if math.isfinite(value)]
    if not values or min(values) <= 0:
        return
    first = max(run[0] for run in losses if run and math.isfinite(run[0]))
    top = min(max(values), DIVERGED_FACTOR * first)
    _log(ax, "y", min(values), top)
    if top < max(values):
        ax.set_ylim(min(values) / 1.2, top)


def _looks(curves: Sequence[Curve]) -> dict[str, Look]:
    if any(curve.algorithm for curve in curves):
        return looks((curve.algorithm, curve.label) for curve in curves)
    labels = dict.fromkeys(curve.label for curve in curves)
    levels = [dict(zip(("color", "linestyle", "marker"), level, strict=True)) for level in _LEVELS]
    return {label: levels[position % len(levels)] for position, label in enumerate(labels)}


def _panel(ax: Axes, curves: Sequence[Curve], measure: str, against: Against, styles: Mapping[str, Look]) -> None:
    seeds: dict[str, list[Points]] = {}
    for curve in curves:
        seeds.setdefault(curve.label, []).append((getattr(curve, against), getattr(curve, measure)))
    ends = [float(x[-1]) for runs in seeds.values() for x, _ in runs if x and x[-1] > 0]
    log = bool(ends) and max(ends) > 8 * min(ends)
    shifted = enumerate(seeds.items())  # markers of different curves do not overlap
    starts = [_draw_series(ax, runs, styles[label], log, i / len(seeds)) for i, (label, runs) in shifted]
    ax.grid(True)
    if log:
        _log(ax, "x", min(starts), max(ends))
    else:
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=against == "rounds", **_TICKS))


def _draw_series(ax: Axes, runs: Sequence[Points], style: Mapping[str, Any], log: bool, marker_shift: float) -> float:
    """Draw the mean over seeds, and their band where there are several; return the first x drawn, or infinity."""
    over_seeds = band(runs)
    shown = over_seeds.x > 0 if log else np.ones(over_seeds.x.size, bool)
    x = over_seeds.x[shown]
    if not x.size:
        return math.inf
    if len(runs) > 1:
        low, high = over_seeds.low[shown], over_seeds.high[shown]
        ax.fill_between(x, low, high, step="post", color=style["color"], alpha=0.16, lw=0, zorder=2, gid="band")
    markers = _marker_indices(x, log, marker_shift)
    ax.plot(x, over_seeds.mean[shown], drawstyle="steps-post", lw=1.5, ms=4.5, markevery=markers, zorder=3, **style)
    return float(x[0])


def _marker_indices(x: Floats, log: bool, shift: float) -> list[int]:
    """Return the points with markers: evenly along the axis, shifted for each curve."""
    along = np.log(x) if log else x
    wanted = along[0] + (along[-1] - along[0]) * (np.arange(MARKERS) + 0.2 + 0.6 * shift) / MARKERS
    return sorted(set(np.minimum(np.searchsorted(along, wanted), x.size - 1).tolist()))


def _log(ax: Axes, which: Literal["x", "y"], low: float, high: float) -> None:
    """Make an axis logarithmic, with plain numbers at enough ticks for its range."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    ax.set(**{f"{which}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _freeze(figure: Figure) -> None:
    """Compute the layout once: solving it again at every save may shift it slightly."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def split_map(counts: NDArray[Any], title: str) -> Figure:
    """Draw samples per client (x, from 0) and class (y) as an image, with the numbers where they fit."""
    counts = np.asarray(counts)
    if counts.ndim != 2 or not counts.size:
        raise UserError("there is nothing to draw: the counts must be a table of clients by classes")
    clients, classes = counts.shape
    size = (min(max(4.2, 1.7 + 0.36 * clients), 8.4), min(max(2.6, 1.1 + 0.26 * classes), 7.0))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        ax = figure.subplots()
        scale: dict[str, Any] = {"cmap": "Blues", "vmin": 0, "vmax": max(1, counts.max()), "interpolation": "nearest"}
        extent = (-0.5, clients - 0.5, -0.5, classes - 0.5)
        image = ax.imshow(counts.T, aspect="auto", origin="lower", extent=extent, **scale)
        if clients <= 16 and classes <= 20:
            for client, label in np.argwhere(counts > 0).tolist():
                samples = counts[client, label]
                shade = "white" if samples > 0.6 * counts.max() else "0.15"
                ax.text(client, label, f"{samples:g}", ha="center", va="center", size=7.5, color=shade)
        ax.set(title=title, xlabel="client", ylabel="class")
        for axis, number in ((ax.xaxis, clients), (ax.yaxis, classes)):
            axis.set_major_locator(MaxNLocator(min(number, 10) + 1, integer=True, **_TICKS))
        ax.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=ax, label="samples", pad=0.02, ticks=MaxNLocator(6, integer=True, **_TICKS))
        bar.outline.set_visible(False)
        _freeze(figure)
    return figure
