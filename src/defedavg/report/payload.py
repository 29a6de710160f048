"""From run folders to what the page is told: series of runs, in groups that can be compared.

A series is a setting with its seeds; a group is the series that learn the same task to the same target, since only
they can be ranked. Everything here is plain data, ready for JSON.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import fmean, stdev
from typing import Any

import numpy as np

from .. import __version__
from ..errors import UserError
from ..simulation import make_fleet
from .digest import Digest, digest, gantt, participation
from .plots import look, tint
from .read import Entry, Folder, Trail, flat, number

MOST_POINTS = 60_000  # measurements on one page; beyond, every second, third, … is shown
MOST_CHARTS = 12  # series of a group with a chart of clients over time
MOST_SHOWN = 8  # series of a group that are ticked at first
MOST_SHADES = 3  # settings of an algorithm that are told apart by shades of its colour
MOST_SPLIT = 1000  # clients in the chart of the split

WHEEL = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#8C6D31")
"""Okabe and Ito's colours without black and yellow, and two that are as safe."""

SYMBOLS = {
    "s": "square", "^": "triangle-up", "v": "triangle-down", "D": "diamond", "o": "circle", "X": "x", "P": "cross",
    "<": "triangle-left", ">": "triangle-right", "p": "pentagon", "h": "hexagon", "*": "star", "d": "diamond-tall",
}  # fmt: skip


@dataclass
class Series:
    """A setting of one folder, with its runs."""

    folder: Folder
    label: str
    runs: list[Entry]
    digests: dict[int, Digest] = field(default_factory=dict)  # by seed
    notes: list[str] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        return self.runs[0].algorithm

    @property
    def settings(self) -> dict[str, Any]:
        found = self.folder.settings(self.label)
        return {"algorithm": self.algorithm} if found is None else flat(found)

    @property
    def target(self) -> float | None:
        return next((t for run in self.runs if (t := run.numbers["target_accuracy"])), None) or number(
            self.settings.get("stop.target_accuracy")
        )

    def key(self) -> tuple[Any, ...]:
        """What must be equal for two series to be compared."""
        task = tuple((name, value) for name, value in self.settings.items() if name.startswith("task."))
        if not task:
            task = (("folder", str(self.folder.path)),)
        return (*task, self.target or 0.0)

    def rank(self) -> tuple[float, float, float]:
        """Less is better: seeds that missed the target, the mean time to it, and how inaccurate they were."""
        hits = _known(self.runs, "first_hit_seconds")
        best = _known(self.runs, "best_accuracy")
        return len(self.runs) - len(hits), fmean(hits) if hits else math.inf, -(fmean(best) if best else 0.0)


def _known(runs: Iterable[Entry], name: str) -> list[float]:
    return [value for run in runs if (value := run.numbers[name]) is not None]


def payload(folders: Sequence[Folder], title: str) -> dict[str, Any]:
    """All that the page shows."""
    found = [
        Series(folder, label, [run for run in folder.runs if run.label == label])
        for folder in folders
        for label in dict.fromkeys(run.label for run in folder.runs)
    ]
    if not found:
        raise UserError("there is nothing to show: no run has a measurement yet")
    groups: dict[tuple[Any, ...], list[Series]] = {}
    for series in found:
        groups.setdefault(series.key(), []).append(series)
    for own in groups.values():
        for place, series in enumerate(sorted(own, key=Series.rank)):
            _read_plans(series, chart=place < MOST_CHARTS)
    every = _thinning(found)
    titles = _titles(list(groups.values()))
    return {
        "title": title,
        "made": datetime.now(UTC).isoformat(timespec="minutes"),
        "version": __version__,
        "every": every,
        "groups": [_group(own, name, every, groups) for name, own in zip(titles, groups.values(), strict=True)],
        "folders": [_folder(folder, found) for folder in folders],
    }


def _read_plans(series: Series, *, chart: bool) -> None:
    for run in series.runs:
        path = series.folder.plan_path(run)
        if path is not None:
            try:
                series.digests[run.seed] = digest(path, bars=chart and not series.digests)
            except UserError as error:
                series.notes.append(str(error))


def _thinning(found: Iterable[Series]) -> int:
    total = sum(len(run.trail.rounds) for series in found for run in series.runs)
    return max(1, math.ceil(total / MOST_POINTS))


# Groups.


def _titles(groups: Sequence[Sequence[Series]]) -> list[str]:
    """The names of the studies where they tell groups apart, else what differs between their tasks."""
    names = [" + ".join(dict.fromkeys(s.folder.name for s in own)) for own in groups]
    if len(set(names)) == len(names):
        return names
    tasks = [own[0].settings for own in groups]
    differing = [n for n in tasks[0] if n.startswith("task.") and len({str(t.get(n)) for t in tasks}) > 1]
    targets = len({own[0].target for own in groups}) > 1
    found = []
    for name, own, task in zip(names, groups, tasks, strict=True):
        said = [f"{key.split('.')[-1]} {task.get(key)}" for key in differing]
        said += [f"target {100 * own[0].target:g} %"] if targets and own[0].target else []
        found.append(f"{name}: {', '.join(said)}" if said else name)
    return found


def _group(own: list[Series], title: str, every: int, groups: Mapping[Any, Sequence[Series]]) -> dict[str, Any]:
    names = _names(own)
    order = sorted(range(len(own)), key=lambda i: own[i].rank())
    looks = _looks(own, order)
    charted = set(order[:MOST_CHARTS])
    series = [
        {
            **_series(each, every, chart=i in charted),
            "name": names[i],
            "look": looks[i],
            "place": order.index(i),
            "shown": order.index(i) < MOST_SHOWN,
        }
        for i, each in enumerate(own)
    ]
    target = own[0].target
    return {
        "title": title,
        "about": _about(own),
        "target": target or None,
        "verdict": _verdict([(shorten(names[i]), own[i]) for i in order], target),
        "winner": order[0] if _decided(own[order[0]], target) and len(own) > 1 else None,
        "series": series,
        "split": _split(own),
        "differences": _differences(own, names),
        "notes": list(dict.fromkeys(note for each in own for note in each.notes)),
    }


def shorten(text: str, most: int = 60) -> str:
    """A name fit for a sentence."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _names(own: Sequence[Series]) -> list[str]:
    """Labels, with the study in front where two would be the same."""
    labels = [each.label for each in own]
    return [f"{each.folder.name}: {each.label}" if labels.count(each.label) > 1 else each.label for each in own]


def _looks(own: Sequence[Series], order: Sequence[int]) -> list[dict[str, Any]]:
    """A colour for light and for dark, a dash and a symbol: an algorithm's own, as in every other figure.

    Where an algorithm has many settings their shades could not be told apart: then looks go by rank, so that those
    that are ticked at first differ as much as they can.
    """
    counts = Counter(each.algorithm for each in own)
    if max(counts.values()) > MOST_SHADES or (len(counts) == 1 and len(own) > 1):
        return [_ranked(order.index(i)) for i in range(len(own))]
    seen: Counter[str] = Counter()
    found = []
    for each in own:
        how = look(each.algorithm, seen[each.algorithm])
        seen[each.algorithm] += 1
        dash = how["linestyle"]
        pixels = "solid" if dash == "-" else ",".join(f"{2.2 * part:.3g}px" for part in dash[1])
        symbol = SYMBOLS[how["marker"]] + ("-open" if how["markerfacecolor"] == "white" else "")
        found.append(_look(how["color"], pixels, symbol))
    return found


def _ranked(place: int) -> dict[str, Any]:
    dash = ("solid", "9px,4px", "3px,3px", "10px,3px,3px,3px")[place // len(WHEEL) % 4]
    return _look(WHEEL[place % len(WHEEL)], dash, list(SYMBOLS.values())[place % len(SYMBOLS)])


def _look(colour: str, dash: str, symbol: str) -> dict[str, Any]:
    dark = "#e6e6e6" if colour == "#000000" else tint(colour, 0.3)
    return {"light": colour, "dark": dark, "dash": dash, "symbol": symbol}


def _about(own: Sequence[Series]) -> str:
    """The task in one line."""
    settings = own[0].settings
    if "task.data" not in settings:
        return ""
    split = settings["task.split"]
    how = {
        "iid": "every client has data of all classes",
        "classes": f"every client has {settings['task.classes_per_client']} classes",
        "dirichlet": f"classes shared out by Dirichlet({settings['task.alpha']:g})",
        "shards": f"every client has {settings['task.shards_per_client']} shards",
    }.get(split, split)
    clients = sorted({each.settings["clients.num_clients"] for each in own})
    seeds = sorted({run.seed for each in own for run in each.runs})
    return (
        f"{settings['task.data']}, model {settings['task.model']}; {' or '.join(map(str, clients))} clients, {how}; "
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
    )


def _decided(best: Series, target: float | None) -> bool:
    return best.rank()[0] < len(best.runs) if target else bool(_known(best.runs, "best_accuracy"))


def _verdict(ranked: Sequence[tuple[str, Series]], target: float | None) -> str:
    """What came out, in a sentence or two."""
    name, best = ranked[0]
    if not _decided(best, target):
        goal = f"{100 * target:g} %" if target else "any accuracy"
        return f"Nothing reached {goal} yet." if any(_running(s) for _, s in ranked) else f"Nothing reached {goal}."
    if not target:
        value = fmean(_known(best.runs, "best_accuracy"))
        return f"{name} was the most accurate: {100 * value:.1f} %. No target accuracy was set, so nothing was timed."
    missed, seconds, _ = best.rank()
    count = "" if not missed else f" in {len(best.runs) - missed:g} of {len(best.runs)} seeds"
    said = f"{name} reached {100 * target:g} % first: after {seconds:.3g} simulated seconds{count}"
    hit = [(other, s.rank()) for other, s in ranked[1:] if s.rank()[0] < len(s.runs)]
    if hit and hit[0][1][0] == missed and seconds > 0:
        ratio = hit[0][1][1] / seconds
        said += f", {ratio:.2g} times as fast as {hit[0][0]}" if ratio >= 1.05 else f", just ahead of {hit[0][0]}"
    late = [other for other, s in ranked[1:] if s.rank()[0] == len(s.runs) and not _running(s)]
    if late:
        shown = ", ".join(late[:3]) + (f" and {len(late) - 3} more" if len(late) > 3 else "")
        said += f". {shown} did not reach it"
    return f"{said}. {_caution(best, [s for _, s in ranked[1:] if s.rank()[0] < len(s.runs)])}".strip()


def _caution(best: Series, others: Sequence[Series]) -> str:
    """How far the ranking can be trusted."""
    if not others:
        return ""
    if min(len(best.runs), len(others[0].runs)) == 1:
        return "With one seed only, another might rank them otherwise."
    spreads = [stdev(hits) for s in (best, others[0]) if len(hits := _known(s.runs, "first_hit_seconds")) > 1]
    if spreads and others[0].rank()[1] - best.rank()[1] < max(spreads):
        return "The lead over the second is smaller than the spread over seeds, so it may be chance."
    return ""


def _running(series: Series) -> bool:
    return not series.folder.finished and any(run.status == "running" for run in series.runs)


def _differences(own: Sequence[Series], names: Sequence[str]) -> dict[str, Any]:
    """Settings that differ (a column each) and those that all share; what only one algorithm has counts as its own."""
    tables = [each.settings for each in own]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    shared, differing = {}, []
    for key in keys:
        values = {_shown(table[key]) for table in tables if key in table}
        if len(values) == 1 and (all(key in table for table in tables) or not key.startswith("task.")):
            shared[key] = next(iter(values))
        else:
            differing.append(key)
    rows = [
        [name, *(_shown(table[key]) if key in table else "" for key in differing)]
        for name, table in zip(names, tables, strict=True)
    ]
    return {"columns": differing, "rows": rows, "shared": shared}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _split(own: Sequence[Series]) -> dict[str, Any] | None:
    """The split of the first folder that kept it and whose first setting is in this group."""
    for each in own:
        split = each.folder.split
        if split is not None and each.folder.runs and each.folder.runs[0].label == each.label:
            shown = split.counts[:MOST_SPLIT]
            return {"title": split.title, "counts": shown, "of": len(split.counts)}
    return None


# Series and runs.


def _series(series: Series, every: int, *, chart: bool) -> dict[str, Any]:
    settings = series.folder.settings(series.label)
    megabytes = None if settings is None else settings.clients.model_megabytes
    speeds: dict[int, Any] = {}
    if settings is not None and series.digests:
        try:
            speeds = {seed: make_fleet(settings, seed).step_times for seed in series.digests}
        except UserError as error:
            series.notes.append(f"speeds of clients are not known: {error}")
    fits = {s: t for s, t in speeds.items() if len(t) == series.digests[s].num_clients}
    first = next(iter(series.digests), None)
    hits = _known(series.runs, "first_hit_seconds")
    return {
        "algorithm": series.algorithm,
        "folder": series.folder.name,
        "chosen": series.label in series.folder.best,
        "hit": fmean(hits) if hits else None,
        "spread": stdev(hits) if len(hits) > 1 else None,
        "hits": len(hits),
        **{name: _average(series.runs, name) for name in (
            "best_accuracy", "final_accuracy", "rounds", "seconds", "staleness_mean", "updates_trained",
            "updates_started", "wall_seconds",
        )},
        "runs": [_run(run, series.digests.get(run.seed), megabytes, every) for run in series.runs],
        "staleness": _staleness(series.digests.values()),
        "participation": _participation(series.digests, fits),
        "gantt": _rounded(gantt(series.digests[first], fits.get(first))) if chart and first is not None else None,
        "gantt_seed": first,
    }  # fmt: skip


def _average(runs: Sequence[Entry], name: str) -> float | None:
    known = _known(runs, name)
    return fmean(known) if known else None


def _staleness(found: Iterable[Digest]) -> list[int] | None:
    counts = [each.staleness for each in found]
    if not counts:
        return None
    total = np.zeros(max(map(len, counts)), np.int64)
    for each in counts:
        total[: len(each)] += each
    return [int(value) for value in total]


def _participation(found: Mapping[int, Digest], speeds: Mapping[int, Any]) -> dict[str, Any] | None:
    if not speeds:
        return None
    most = max(20, 240 // len(speeds))
    parts = [participation(found[seed].merged, speeds[seed], most) for seed in speeds]
    return {
        "step": _rounded([x for part in parts for x in part["step"]]),
        "share": _rounded([y for part in parts for y in part["share"]]),
        "each": max(part["each"] for part in parts),
    }


def _run(run: Entry, found: Digest | None, megabytes: float | None, every: int) -> dict[str, Any]:
    trail = run.trail
    size = len(trail.rounds)
    kept = [i for i in range(size) if i % every == 0 or i == size - 1]
    sent = _sent(trail, found, megabytes)
    return {
        "seed": run.seed,
        "status": run.status,
        "plan": run.plan,
        "hit": run.numbers["first_hit_seconds"],
        "seconds": run.numbers["seconds"],
        "diverged_at": run.numbers["diverged_at"],
        "best_accuracy": run.numbers["best_accuracy"],
        "x": {
            "seconds": [_six(trail.seconds[i]) for i in kept],
            "rounds": [int(trail.rounds[i]) for i in kept],
            "updates": [int(trail.updates[i]) for i in kept],
            "bytes": None if sent is None else [_six(sent[i]) for i in kept],
        },
        "accuracy": [_six(trail.accuracy[i], 5) for i in kept],
        "loss": [_six(trail.loss[i], 5) for i in kept],
    }


def _sent(trail: Trail, found: Digest | None, megabytes: float | None) -> list[float] | None:
    """Megabytes up and down, by all clients, at every measurement."""
    if found is None or megabytes is None:
        return None
    last = len(found.traffic) - 1
    return [megabytes * found.traffic[min(int(done), last)] for done in trail.rounds]


def _six(value: float | None, digits: int = 6) -> float | None:
    """As many digits as a chart can show."""
    return None if value is None else float(f"{value:.{digits}g}")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return _six(value)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _folder(folder: Folder, found: Iterable[Series]) -> dict[str, Any]:
    own = [each for each in found if each.folder is folder]
    return {
        "name": folder.name,
        "path": str(folder.path),
        "finished": folder.finished,
        "searched": folder.searched,
        "provenance": dict(folder.provenance),
        "config": folder.text,
        "notes": [*folder.notes, *dict.fromkeys(note for each in own for note in each.notes)],
        "plans": [
            {"label": each.label, "seed": run.seed, "plan": run.plan} for each in own for run in each.runs if run.plan
        ],
    }


# The live view.

MOST_LIVE = 400  # measurements of a run


def live(folder: Folder) -> list[dict[str, Any]]:
    """What is known of a run while it runs: its measurements, without its plans."""
    found = []
    for label in dict.fromkeys(run.label for run in folder.runs):
        own = [run for run in folder.runs if run.label == label]
        longest = max(len(run.trail.rounds) for run in own)
        every = max(1, math.ceil(longest / MOST_LIVE))
        found.append(
            {
                "name": label,
                "algorithm": own[0].algorithm,
                "target": Series(folder, label, own).target or None,
                "runs": [_run(run, None, None, every) for run in own],
            }
        )
    return found
