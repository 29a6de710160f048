"""A Gantt chart of plans: which client trained from which version, when, and which updates were merged.

Every bar is a job and every line is a merge, exactly as the plan records them. Jobs that no merge of the plan uses are
hatched. White is idle time. Where a plan ends before its panel does, the panel is grey, since the plan says nothing
about that time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, TypeAlias

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
from ..planning.records import Job, Round, Stall, Uploaded
from .plots import PALETTE, STYLE, tint

# Inches. Margins are fixed, so the text that fits into a bar is known before anything is drawn.
_WIDTH, _LEFT, _RIGHT, _HEAD, _FOOT = 7.4, 0.62, 0.2, 0.5, 0.5
_LEGEND_ROW = 0.22
_DEFAULT_CLIENTS = 20
_MAX_LABELLED_MERGES = 60
_RIGHT_PADDING = 1.004  # keeps the last merge off the right edge
_DARK = "0.2"
_MERGE_LINE: dict[str, Any] = {"color": _DARK, "linestyle": (0, (4, 2.5)), "linewidth": 0.9}
_UNUSED_TINT, _UNUSED_EDGE_TINT, _UNUSED_HATCH = 0.78, 0.1, "/////"

Polygon: TypeAlias = list[tuple[float, float]]


def gantt(plans: Mapping[str, Plan], *, clients: int | None = None, until: float | None = None) -> Figure:
    """Draw the first ``clients`` (20) of every plan on one time axis, up to the last merge or ``until``."""
    shown = _DEFAULT_CLIENTS if clients is None else clients
    if shown < 1:
        raise UserError(f"clients is {shown}; give at least one client to draw")
    if not plans:
        raise UserError("there is nothing to draw: no plan was given")
    end = _end_of_axis(plans.values()) if until is None else until
    if not 0 < end < math.inf:
        raise UserError(f"until is {end:g}; it must be a finite number of seconds above zero")

    rows = [min(shown, plan.header.num_clients) for plan in plans.values()]
    row_inches = _row_inches(max(rows))
    panels = [_Panel(plan, count, end, row_inches) for plan, count in zip(plans.values(), rows, strict=True)]
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        handles = _legend_handles(plans.values(), shown, end)
        foot = _FOOT + _LEGEND_ROW * math.ceil(len(handles) / 2)
        height = foot + sum(_HEAD + row_inches * count for count in rows)
        figure.set_size_inches(_WIDTH, height)
        top, first = height, None
        for title, panel in zip(plans, panels, strict=True):
            top -= _HEAD + row_inches * panel.clients
            width = (_WIDTH - _LEFT - _RIGHT) / _WIDTH
            box = (_LEFT / _WIDTH, top / height, width, row_inches * panel.clients / height)
            ax = figure.add_axes(box, sharex=first)
            first = first or ax
            _draw_panel(ax, title, panel)
            ax.tick_params(labelbottom=False)
        ax.tick_params(labelbottom=True)
        ax.set_xlabel("simulated seconds")
        ax.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10]))
        ax.set_xlim(0, end * _RIGHT_PADDING)
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


def _end_of_axis(plans: Collection[Plan]) -> float:
    end = max(plan.seconds for plan in plans)
    if end <= 0:
        raise UserError("there is nothing to draw: no plan has a merge after time zero; give an end time")
    return end


def _row_inches(rows: int) -> float:
    """Return the height of a client's row: the more rows, the lower each."""
    if rows <= 6:
        return 0.3
    return 0.22 if rows <= 12 else min(0.17, 12 / rows)


@dataclass(frozen=True)
class _Panel:
    """The part of one plan that a panel shows, and the geometry of its bars."""

    plan: Plan
    clients: int
    until: float
    row_inches: float

    @cached_property
    def points_per_second(self) -> float:
        return 72 * (_WIDTH - _LEFT - _RIGHT) / (self.until * _RIGHT_PADDING)

    @cached_property
    def end(self) -> float:
        return _last_known_time(self.plan)

    @cached_property
    def merged(self) -> set[tuple[int, int]]:
        return {(update.client, update.index) for done in self.plan.rounds for update, _ in done.merge.updates}

    @cached_property
    def jobs(self) -> list[Job]:
        return [job for job in self.plan.jobs if job.client < self.clients and job.start < self.until]

    @property
    def used(self) -> list[Job]:
        return [job for job in self.jobs if self.is_used(job)]

    @property
    def unused(self) -> list[Job]:
        return [job for job in self.jobs if not self.is_used(job)]

    @property
    def uploads(self) -> list[Uploaded]:
        inside = (up for up in self.plan.uploads if up.client < self.clients and up.start < self.until)
        return [upload for upload in inside if _takes_time(upload)]

    @cached_property
    def rounds(self) -> list[Round]:
        return [done for done in self.plan.rounds if done.time <= self.until]

    @property
    def merges_are_dense(self) -> bool:
        """Whether merge lines are so close that they must be faint."""
        if len(self.rounds) > _MAX_LABELLED_MERGES:
            return True
        return bool(self.rounds) and self.rounds[-1].time * self.points_per_second < 8 * len(self.rounds)

    @cached_property
    def bar(self) -> tuple[float, float]:
        """Half the height of a bar and the offset of its centre, in rows.

        An upload has its own strip below the bar, since a client may train while it uploads.
        """
        return (0.28, -0.09) if any(_takes_time(upload) for upload in self.plan.uploads) else (0.36, 0.0)

    def is_used(self, job: Job) -> bool:
        return (job.client, job.index) in self.merged

    def stop(self, job: Job) -> float:
        return self.end if job.outcome == "running" else job.end


def _draw_panel(ax: Axes, title: str, panel: _Panel) -> None:
    _draw_bars(ax, panel)
    _draw_start_versions(ax, panel)
    if panel.end < panel.until:
        ax.axvspan(panel.end, panel.until * _RIGHT_PADDING, color="0.94", lw=0, zorder=0, gid="unknown")
    _draw_merges(ax, panel)

    count, total = panel.clients, panel.plan.header.num_clients
    ax.set_ylim(count + 0.5, 0.5)
    ax.set_title(title, loc="left", pad=17)
    if count < total:
        note = f"the first {count} of {total} clients"
        ax.set_title(note, loc="right", pad=17, size=8.5, weight="normal", color="0.35")
    ax.set_ylabel("client")
    step = 1 if count <= 25 else max(5, 5 * (count // 50))
    ax.set_yticks(sorted({1, *range(step, count + 1, step)}))
    ax.tick_params(axis="y", length=0, labelsize=9 if panel.row_inches > 0.2 else 7.5)


def _draw_bars(ax: Axes, panel: _Panel) -> None:
    """Draw a bar for every job, hatched where no merge uses it, and a strip for every upload."""
    half, centre = panel.bar
    used, unused = panel.used, panel.unused

    def bars(jobs: Iterable[Job]) -> list[Polygon]:
        return [_rectangle(job.start, panel.stop(job), job.client + 1 + centre, half) for job in jobs]

    # A white edge around a very short bar would leave nothing of it.
    edge = 0.7 if used and median(job.end - job.start for job in used) * panel.points_per_second > 4 else 0.0
    colours = [_colour(job) for job in used]
    _add_polygons(ax, "jobs", bars(used), facecolors=colours, edgecolors="white", lw=edge, zorder=2)
    _add_polygons(
        ax,
        "unused",
        bars(unused),
        facecolors=[tint(_colour(job), _UNUSED_TINT) for job in unused],
        edgecolors=[tint(_colour(job), _UNUSED_EDGE_TINT) for job in unused],
        hatch=_UNUSED_HATCH,
        lw=0.5,
        zorder=2,
    )
    strips = [_rectangle(upload.start, upload.end, upload.client + 1 + 0.31, 0.075) for upload in panel.uploads]
    _add_polygons(ax, "uploads", strips, facecolors=_DARK, lw=0, zorder=2.2)


def _draw_start_versions(ax: Axes, panel: _Panel) -> None:
    """Write the start version into every bar that is wide enough, on a plain patch where a line or hatch crosses it."""
    if panel.row_inches < 0.14:
        return
    size = 8.0 if panel.row_inches > 0.2 else 6.5
    half, centre = panel.bar
    merges = [] if panel.merges_are_dense else [done.time for done in panel.rounds]
    patches, patch_colours = [], []
    for job in panel.jobs:
        text, stop = str(job.version), min(panel.stop(job), panel.until)
        width = (0.65 * len(text) + 0.3) * size / panel.points_per_second
        if stop - job.start < 1.1 * width:
            continue
        x, clear = _label_position(job.start, stop, merges, width)
        used = panel.is_used(job)
        ground = _colour(job) if used else tint(_colour(job), _UNUSED_TINT)
        y = job.client + 1 + centre
        ax.text(x, y, text, size=size, ha="center", va="center_baseline", color=_text_colour(ground), zorder=4)
        if not used or not clear:
            patches.append(_rectangle(x - width / 2, x + width / 2, y, 0.85 * half))
            patch_colours.append(ground)
    _add_polygons(ax, "label-patches", patches, facecolors=patch_colours, lw=0, zorder=3.5)


def _draw_merges(ax: Axes, panel: _Panel) -> None:
    """Draw a line for every merge and write the new version above it, once for merges at the same time."""
    rounds = panel.rounds
    if not rounds:
        return
    style = {"color": _DARK, "linewidth": 0.4, "alpha": 0.35} if panel.merges_are_dense else _MERGE_LINE
    ax.vlines([done.time for done in rounds], 0.5, panel.clients + 0.5, gid="merges", zorder=3, **style)
    if len(rounds) > _MAX_LABELLED_MERGES:
        return
    size, free_from = 8.0, -math.inf
    for time, group in itertools.groupby(rounds, key=lambda done: done.time):
        versions = [done.merge.version for done in group]
        text = str(versions[0]) if len(versions) == 1 else f"{versions[0]}–{versions[-1]}"
        half = 0.32 * size * len(text)
        if time * panel.points_per_second - half >= free_from:
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
                gid="merge-labels",
            )
            free_from = time * panel.points_per_second + half + 2.5


def _label_position(start: float, stop: float, merges: Sequence[float], width: float) -> tuple[float, bool]:
    """Return the x of a label in a bar (the middle, or else the widest gap) and whether no merge line crosses it."""
    middle = (start + stop) / 2
    if all(abs(time - middle) > 0.9 * width for time in merges):
        return middle, True
    cuts = [start, *(time for time in merges if start < time < stop), stop]
    low, high = max(itertools.pairwise(cuts), key=lambda gap: gap[1] - gap[0])
    return ((low + high) / 2, True) if high - low > width else (middle, False)


def _rectangle(left: float, right: float, y: float, half: float) -> Polygon:
    low, high = y - half, y + half
    return [(left, low), (right, low), (right, high), (left, high)]


def _add_polygons(ax: Axes, gid: str, polygons: Sequence[Polygon], **style: Any) -> None:
    if polygons:
        ax.add_collection(PolyCollection(polygons, gid=gid, **style), autolim=False)


def _colour(job: Job) -> str:
    return PALETTE[job.version % len(PALETTE)]


def _text_colour(ground: str) -> str:
    """Return black or white, whichever is legible on the ground."""
    red, green, blue = to_rgb(ground)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"


def _takes_time(upload: Uploaded) -> bool:
    return upload.end > upload.start


def _last_known_time(plan: Plan) -> float:
    times = [plan.seconds]
    times += [job.start if job.outcome == "running" else job.end for job in plan.jobs]
    times += [record.time for record in plan.records if isinstance(record, Stall)]
    return max(times)


def _legend_handles(plans: Collection[Plan], shown: int, until: float) -> dict[str, Any]:
    """Return the legend's handles by their text; uploads and grey have one only where the figure has them."""
    box: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.7}
    colour, edge = tint(PALETTE[0], _UNUSED_TINT), tint(PALETTE[0], _UNUSED_EDGE_TINT)
    handles: dict[str, Any] = {
        "training (colour, number: start version)": tuple(Patch(facecolor=c, **box) for c in PALETTE[:3]),
        "training that no merge of the plan uses": Patch(
            facecolor=colour, edgecolor=edge, hatch=_UNUSED_HATCH, linewidth=0.5
        ),
    }
    uploads = (upload for plan in plans for upload in plan.uploads)
    if any(_takes_time(upload) and upload.client < shown and upload.start < until for upload in uploads):
        handles["upload"] = Line2D([], [], color=_DARK, lw=2.5, solid_capstyle="butt")
    handles["merge (number: version made)"] = Line2D([], [], **_MERGE_LINE)
    if any(_last_known_time(plan) < until for plan in plans):
        handles["after the end of the plan"] = Patch(facecolor="0.9", linewidth=0)
    return handles
