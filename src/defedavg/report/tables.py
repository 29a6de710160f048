"""Tables for the terminal; every one of them is also available as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from ..algorithms import ALGORITHMS
from ..config.study import TABLES
from ..jsonio import about
from ..planning.plan_stats import PlanStats


def seconds(value: float | None) -> str:
    """A duration, short."""
    if value is None:
        return "–"
    return f"{value:.4g} s"


def share(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{100 * value:.1f} %"


def size(value: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def make(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None) -> Table:
    """A table whose first column is text and whose others are figures."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=None, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(
            column, justify="left" if position == 0 else "right", no_wrap=position == 0, header_style="bold"
        )
    for row in rows:
        table.add_row(*row)
    return table


def plan_table(labels: Sequence[str], stats: Sequence[Sequence[PlanStats]], rounds: int) -> Table:
    """One row per setting, means over its seeds."""
    columns = (
        "algorithm", "n", "s/round", "stale mean", "p95", "max", "fastest ¼", "slowest ¼", "idle", "up", "down",
        "started", "merged",
    )  # fmt: skip
    rows = []
    for label, group in zip(labels, stats, strict=True):
        mean = {name: fmean(getattr(s, name) for s in group) for name in _MEANS}
        known = {name: _average([asdict(s) for s in group], name) for name in _PERHAPS}
        rows.append(
            (
                label + (" (stalled)" if any(s.stalled for s in group) else ""),
                str(group[0].updates_per_round),
                f"{mean['seconds_per_round']:.4g}",
                f"{mean['staleness_mean']:.1f}",
                f"{mean['staleness_p95']:.1f}",
                str(max(s.staleness_max for s in group)),
                f"{fmean(s.participation[0] for s in group):.2f}",
                f"{fmean(s.participation[-1] for s in group):.2f}",
                share(known["idle_share"]),
                size(mean["uplink_bytes"]),
                size(mean["downlink_bytes"]),
                "–" if known["jobs_started"] is None else f"{known['jobs_started']:.0f}",
                share(known["merged_share"]),
            )
        )
    caption = (
        "Quarters of the clients by speed: how often their updates are merged, 1.00 being an equal share. "
        "idle: neither training nor sending. –: not followed, since no merge depends on it (clients.plan_detail)."
    )
    return make(f"{rounds} rounds, mean over {len(stats[0])} seed(s)", columns, rows, caption)


_MEANS = (
    "seconds_per_round",
    "staleness_mean",
    "staleness_p95",
    "uplink_bytes",
    "downlink_bytes",
)
_PERHAPS = ("idle_share", "jobs_started", "merged_share")


def stats_json(stats: Sequence[PlanStats], swept: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same figures, one object per plan."""
    return [{**asdict(s), "swept": point} for s, point in zip(stats, swept, strict=True)]


def algorithm_rows() -> list[dict[str, Any]]:
    """What the registry knows, ready for JSON."""
    return [
        {
            "name": kind.name,
            "summary": kind.summary,
            "equation": kind.equation,
            "citation": kind.citation,
            "rates": [
                word for word, used in (("global_lr", kind.uses_global_lr), ("local_lr", kind.uses_local_lr)) if used
            ],
            "settings": {
                f.name: {"default": f.default, "help": f.metadata["help"]} for f in fields(kind.settings_type)
            },
        }
        for kind in ALGORITHMS.values()
    ]


def setting_rows() -> dict[str, dict[str, dict[str, Any]]]:
    """Every table of the configuration file with its keys, their defaults and what they mean."""
    kinds = {**TABLES, **{name: kind.settings_type for name, kind in ALGORITHMS.items()}}
    return {
        table: {
            f.name: {
                "default": None if f.default == math.inf else f.default,
                "toml": _toml(f.default),
                "by_profile": f.metadata.get("profile", False),
                "help": f.metadata["help"],
            }
            for f in fields(kind)
        }
        for table, kind in kinds.items()
        if fields(kind)
    }


def _toml(value: Any) -> str:
    return "inf" if value == math.inf else json.dumps(value, ensure_ascii=False)


def result_table(title: str, entries: Sequence[dict[str, Any]], clock: str = "simulated seconds") -> Table:
    """One row per setting, over its seeds: time to the target first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(entry["label"], []).append(entry)
    targets = {entry["target_accuracy"] for entry in entries}
    target = targets.pop() if len(targets) == 1 else None
    columns = (
        "algorithm", f"time to {100 * target:.0f} %" if target else "time to target", "rounds", "best", "final",
        "staleness", "fastest ¼", "slowest ¼", "trained", "started", "real time",
    )  # fmt: skip
    rows = [
        (
            label,
            _hits(own),
            _mean(own, "rounds", ".0f"),
            share(_average(own, "best_accuracy")),
            share(_average(own, "final_accuracy")),
            _mean(own, "staleness_mean", ".1f"),
            f"{fmean(e['participation'][0] for e in own):.2f}",
            f"{fmean(e['participation'][-1] for e in own):.2f}",
            _mean(own, "updates_trained", ".0f"),
            _mean(own, "updates_started", ".0f"),
            seconds(_average(own, "wall_seconds")),
        )
        for label, own in groups.items()
    ]
    caption = (
        f"Times to the target are {clock}. Quarters of the clients by speed: how often their updates are "
        "merged, 1.00 being an equal share. trained/started: updates that some merge needed, of all that clients began."
    )
    return make(title, columns, rows, caption)


def _average(entries: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [entry[name] for entry in entries if entry[name] is not None]
    return fmean(values) if values else None


def _mean(entries: Sequence[dict[str, Any]], name: str, form: str) -> str:
    value = _average(entries, name)
    return "–" if value is None else format(value, form)


def _hits(entries: Sequence[dict[str, Any]]) -> str:
    """Mean time to the target and its spread; what did not get there is said, never left blank."""
    hits = [e["first_hit_seconds"] for e in entries if e["first_hit_seconds"] is not None]
    notes = []
    for entry in entries:
        if entry["diverged_at"] is not None:
            notes.append(f"diverged at round {entry['diverged_at']}")
        elif entry["status"] == "dropped":
            notes.append(f"dropped at {entry['seconds']:.3g} s")
        elif entry["first_hit_seconds"] is None and entry["target_accuracy"]:
            notes.append(f"not by {entry['seconds']:.3g} s")
    spread = f" ± {about(stdev(hits))}" if len(hits) > 1 else ""
    said = [f"{fmean(hits):.4g}{spread} s"] if hits else []
    return "; ".join([*said, *dict.fromkeys(notes)]) or "–"


def bench_table(found: Mapping[str, Any]) -> Table:
    """What ``defedavg bench`` measured."""
    model = f"{found['model']} on {'×'.join(map(str, found['image']))}, {found['runs']} runs together"
    rows = [
        ("the plain loop", f"{found['reference_updates_per_s']:,.4g} updates/s"),
        ("batched", f"{found['batched_updates_per_s']:,.4g} updates/s"),
        ("ratio", f"{found['ratio']:,.3g}"),
        ("mean batch", f"{found['mean_batch']:.3g} jobs, {found['batch_fill']:.0%} of the width"),
        ("a large product", f"{found['gemm_gflops']:,.4g} GFLOP/s"),
        ("  of it used", f"{found['gemm_share']:.1%}"),
        ("a large copy", f"{found['bandwidth_gb_per_s']:,.4g} GB/s"),
        ("  of it used by weights alone", f"{found['bandwidth_share']:.1%}"),
        ("peak memory", size(found["peak_memory_bytes"])),
    ]
    caption = f"PyTorch {found['torch']}, {found['precision']}, {found['threads']} threads"
    return make(f"{found['device']}: {model}", ("", "measured"), rows, caption)


def tuning_table(title: str, records: Sequence[dict[str, Any]], best: Sequence[str]) -> Table:
    """One row per pair of rates, over its seeds; the best of each setting is marked."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["label"], []).append(record)
    rows = [
        (
            f"{label}{' ←' if label in best else ''}",
            _hits(own),
            share(_average(own, "best_accuracy")),
            _mean(own, "seconds", ".4g"),
            ", ".join(dict.fromkeys(record["status"] for record in own)),
        )
        for label, own in groups.items()
    ]
    caption = "← the best rates of a setting. dropped: was among the worse half at a part of the time."
    return make(title, ("rates", "time to target", "best accuracy", "seconds run", "ended by"), rows, caption)
