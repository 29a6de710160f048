"""From run folders to what the page is told: series of runs, in groups that can be compared.

A series is a setting with its seeds; a group is the series that learn the same task to the same target, since only
they can be ranked. Everything here is plain data, ready for JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean, stdev
from typing import Any

import numpy as np

from .. import __version__
from ..config.build import make_fleet
from ..errors import UserError
from ..runstore.reader import Entry, Folder, Trail
from .plan_digest import Digest, digest, gantt, participation
from .series import Series, decided, known, looks_of, names_of, shorten, verdict

MOST_POINTS = 60_000  # measurements on one page; beyond, every second, third, … is shown
MOST_CHARTS = 12  # series of a group with a chart of clients over time
MOST_SHOWN = 8  # series of a group that are ticked at first
MOST_SPLIT = 1000  # clients in the chart of the split


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
        "groups": [_group(own, name, every) for name, own in zip(titles, groups.values(), strict=True)],
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


def _group(own: list[Series], title: str, every: int) -> dict[str, Any]:
    names = names_of(own)
    order = sorted(range(len(own)), key=lambda i: own[i].rank())
    looks = looks_of(own, order)
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
        "verdict": verdict([(shorten(names[i]), own[i]) for i in order], target),
        "winner": order[0] if decided(own[order[0]], target) and len(own) > 1 else None,
        "series": series,
        "split": _split(own),
        "differences": _differences(own, names),
        "notes": list(dict.fromkeys(note for each in own for note in each.notes)),
    }


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
        "sampled": f"every client has {settings['task.samples_per_client']} samples drawn from all",
        "sampled-classes": f"every client has {settings['task.samples_per_client']} samples drawn from "
        f"{settings['task.classes_per_client']} classes",
    }.get(split, split)
    clients = sorted({each.settings["clients.num_clients"] for each in own})
    seeds = sorted({run.seed for each in own for run in each.runs})
    return (
        f"{settings['task.data']}, model {settings['task.model']}; {' or '.join(map(str, clients))} clients, {how}; "
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
    )


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
    hits = known(series.runs, "first_hit_seconds")
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
        "lean": any(not found.traffic for found in series.digests.values()),
        "staleness": _staleness(series.digests.values()),
        "participation": _participation(series.digests, fits),
        "gantt": None
        if not chart or first is None or not len(series.digests[first].jobs)
        else _rounded(gantt(series.digests[first], fits.get(first))),
        "gantt_seed": first,
    }  # fmt: skip


def _average(runs: Sequence[Entry], name: str) -> float | None:
    values = known(runs, name)
    return fmean(values) if values else None


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
    if found is None or megabytes is None or not found.traffic:
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
