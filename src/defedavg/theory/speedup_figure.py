"""The figure of a speedup study: rounds to ε against the updates merged per round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..errors import UserError
from ..report.palette import look
from ..report.plots import STYLE

IDEAL: Final[dict[str, Any]] = {"color": "0.45", "linewidth": 1.0, "linestyle": (0, (4, 3)), "zorder": 1.5}


def speedup_figure(speedups: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw one panel per task: a small mark per seed, means with the fitted line, and slope −1 through their centre."""
    if not speedups:
        raise UserError("there is nothing to draw: no speedup was measured; run `defedavg theory speedup`")
    tasks = list(dict.fromkeys(each["task"] for each in speedups))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.7 + 4.4 * len(tasks), 4.3), layout="constrained")
        axes = figure.subplots(1, len(tasks), squeeze=False).ravel()
        for ax, task in zip(axes, tasks, strict=True):
            _panel(ax, [each for each in speedups if each["task"] == task])
            ax.set_title(task)
        axes[0].set_ylabel("rounds T until the mean\nof ‖∇F(w$^t$)‖² over t < T is ε")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figure


def _panel(ax: Axes, speedups: Sequence[Mapping[str, Any]]) -> None:
    for each in speedups:
        ns = [point["n"] for point in each["points"]]
        means = [point["mean_rounds"] for point in each["points"]]
        style = look(each["algorithm"])
        line = [math.exp(each["level"] + each["slope"] * math.log(n)) for n in ns]
        slope, low, high = (f"{each[name]:.2f}".replace("-", "−") for name in ("slope", "slope_low", "slope_high"))
        label = f"{each['algorithm']}, ε = {each['epsilon']:g}: slope {slope} [{low}, {high}]"
        ax.plot(ns, line, color=style["color"], linestyle=style["linestyle"], lw=1.4, zorder=2.5)
        ax.plot(ns, means, color=style["color"], marker=style["marker"], ms=6, lw=0, label=label, zorder=3)
        for point in each["points"]:
            seeds = [point["n"]] * len(point["rounds"])
            ax.plot(seeds, point["rounds"], color=style["color"], marker="_", ms=9, mew=0.8, lw=0, zorder=2)
        middle = math.exp(sum(map(math.log, ns)) / len(ns))
        height = math.exp(sum(map(math.log, means)) / len(means))
        ax.plot(ns, [height * middle / n for n in ns], **IDEAL)
    ax.plot([], [], label="slope −1, linear speedup", **IDEAL)
    ns = sorted({point["n"] for each in speedups for point in each["points"]})
    ax.set(xscale="log", yscale="log", xlabel="updates merged per round, n")
    ax.xaxis.set_major_locator(FixedLocator(ns))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    ax.grid(True)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), handlelength=2.6)
