"""The files of an advice: advice.json, advised.toml and a page; only times differ between equal searches."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..durations import duration
from ..errors import UserError, counted
from ..fileio import FolderLock, write_whole, writing
from ..jsonio import finite
from ..report.page import PLOTLY, asset, in_script
from .dropped import grouped
from .log_advice import FLEET
from .ranked import RankedCandidate
from .recommendation import Advice

ADVICE, STUDY, PAGE = "advice.json", "advised.toml", "advice.html"
MAX_ROWS = 300  # of the ranking in the page


def check_advice_folder(folder: Path, *, force: bool) -> None:
    """Refuse a folder that cannot be created, or that holds advice to run, unless it is to be replaced.

    The folder is not left behind: a search that ends without advice writes nothing.
    """
    with _created(folder):
        pass
    # A search that found no setting to run has nothing to lose.
    if (folder / STUDY).exists() and not force:
        raise UserError(f"{folder} already holds an advice; use --force to replace it, or another --out")


@contextmanager
def folder_for_trace(folder: Path) -> Iterator[None]:
    """Create the folder for the trace of a search; remove both if the block ends without an advice."""
    with _created(folder):
        try:
            yield
        finally:
            if not (folder / ADVICE).exists():
                (folder / FLEET).unlink(missing_ok=True)


@contextmanager
def _created(folder: Path) -> Iterator[None]:
    """Create a folder; remove what was created if it is empty at the end."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):  # it has files, or could not be created
            for path in missing:
                path.rmdir()


def write_advice(advice: Advice, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write all files; without a candidate that reached the target, there is no study to run."""
    with FolderLock(folder):
        text = json.dumps(finite(advice_json(advice, provenance)), indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(folder / ADVICE, (text + "\n").encode())
        if advice.best.reached:
            write_whole(folder / STUDY, advice.to_toml().encode())
        elif (folder / STUDY).exists():
            (folder / STUDY).unlink()
        write_whole(folder / PAGE, advice_page(advice, provenance).encode("utf-8", "backslashreplace"))


def advice_json(advice: Advice, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the advice as JSON values; whatever depends on the clock is in ``provenance``."""
    return {
        "name": advice.study.name,
        "advice": advice.sentence() if advice.best.reached else None,
        "target": advice.target,
        "horizon_seconds": advice.horizon,
        "candidates": advice.candidates,
        "planned": advice.planned,
        "seeds": list(advice.seeds),
        "steps": advice.steps,
        "updates": advice.updates,
        "share_of_grid": advice.steps / advice.grid_steps,
        "ended": advice.ended,
        "theory": advice.theory,
        "notes": list(advice.notes),
        "ranking": [asdict(each) for each in advice.ranking],
        "dropped": [{"setting": label, "reason": reason} for label, reason in advice.dropped],
        "provenance": {**provenance, "seconds": advice.seconds},
    }


def pareto_front(ranking: tuple[RankedCandidate, ...]) -> set[str]:
    """Return the candidates that no other beats in time, bytes and worst decile; an unknown decile is 0.

    One that missed the target on a seed has no time to compare: it is not on the front, and beats no other.
    """
    points = {
        each.label: (each.time.mean, each.bytes or 0.0, -(each.worst_decile or 0.0))
        for each in ranking
        if not each.missed and each.time is not None
    }
    return {
        label
        for label, point in points.items()
        if not any(
            all(a <= b for a, b in zip(other, point, strict=True)) and other != point for other in points.values()
        )
    }


def front_names(front: Sequence[RankedCandidate]) -> dict[str, str]:
    """Return, by label, the settings that tell a candidate on the front from the others of its algorithm there."""
    settings = {each.label: each.label.removeprefix(each.algorithm).split() for each in front}
    names: dict[str, str] = {}
    for each in front:
        own = [settings[other.label] for other in front if other.algorithm == each.algorithm]
        names[each.label] = " ".join(part for part in settings[each.label] if not all(part in parts for parts in own))
    return names


def dropped_groups(advice: Advice) -> list[dict[str, Any]]:
    """Return the settings that were not raced by reason, the most frequent reason first; numbers in reasons vary."""
    return [{"reason": found[0][1], "count": len(found), "example": found[0][0]} for found in grouped(advice.dropped)]


def facts(advice: Advice) -> list[tuple[str, str]]:
    """Return what a reader must know of the search, as names and values."""
    plans = counted(advice.planned, "plan")
    raced = f"raced: {len(advice.ranking)}, of which {advice.hits} reached the target"
    found = [
        ("target", f"{advice.target_text} within {duration(advice.horizon)} of simulated time"),
        ("candidates", f"{advice.candidates:,}, with {plans}; {raced}"),
        ("training", f"{advice.trained}; {100 * advice.steps / advice.grid_steps:.2g} % of the grid on one seed"),
        ("the search ended because", advice.ended),
    ]
    if advice.theory is not None:
        found.append(("theory", advice.theory))
    return found + [("note", note) for note in advice.notes]


def advice_page(advice: Advice, provenance: Mapping[str, Any]) -> str:
    """Return the page, as HTML."""
    front = pareto_front(advice.ranking)
    names = front_names([each for each in advice.ranking if each.label in front])
    dropped = counted(len(advice.dropped), "setting")
    payload = {
        "title": f"Advice for {advice.study.name}",
        "conclusion": advice.sentence(),
        "advised": advice.best.reached,
        "metric": advice.metric_name,
        "target": advice.target_text,
        "facts": facts(advice),
        "ranking": [
            _row(rank, each, names.get(each.label), advice.metric_name)
            for rank, each in enumerate(advice.ranking[:MAX_ROWS], start=1)
        ],
        "dropped": dropped_groups(advice),
        "dropped_note": f"{dropped} refused by an algorithm, dropped without training, or not started.",
        "provenance": [(name, str(value)) for name, value in provenance.items()],
    }
    parts = {
        "TITLE": html.escape(f"{payload['title']} · defedavg"),
        "STYLE": asset("style.css"),
        "DATA": in_script(payload),
        "PLOTLY": asset(PLOTLY),
        "SCRIPT": asset("charts.js") + asset("front.js") + asset("advice.js"),
    }
    # One pass: the inserted parts are not searched for further names.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("advice.html"))


def _row(rank: int, each: RankedCandidate, name: str | None, metric: str) -> dict[str, Any]:
    time, bound = each.time, each.longest_miss
    return {
        "rank": rank,
        "label": each.label,
        "algorithm": each.algorithm,
        "missed": bool(each.missed),
        "time": each.time_text(metric),
        "seconds_to_target": None if time is None else time.mean,
        "low": None if time is None else time.low,
        "high": None if time is None else time.high,
        "seeds": each.seeds,
        "bound_seconds": None if bound is None else bound.seconds,
        "bound_bytes": None if bound is None else bound.bytes,
        "bytes": each.bytes,
        "worst_decile": each.worst_decile,
        "staleness": each.staleness,
        "steps_per_second": each.steps_per_second,
        "front": name is not None,
        "name": name,
        "reason": each.reason,
    }
