"""The speedup figure: rounds against n on log axes, with the slope −1 of linear speedup."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..errors import UserError
from ..report.plots import STYLE, look

IDEAL: dict[str, Any] = {"color": "0.45", "linewidth": 1.0, "linestyle": (0, (4, 3)), "zorder": 1.5}


def speedup_figure(found: Sequence[Mapping[str, Any]]) -> Figure:
    """One panel per task: every seed as a small mark, means with the fitted line, and slope −1 through their middle."""
    if not found:
        raise UserError("there is nothing to draw: no speedup was measured")
    tasks = list(dict.fromkeys(each["task"] for each in found))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.7 + 4.4 * len(tasks), 4.3), layout="constrained")
        axes = figure.subplots(1, len(tasks), squeeze=False).ravel()
        for ax, task in zip(axes, tasks, strict=True):
            _panel(ax, [each for each in found if each["task"] == task])
            ax.set_title(task)
        axes[0].set_ylabel("rounds T until the mean\nof ‖∇F(w$^t$)‖² over t < T is ε")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figure


def _panel(ax: Axes, found: Sequence[Mapping[str, Any]]) -> None:
    for each in found:
        ns = [point["n"] for point in each["points"]]
        means = [point["mean_rounds"] for point in each["points"]]
        how = look(each["algorithm"])
        line = [math.exp(each["level"] + each["slope"] * math.log(n)) for n in ns]
        label = f"{each['algorithm']}, ε = {each['epsilon']:g}: {_interval(each)}"
        ax.plot(ns, line, color=how["color"], linestyle=how["linestyle"], lw=1.4, zorder=2.5)
        ax.plot(ns, means, color=how["color"], marker=how["marker"], ms=6, lw=0, label=label, zorder=3)
        for point in each["points"]:
            seeds = [point["n"]] * len(point["rounds"])
            ax.plot(seeds, point["rounds"], color=how["color"], marker="_", ms=9, mew=0.8, lw=0, zorder=2)
        middle = math.exp(sum(map(math.log, ns)) / len(ns))
        height = math.exp(sum(map(math.log, means)) / len(means))
        ax.plot(ns, [height * middle / n for n in ns], **IDEAL)
    ax.plot([], [], label="slope −1, linear speedup", **IDEAL)
    every = sorted({point["n"] for each in found for point in each["points"]})
    ax.set(xscale="log", yscale="log", xlabel="updates merged per round, n")
    ax.xaxis.set_major_locator(FixedLocator(every))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    ax.grid(True)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), handlelength=2.6)


def _interval(each: Mapping[str, Any]) -> str:
    """The slope and its interval, in typeset minus signs."""
    slope, low, high = (f"{each[name]:.2f}".replace("-", "−") for name in ("slope", "slope_low", "slope_high"))
    return f"slope {slope} [{low}, {high}]"
