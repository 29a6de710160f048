"""A Gantt chart of plans: which client trained from which version, when, and which updates were merged.

Every bar is a job and every line is a merge, as the plan records them. Jobs that no merge of the plan uses are hatched.
White is idle time. A panel is grey after the end of its plan, which says nothing about that time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeAlias, TypeVar

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
from ..planning.records import Job, Stall, Uploaded
from .palette import tint
from .plots import PALETTE, STYLE

# Inches. Margins are fixed, so the text that fits into a bar is known before anything is drawn.
_WIDTH, _LEFT, _RIGHT, _HEAD, _FOOT = 7.4, 0.62, 0.2, 0.5, 0.5
_LEGEND_ROW = 0.22
_MAX_LABELLED_MERGES = 60
_RIGHT_PADDING = 1.004  # keeps the last merge off the right edge
_DARK = "0.2"
_MERGE_LINE: dict[str, Any] = {"color": _DARK, "linestyle": (0, (4, 2.5)), "linewidth": 0.9}
_MERGE_LABEL: dict[str, Any] = {"ha": "center", "color": _DARK, "annotation_clip": False, "gid": "merge-labels"}
_UNUSED_TINT, _UNUSED_EDGE_TINT, _UNUSED_HATCH = 0.78, 0.1, "/////"

Polygon: TypeAlias = list[tuple[float, float]]
Activity = TypeVar("Activity", Job, Uploaded)


def gantt(plans: Mapping[str, Plan], *, clients: int = 20, until: float | None = None, first_number: int = 1) -> Figure:
    """Draw the first ``clients`` of every plan on one time axis, up to the last merge or ``until``.

    ``first_number`` is the number of the first client: 1 as in the paper's figure, 0 as in plans and pages.
    """
    if clients < 1:
        raise UserError(f"clients is {clients}; give at least one client to draw")
    if not plans:
        raise UserError("there is nothing to draw: no plan was given")
    end = max(plan.seconds for plan in plans.values()) if until is None else until
    if until is None and end <= 0:
        raise UserError("there is nothing to draw: no plan has a merge after time zero; give an end time")
    if not 0 < end < math.inf:
        raise UserError(f"until is {end:g}; it must be a finite number of seconds above zero")

    rows = [min(clients, plan.header.num_clients) for plan in plans.values()]
    row_inches = _row_inches(max(rows))
    panels = [_Panel(plan, count, end, row_inches) for plan, count in zip(plans.values(), rows, strict=True)]
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        handles = _legend_handles(panels)
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
            _draw_panel(ax, title, panel, first_number)
            ax.tick_params(labelbottom=False)
        ax.tick_params(labelbottom=True)
        ax.set_xlabel("simulated seconds")
        ax.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10]))
        ax.set_xlim(0, end * _RIGHT_PADDING)
        style: dict[str, Any] = {"loc": "lower center", "ncols": 2, "handlelength": 3, "borderaxespad": 0.3}
        beside = {tuple: HandlerTuple(ndivide=None, pad=0)}
        figure.legend(handles=list(handles.values()), labels=list(handles), handler_map=beside, **style)
    return figure


def _row_inches(rows: int) -> float:
    """Return the height of a client's row: the more rows, the lower each."""
    if rows <= 6:
        return 0.3
    return 0.22 if rows <= 12 else min(0.17, 12 / rows)


class _Panel:
    """The part of one plan that a panel shows, and the geometry of its bars."""

    def __init__(self, plan: Plan, clients: int, until: float, row_inches: float) -> None:
        self.clients, self.until, self.row_inches = clients, until, row_inches
        self.num_clients = plan.header.num_clients
        self.points_per_second = 72 * (_WIDTH - _LEFT - _RIGHT) / (until * _RIGHT_PADDING)
        self.end = _last_known_time(plan)
        self.jobs = self._inside(plan.jobs)
        self.merged = {(update.client, update.index) for done in plan.rounds for update, _ in done.merge.updates}
        uploads = [upload for upload in plan.uploads if upload.end > upload.start]
        self.uploads = self._inside(uploads)
        # An upload has its own strip below the bar, since a client may train while it uploads.
        self.half, self.centre = (0.28, -0.09) if uploads else (0.36, 0.0)  # of a bar, in rows
        self.rounds = rounds = [done for done in plan.rounds if done.time <= until]
        crowded = bool(rounds) and rounds[-1].time * self.points_per_second < 8 * len(rounds)
        self.merges_are_dense = crowded or len(rounds) > _MAX_LABELLED_MERGES  # their lines must be faint

    def _inside(self, activities: Iterable[Activity]) -> list[Activity]:
        return [each for each in activities if each.client < self.clients and each.start < self.until]

    def is_used(self, job: Job) -> bool:
        return (job.client, job.index) in self.merged

    def stop(self, job: Job) -> float:
        return self.end if job.outcome == "running" else job.end


def _last_known_time(plan: Plan) -> float:
    jobs = (job.start if job.outcome == "running" else job.end for job in plan.jobs)
    return max([plan.seconds, *jobs, *(record.time for record in plan.records if isinstance(record, Stall))])


def _draw_panel(ax: Axes, title: str, panel: _Panel, first_number: int) -> None:
    _draw_bars(ax, panel)
    _draw_start_versions(ax, panel)
    if panel.end < panel.until:
        ax.axvspan(panel.end, panel.until * _RIGHT_PADDING, color="0.94", lw=0, zorder=0, gid="unknown")
    _draw_merges(ax, panel)

    count, total = panel.clients, panel.num_clients
    ax.set_ylim(count + 0.5, 0.5)
    ax.set_title(title, loc="left", pad=17)
    if count < total:
        note = f"the first {count} of {total} clients"
        ax.set_title(note, loc="right", pad=17, size=8.5, weight="normal", color="0.35")
    ax.set_ylabel("client")
    step = 1 if count <= 25 else max(5, 5 * (count // 50))
    numbers = sorted({first_number, *range(step, count + first_number, step)})
    ax.set_yticks([number - first_number + 1 for number in numbers], [str(number) for number in numbers])
    ax.tick_params(axis="y", length=0, labelsize=9 if panel.row_inches > 0.2 else 7.5)


def _draw_bars(ax: Axes, panel: _Panel) -> None:
    """Draw a bar for every job, hatched where no merge uses it, and a strip for every upload."""
    used = [job for job in panel.jobs if panel.is_used(job)]
    unused = [job for job in panel.jobs if not panel.is_used(job)]

    def bars(jobs: Iterable[Job]) -> list[Polygon]:
        return [_rectangle(job.start, panel.stop(job), job.client + 1 + panel.centre, panel.half) for job in jobs]

    # A white edge around a very short bar would leave nothing of it.
    edge = 0.7 if used and median(job.end - job.start for job in used) * panel.points_per_second > 4 else 0.0
    colours = [_colour(job) for job in used]
    _add_polygons(ax, "jobs", bars(used), facecolors=colours, edgecolors="white", lw=edge, zorder=2)
    fills, edges = ([tint(_colour(job), share) for job in unused] for share in (_UNUSED_TINT, _UNUSED_EDGE_TINT))
    hatched: dict[str, Any] = {"facecolors": fills, "edgecolors": edges, "hatch": _UNUSED_HATCH}
    _add_polygons(ax, "unused", bars(unused), lw=0.5, zorder=2, **hatched)
    strips = [_rectangle(upload.start, upload.end, upload.client + 1 + 0.31, 0.075) for upload in panel.uploads]
    _add_polygons(ax, "uploads", strips, facecolors=_DARK, lw=0, zorder=2.2)


def _draw_start_versions(ax: Axes, panel: _Panel) -> None:
    """Write the start version into every bar that is wide enough, on a plain patch where a line or hatch crosses it."""
    if panel.row_inches < 0.14:
        return
    size = 8.0 if panel.row_inches > 0.2 else 6.5
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
        y = job.client + 1 + panel.centre
        ax.text(x, y, text, size=size, ha="center", va="center_baseline", color=_text_colour(ground), zorder=4)
        if not used or not clear:
            patches.append(_rectangle(x - width / 2, x + width / 2, y, 0.85 * panel.half))
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
                text, (time, 1), (0, 2.5), ("data", "axes fraction"), "offset points", size=size, **_MERGE_LABEL
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


def _legend_handles(panels: Sequence[_Panel]) -> dict[str, Any]:
    """Return the legend's handles by their text; uploads and grey have one only where the figure has them."""
    box: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.7}
    colour, edge = tint(PALETTE[0], _UNUSED_TINT), tint(PALETTE[0], _UNUSED_EDGE_TINT)
    unused = Patch(facecolor=colour, edgecolor=edge, hatch=_UNUSED_HATCH, linewidth=0.5)
    handles: dict[str, Any] = {
        "training (colour, number: start version)": tuple(Patch(facecolor=c, **box) for c in PALETTE[:3]),
        "training that no merge of the plan uses": unused,
    }
    if any(panel.uploads for panel in panels):
        handles["upload"] = Line2D([], [], color=_DARK, lw=2.5, solid_capstyle="butt")
    handles["merge (number: version made)"] = Line2D([], [], **_MERGE_LINE)
    if any(panel.end < panel.until for panel in panels):
        handles["after the end of the plan"] = Patch(facecolor="0.9", linewidth=0)
    return handles
