"""A plan as a picture: who trained from which version, when, and what became of it.

The law of this file: a bar is a job and a line is a merge, exactly as the plan records them. A job that no merge of the
plan uses is hatched; white is idle time; where a plan ends before its panel does, the rest is grey, because nothing is
known of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..errors import UserError
from ..planning.plan import Plan
from ..planning.records import Job, Round, Stall
from .plots import PALETTE, STYLE, tint

# The page, in inches; margins are fixed so that what fits into a bar is known before anything is drawn.
_WIDTH, _LEFT, _RIGHT, _HEAD, _FOOT = 7.4, 0.62, 0.2, 0.5, 0.5
_LEGEND_ROW = 0.22
_MANY_MERGES = 60
_DARK = "0.2"
_LINE: dict[str, Any] = {"color": _DARK, "linestyle": (0, (4, 2.5)), "linewidth": 0.9}


def gantt(plans: Mapping[str, Plan], *, clients: int | None = None, until: float | None = None) -> Figure:
    """The first ``clients`` (20) of every plan on one time axis, up to the last merge or ``until``."""
    shown = 20 if clients is None else clients
    if shown < 1:
        raise UserError(f"clients is {shown}; at least one must be shown")
    if not plans:
        raise UserError("there is nothing to draw: no plan was given")
    if until is None:
        until = max(plan.seconds for plan in plans.values())
        if until <= 0:
            raise UserError("there is nothing to draw: no plan has a merge after time zero; give an end time")
    if not 0 < until < math.inf:
        raise UserError(f"until is {until:g}; it must be a number of seconds above zero")

    lanes = [min(shown, plan.header.num_clients) for plan in plans.values()]
    most = max(lanes)
    lane = 0.3 if most <= 6 else 0.22 if most <= 12 else min(0.17, 12 / most)
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        handles = _handles(plans.values(), shown, until)
        foot = _FOOT + _LEGEND_ROW * math.ceil(len(handles) / 2)
        height = foot + sum(_HEAD + lane * count for count in lanes)
        figure.set_size_inches(_WIDTH, height)
        top, first = height, None
        for (title, plan), count in zip(plans.items(), lanes, strict=True):
            top -= _HEAD + lane * count
            box = (_LEFT / _WIDTH, top / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, lane * count / height)
            ax = figure.add_axes(box, sharex=first)
            first = first or ax
            _panel(ax, title, plan, count, until, lane)
            ax.tick_params(labelbottom=False)
        ax.tick_params(labelbottom=True)
        ax.set_xlabel("simulated seconds")
        ax.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10]))
        ax.set_xlim(0, until * 1.004)  # so that the last merge does not lie on the edge
        figure.legend(
            handles=list(handles.values()),
            labels=list(handles),
            loc="lower center",
            ncols=2,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
            handlelength=3,
            borderaxespad=0.3,
        )
    return figure


def _panel(ax: Axes, title: str, plan: Plan, count: int, until: float, lane: float) -> None:
    points = 72 * (_WIDTH - _LEFT - _RIGHT) / (until * 1.004)  # per second
    size = 8.0 if lane > 0.2 else 6.5
    end = _end(plan)
    merged = {(update.client, update.index) for done in plan.rounds for update, _ in done.merge.updates}
    jobs = [job for job in plan.jobs if job.client < count and job.start < until]
    used = [job for job in jobs if (job.client, job.index) in merged]
    vain = [job for job in jobs if (job.client, job.index) not in merged]
    sent = [up for up in plan.uploads if up.client < count and up.start < until and up.end > up.start]
    rounds = [done for done in plan.rounds if done.time <= until]
    faint = len(rounds) > _MANY_MERGES or (bool(rounds) and rounds[-1].time * points < 8 * len(rounds))
    edge = 0.7 if used and median(job.end - job.start for job in used) * points > 4 else 0.0  # or nothing is left
    # An upload has its own strip below the bar, since a client may train on while it sends.
    half, centre = (0.28, -0.09) if any(up.end > up.start for up in plan.uploads) else (0.36, 0.0)

    def boxes(items: Sequence[Any], middle: float, tall: float) -> list[list[tuple[float, float]]]:
        found = []
        for item in items:
            low, high = item.client + 1 + middle - tall, item.client + 1 + middle + tall
            stop = end if isinstance(item, Job) and item.outcome == "running" else item.end
            found.append([(item.start, low), (stop, low), (stop, high), (item.start, high)])
        return found

    def put(gid: str, polygons: list[list[tuple[float, float]]], **how: Any) -> None:
        if polygons:
            ax.add_collection(PolyCollection(polygons, gid=gid, **how), autolim=False)

    put("jobs", boxes(used, centre, half), facecolors=[_colour(j) for j in used], edgecolors="white", lw=edge, zorder=2)
    put(
        "vain",
        boxes(vain, centre, half),
        facecolors=[tint(_colour(job), 0.78) for job in vain],
        edgecolors=[tint(_colour(job), 0.1) for job in vain],
        hatch="/////",
        lw=0.5,
        zorder=2,
    )
    put("uploads", boxes(sent, 0.31, 0.075), facecolors=_DARK, lw=0, zorder=2.2)

    lines = [] if faint else [done.time for done in rounds]
    plates, grounds = [], []
    for job in jobs:
        text, stop = str(job.version), min(end if job.outcome == "running" else job.end, until)
        width = (0.65 * len(text) + 0.3) * size / points
        if stop - job.start < 1.1 * width or lane < 0.14:
            continue
        x, clear = _clear(job.start, stop, lines, width)
        wasted = (job.client, job.index) not in merged
        ground = tint(_colour(job), 0.78) if wasted else _colour(job)
        y = job.client + 1 + centre
        ax.text(x, y, text, size=size, ha="center", va="center_baseline", color=_ink(ground), zorder=4)
        if wasted or not clear:
            left, right, low, high = x - width / 2, x + width / 2, y - 0.85 * half, y + 0.85 * half
            plates.append([(left, low), (right, low), (right, high), (left, high)])
            grounds.append(ground)
    put("plates", plates, facecolors=grounds, lw=0, zorder=3.5)
    if end < until:
        ax.axvspan(end, until * 1.004, color="0.94", lw=0, zorder=0, gid="unknown")
    _merges(ax, rounds, count, points, faint)

    ax.set_ylim(count + 0.5, 0.5)
    ax.set_title(title, loc="left", pad=17)
    if count < plan.header.num_clients:
        note = f"the first {count} of {plan.header.num_clients} clients"
        ax.set_title(note, loc="right", pad=17, size=8.5, weight="normal", color="0.35")
    ax.set_ylabel("client")
    step = 1 if count <= 25 else max(5, 5 * (count // 50))
    ax.set_yticks(sorted({1, *range(step, count + 1, step)}))
    ax.tick_params(axis="y", length=0, labelsize=9 if lane > 0.2 else 7.5)


def _clear(start: float, stop: float, lines: Sequence[float], width: float) -> tuple[float, bool]:
    """Where a number stands in a bar, and whether no merge line runs through it: the middle, or else the widest gap."""
    middle = (start + stop) / 2
    if all(abs(time - middle) > 0.9 * width for time in lines):
        return middle, True
    cuts = [start, *(time for time in lines if start < time < stop), stop]
    low, high = max(itertools.pairwise(cuts), key=lambda gap: gap[1] - gap[0])
    return ((low + high) / 2, True) if high - low > width else (middle, False)


def _merges(ax: Axes, rounds: Sequence[Round], count: int, points: float, faint: bool) -> None:
    if not rounds:
        return
    how = {"color": _DARK, "linewidth": 0.4, "alpha": 0.35} if faint else _LINE
    ax.vlines([done.time for done in rounds], 0.5, count + 0.5, gid="merges", zorder=3, **how)
    if len(rounds) > _MANY_MERGES:
        return
    size, free = 8.0, -math.inf
    for time, group in itertools.groupby(rounds, key=lambda done: done.time):
        versions = [done.merge.version for done in group]
        text = str(versions[0]) if len(versions) == 1 else f"{versions[0]}–{versions[-1]}"
        half = 0.32 * size * len(text)
        if time * points - half >= free:
            ax.annotate(
                text,
                (time, 1),
                (0, 2.5),
                ("data", "axes fraction"),
                "offset points",
                ha="center",
                size=size,
                color=_DARK,
                annotation_clip=False,
                gid="made",
            )
            free = time * points + half + 2.5


def _colour(job: Job) -> str:
    return PALETTE[job.version % len(PALETTE)]


def _ink(colour: str) -> str:
    """Black or white, whichever can be read on the colour."""
    red, green, blue = to_rgb(colour)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"


def _end(plan: Plan) -> float:
    """The last moment of which the plan knows."""
    times = [plan.seconds]
    times += [job.start if job.outcome == "running" else job.end for job in plan.jobs]
    times += [record.time for record in plan.records if isinstance(record, Stall)]
    return max(times)


def _handles(plans: Collection[Plan], shown: int, until: float) -> dict[str, Any]:
    """The legend; uploads and the grey are explained only where there are any."""
    box: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.7}
    found: dict[str, Any] = {
        "training (colour, number: start version)": tuple(Patch(facecolor=c, **box) for c in PALETTE[:3]),
        "training that no merge of the plan uses": Patch(
            facecolor=tint(PALETTE[0], 0.78), edgecolor=tint(PALETTE[0], 0.1), hatch="/////", linewidth=0.5
        ),
    }
    if any(up.end > up.start and up.client < shown and up.start < until for plan in plans for up in plan.uploads):
        found["upload"] = Line2D([], [], color=_DARK, lw=2.5, solid_capstyle="butt")
    found["merge (number: version made)"] = Line2D([], [], **_LINE)
    if any(_end(plan) < until for plan in plans):
        found["after the end of the plan"] = Patch(facecolor="0.9", linewidth=0)
    return found
