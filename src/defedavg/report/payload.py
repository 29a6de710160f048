"""The data of the report page: series of runs, in groups that can be compared.

A series is a setting with its seeds. A group holds the series that can be ranked against each other. Everything here is
plain data, ready for JSON.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from .. import __version__
from ..config.build import make_fleet, message_megabytes
from ..config.study import Settings
from ..errors import UserError, counted
from ..runstore.deployment_status import DeploymentMonitor
from ..runstore.layout import RunFiles
from ..runstore.reader import RunEntry, RunFolder
from .client_points import clients_of
from .groups import groups_of, series_of, titles_of
from .palette import look, page_look
from .plan_digest import Digest, Floats, client_activity, digest, participation
from .seed_figures import accuracy_text, mean, record_of, time_to_target
from .series import Series, clock_of, conclusion, has_result, looks_of, names_of, shorten

MAX_EVALUATIONS = 60_000  # on one page; above, every second, third, … is shown
MAX_ACTIVITY_CHARTS = 12  # in a group
MAX_SHOWN = 8  # series of a group that are ticked when the page opens
MAX_SPLIT_CLIENTS = 1000  # in the chart of the data split
MAX_LIVE_EVALUATIONS = 400  # of a run in the live view
MAX_LIVE_VARIANTS = 15  # settings of one algorithm in the live view that differ in their look


def payload(folders: Sequence[RunFolder], title: str) -> dict[str, Any]:
    """Return all the data of the page."""
    every = _all_series(folders)
    groups = groups_of(every)
    for group in groups:
        for rank, series in enumerate(sorted(group, key=Series.rank)):
            _read_plans(series, with_activity=rank < MAX_ACTIVITY_CHARTS)
    step = max(1, math.ceil(sum(len(run.trail.rounds) for series in every for run in series.runs) / MAX_EVALUATIONS))
    return {
        "title": title,
        "made": datetime.now(UTC).isoformat(timespec="minutes"),
        "version": __version__,
        "thinning": step,
        "groups": [_group(group, name, step) for name, group in zip(titles_of(groups), groups, strict=True)],
        "folders": [_folder(folder, [series for series in every if series.folder is folder]) for folder in folders],
    }


def live(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the data of a run for the live view: its evaluations, without its plans."""
    found = []
    for series in series_of(folder):
        step = max(1, math.ceil(max(len(run.trail.rounds) for run in series.runs) / MAX_LIVE_EVALUATIONS))
        runs = [_run(run, None, None, step) for run in series.runs]
        found.append(
            {
                "name": series.label,
                "algorithm": series.algorithm,
                "metric": series.metric,
                "target": series.target or None,
                "looks": [page_look(look(series.algorithm, variant)) for variant in range(MAX_LIVE_VARIANTS)],
                "runs": runs,
            }
        )
    return found


def _all_series(folders: Sequence[RunFolder]) -> list[Series]:
    if not folders:
        raise UserError("there is nothing to show: no run was given")
    every = [series for folder in folders for series in series_of(folder)]
    return every or [_without_results(folder) for folder in folders]


def _without_results(folder: RunFolder) -> Series:
    """Return a series for a folder without any result, so that the page shows its settings and what is missing."""
    name = ", ".join(folder.algorithms) or folder.title
    return Series(folder, name, [RunEntry(name, name, 0, "no results yet")])


def _read_plans(series: Series, *, with_activity: bool) -> None:
    """Read the plans of a series; only the first needs the bars of the activity chart."""
    for run in series.runs:
        path = series.folder.plan_path(run)
        if path is not None:
            try:
                series.digests[run.seed] = digest(path, bars=with_activity and not series.digests)
            except UserError as error:
                series.notes.append(str(error))


def _group(group: Sequence[Series], title: str, step: int) -> dict[str, Any]:
    names = names_of(group)
    order = sorted(range(len(group)), key=lambda i: group[i].rank())
    looks = looks_of(group)
    target = group[0].target
    return {
        "title": title,
        "task": _task(group),
        "target": target or None,
        "metric": group[0].metric,
        "clock": clock_of(group),
        "conclusion": conclusion([(shorten(names[i]), group[i]) for i in order], target),
        "winner": order[0] if has_result(group[order[0]], target) and len(group) > 1 else None,
        "series": [
            {
                **_series(series, step, with_activity=order.index(i) < MAX_ACTIVITY_CHARTS),
                "name": names[i],
                "look": looks[i],
                "rank": order.index(i),
                "shown": order.index(i) < MAX_SHOWN,
            }
            for i, series in enumerate(group)
        ],
        "split": _split(group),
        "differences": _differences(group, names),
        "notes": _notes(group),
    }


def _notes(group: Iterable[Series]) -> list[str]:
    return list(dict.fromkeys(note for series in group for note in series.notes))


def _task(group: Sequence[Series]) -> str:
    settings = group[0].settings
    if "task.data" not in settings:
        return ""
    split, samples = settings["task.split"], f"every client has {settings['task.samples_per_client']} samples"
    partition = {
        "iid": "every client has data of all classes",
        "classes": f"every client has {settings['task.classes_per_client']} classes",
        "random-classes": f"every client has {settings['task.classes_per_client']} random classes",
        "grouped-classes": f"every group of clients has {settings['task.classes_per_client']} classes to itself",
        "dirichlet": f"classes partitioned by Dirichlet({settings['task.alpha']:g})",
        "shards": f"every client has {settings['task.shards_per_client']} shards",
        "sampled": f"{samples} drawn from all",
        "natural": "every client is a user of the data set",
        "sampled-classes": f"{samples} drawn from {settings['task.classes_per_client']} random classes",
    }.get(split, split)
    clients = sorted({series.settings["clients.num_clients"] for series in group})
    fewest, most = min(len(series.runs) for series in group), max(len(series.runs) for series in group)
    seeds = counted(most, "seed") if fewest == most else f"{fewest} to {most} seeds"
    return (
        f"{settings['task.data']}, model {settings['task.model']}; {' or '.join(map(str, clients))} clients, "
        f"{partition}; {seeds}"
    )


def _differences(group: Sequence[Series], names: Sequence[str]) -> dict[str, Any]:
    """Return a column per setting that differs, and what all series share, or all whose algorithm has the setting."""
    tables = [{key: _setting_text(value) for key, value in series.settings.items()} for series in group]
    shared, differing = {}, []
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table[key] for table in tables if key in table]
        if len(set(values)) == 1 and (len(values) == len(tables) or not key.startswith("task.")):
            shared[key] = values[0]
        else:
            differing.append(key)
    rows = [[name, *(table.get(key, "") for key in differing)] for name, table in zip(names, tables, strict=True)]
    return {"columns": differing, "rows": rows, "shared": shared}


def _setting_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _split(group: Sequence[Series]) -> dict[str, Any] | None:
    """Return the data split of the first folder that has one and whose first setting has the task of this group."""
    for series in group:
        split, runs = series.folder.partition, series.folder.runs
        if split is not None and runs and _has_split_of(series, runs[0].label):
            return {"title": split.title, "counts": split.counts[:MAX_SPLIT_CLIENTS], "of": len(split.counts)}
    return None


def _has_split_of(series: Series, label: str) -> bool:
    """Return whether a series has the data split of another label of its folder: fleets of one study share it."""
    own, other = series.folder.settings(series.label), series.folder.settings(label)
    if label == series.label or own is None or other is None:
        return label == series.label
    return (own.task, own.clients.num_clients) == (other.task, other.clients.num_clients)


def _series(series: Series, step: int, *, with_activity: bool) -> dict[str, Any]:
    settings = series.folder.settings(series.label)
    megabytes = None if settings is None else message_megabytes(settings)
    step_times = {} if settings is None else _step_times(series, settings)
    plans = series.digests
    counts = [plan.staleness for plan in plans.values()]
    seed = next(iter(plans), None)
    activity = None
    clients = clients_of(series)
    if with_activity and seed is not None and len(plans[seed].jobs):
        activity = _rounded(client_activity(plans[seed], step_times.get(seed)))
    return {
        "algorithm": series.algorithm,
        "folder": series.folder.title,
        "chosen": series.label in series.folder.best,
        "seconds_to_target": mean(series.numbers, "first_hit_seconds"),
        "time_text": time_to_target([record_of(run) for run in series.runs]),
        "accuracy_text": accuracy_text(series.numbers),
        "hits": series.hits,
        **{name: mean(series.numbers, name) for name in (
            "best_accuracy", "final_accuracy", "rounds", "seconds", "staleness_mean", "updates_trained",
            "updates_started", "wall_seconds", "final_perplexity",
        )},
        "runs": [_run(run, plans.get(run.seed), megabytes, step) for run in series.runs],
        "lean_plans": any(not plan.traffic for plan in plans.values()),
        "staleness": [int(sum(column)) for column in itertools.zip_longest(*counts, fillvalue=0)] or None,
        "participation": _participation(plans, step_times),
        "clients": _rounded(clients),
        "activity": activity,
        "activity_seed": seed,
    }  # fmt: skip


def _step_times(series: Series, settings: Settings) -> dict[int, Floats]:
    """Return the step times of the clients, by seed, for every plan that they fit."""
    try:
        times = {seed: make_fleet(settings, seed).step_times for seed in series.digests}
    except UserError as error:
        series.notes.append(f"the speeds of clients are unknown: {error}")
        return {}
    return {seed: each for seed, each in times.items() if len(each) == series.digests[seed].num_clients}


def _participation(plans: Mapping[int, Digest], step_times: Mapping[int, Floats]) -> dict[str, Any] | None:
    if not step_times:
        return None
    max_points = max(20, 240 // len(step_times))
    parts = [participation(plans[seed].merged, times, max_points) for seed, times in step_times.items()]
    points = {key: _rounded([value for part in parts for value in part[key]]) for key in ("step", "share")}
    return {**points, "clients_per_point": max(part["clients_per_point"] for part in parts)}


def _run(run: RunEntry, plan: Digest | None, megabytes: float | None, step: int) -> dict[str, Any]:
    trail = run.trail
    size = len(trail.rounds)
    kept = sorted({*range(0, size, step), *range(size)[-1:]})  # the last is always shown
    sent = None  # megabytes that all clients sent and received by every evaluation, if the plan says so
    if plan is not None and megabytes is not None and plan.traffic:
        last = len(plan.traffic) - 1
        sent = [_digits(megabytes * plan.traffic[min(int(trail.rounds[i]), last)]) for i in kept]
    return {
        **{name: getattr(run, name) for name in ("seed", "status", "plan")},
        "seconds_to_target": run.numbers["first_hit_seconds"],
        **{name: run.numbers[name] for name in ("seconds", "diverged_at", "best_accuracy")},
        "x": {
            "seconds": [_digits(trail.seconds[i]) for i in kept],
            "rounds": [int(trail.rounds[i]) for i in kept],
            "updates": [int(trail.updates[i]) for i in kept],
            "megabytes": sent,
        },
        "accuracy": [_digits(trail.accuracy[i], 5) for i in kept],
        "loss": [_digits(trail.loss[i], 5) for i in kept],
    }


def _digits(value: float | None, digits: int = 6) -> float | None:
    """Round to the digits that a chart can show."""
    return None if value is None else float(f"{value:.{digits}g}")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return _digits(value)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _folder(folder: RunFolder, group: Sequence[Series]) -> dict[str, Any]:
    return {
        "name": folder.title,
        "path": str(folder.path),
        "finished": folder.finished,
        "searched": folder.tuned,
        "provenance": dict(folder.provenance),
        "config": folder.text,
        "deployment": _deployment(folder),
        "notes": [*folder.notes, *_notes(group)],
        "plans": [{"label": r.label, "seed": r.seed, "plan": r.plan} for s in group for r in s.runs if r.plan],
    }


def _deployment(folder: RunFolder) -> dict[str, Any] | None:
    """Return what the event log of a deployment says: clients, rates, staleness, refused updates; None without one."""
    if folder.memory is not None or not RunFiles(folder.path).event_log.is_file():
        return None
    status = DeploymentMonitor(folder.path).refresh()
    if folder.finished and not status.ended:  # the page is written before the last line of the log
        status.ended = folder.entries[0].status if folder.entries else "finished"
    return status.as_dict()
