"""Our seconds to the target against the paper's, one point per cell of Table 1, for several readings side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..report.palette import look
from ..report.plots import STYLE
from .infer_report import WITHIN
from .published import ALGORITHM_NAMES, BOUNDS

Rows = Sequence[Mapping[str, Any]]

_RANGE = (10.0, 6000.0)  # seconds on both axes
_TOP = 4700.0  # the height of cells without a time
_SIZE = 26.0


def scatter(panels: Mapping[str, Rows], kind: str = "first_hit") -> Figure:
    """Draw rows of Table 1 by title: a filled point is a mean over seeds that all reached the target.

    A triangle at the top is a cell in which some seed missed it, filled where the paper missed it, too. The band is a
    factor of ``WITHIN``.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * len(panels), 5.0), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for each, (title, rows) in zip(axes, panels.items(), strict=True):
            _panel(each, rows, kind)
            each.set_title(title)
        axes[0].set_ylabel("seconds here")
        figure.legend(handles=_legend(), loc="outside lower center", ncols=2 * len(panels))
    return figure


def _panel(axes: Axes, rows: Rows, kind: str) -> None:
    axes.fill_between(_RANGE, [t / WITHIN for t in _RANGE], [t * WITHIN for t in _RANGE], color="0.9", zorder=0)
    axes.plot(_RANGE, _RANGE, color="0.5", linewidth=0.8, zorder=1)
    reached = "reached" if kind == "first_hit" else "sustained_reached"
    for row in rows:
        paper = row["paper"] or BOUNDS[row["dataset"]]
        colour = look(row["algorithm"])["color"]
        edge = {"edgecolors": colour, "linewidths": 1.0, "zorder": 3, "s": _SIZE}
        if row[reached] < row["seeds"] or row[kind] is None:
            fill = colour if row["paper"] is None else "none"
            axes.scatter([paper], [_TOP], marker="^", facecolors=fill, **edge)
        else:
            marker = "o" if row["dataset"] == "fashionmnist" else "s"
            fill = colour if row["setting"] == "iid" else "white"
            axes.scatter([paper], [row[kind]], marker=marker, facecolors=fill, **edge)
    axes.set(xscale="log", yscale="log", xlim=_RANGE, ylim=_RANGE, aspect="equal", xlabel="seconds in the paper")


def _legend() -> list[Line2D]:
    points: dict[str, Any] = {"linestyle": "none", "markersize": 5.5}
    colours = [Line2D([], [], marker="o", color=look(name)["color"], label=name, **points) for name in ALGORITHM_NAMES]
    shapes = [
        ("o", "0.3", "FashionMNIST"), ("s", "0.3", "CIFAR-10"), ("o", "white", "non-IID: not filled"),
        ("^", "none", "a seed missed the target"), ("^", "0.3", "missed, as in the paper"),
    ]  # fmt: skip
    return colours + [
        Line2D([], [], marker=m, color="0.3", markerfacecolor=fill, label=text, **points) for m, fill, text in shapes
    ]
