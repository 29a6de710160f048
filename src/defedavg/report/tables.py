"""Tables for the terminal; each is also available as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from statistics import fmean
from typing import Any

from rich.table import Table

from ..algorithms import ALGORITHMS
from ..config.study import TABLES
from ..jsonio import about
from ..planning.plan_stats import PlanStats
from . import seed_stats


def seconds(value: float | None) -> str:
    """Format a duration."""
    return "–" if value is None else f"{value:.4g} s"


def share(value: float | None) -> str:
    """Format a share as a percentage."""
    return "–" if value is None else f"{100 * value:.1f} %"


def size(value: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def make(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None) -> Table:
    """Return a table with text in the first column and numbers in the others."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=None, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(
            column, justify="left" if position == 0 else "right", no_wrap=position == 0, header_style="bold"
        )
    for row in rows:
        table.add_row(*row)
    return table


def plan_table(labels: Sequence[str], stats: Sequence[Sequence[PlanStats]], rounds: int) -> Table:
    """Return a table with one row per setting: means over its seeds."""
    columns = (
        "algorithm", "n", "s/round", "stale mean", "p95", "max", "fastest ¼", "slowest ¼", "idle", "up", "down",
        "started", "merged",
    )  # fmt: skip
    rows = []
    for label, group in zip(labels, stats, strict=True):
        plans = [asdict(each) for each in group]
        rows.append(
            (
                label + (" (stalled)" if any(plan["stalled"] for plan in plans) else ""),
                str(group[0].updates_per_round),
                _mean(plans, "seconds_per_round", ".4g"),
                _mean(plans, "staleness_mean", ".1f"),
                _mean(plans, "staleness_p95", ".1f"),
                str(max(plan["staleness_max"] for plan in plans)),
                *_participation(plans),
                share(seed_stats.mean(plans, "idle_share")),
                size(seed_stats.mean(plans, "uplink_bytes") or 0.0),
                size(seed_stats.mean(plans, "downlink_bytes") or 0.0),
                _mean(plans, "jobs_started", ".0f"),
                share(seed_stats.mean(plans, "merged_share")),
            )
        )
    caption = (
        f"{_QUARTERS} idle: neither training nor uploading. "
        "–: not simulated, since no merge depends on it (clients.plan_detail)."
    )
    return make(f"{rounds} rounds, mean over {len(stats[0])} seed(s)", columns, rows, caption)


_QUARTERS = "fastest ¼, slowest ¼: how often updates of these clients are merged, relative to an equal share (1.00)."


def _participation(records: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Format the mean participation of the fastest and of the slowest quarter of the clients."""
    quarters = [fmean(record["participation"][quarter] for record in records) for quarter in (0, -1)]
    return f"{quarters[0]:.2f}", f"{quarters[1]:.2f}"


def stats_json(stats: Sequence[PlanStats], swept: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the numbers of the plan table, one object per plan."""
    return [{**asdict(s), "swept": point} for s, point in zip(stats, swept, strict=True)]


def algorithm_rows() -> list[dict[str, Any]]:
    """Return the registered algorithms, ready for JSON."""
    return [
        {
            "name": kind.name,
            "summary": kind.summary,
            "equation": kind.equation,
            "citation": kind.citation,
            "rates": [
                name for name, used in (("global_lr", kind.uses_global_lr), ("local_lr", kind.uses_local_lr)) if used
            ],
            "settings": {
                f.name: {"default": f.default, "help": f.metadata["help"]} for f in fields(kind.settings_type)
            },
        }
        for kind in ALGORITHMS.values()
    ]


def setting_rows() -> dict[str, dict[str, dict[str, Any]]]:
    """Return every table of the configuration file with its keys, their defaults and their help texts."""
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
    """Return a table with one row per setting, over its seeds."""
    targets = {entry["target_accuracy"] for entry in entries}
    target = targets.pop() if len(targets) == 1 else None
    columns = (
        "algorithm", f"time to {100 * target:.0f} %" if target else "time to target", "rounds", "best", "final",
        "staleness", "fastest ¼", "slowest ¼", "trained", "started", "real time",
    )  # fmt: skip
    rows = [
        (
            label,
            _time_to_target(seeds),
            _mean(seeds, "rounds", ".0f"),
            share(seed_stats.mean(seeds, "best_accuracy")),
            share(seed_stats.mean(seeds, "final_accuracy")),
            _mean(seeds, "staleness_mean", ".1f"),
            *_participation(seeds),
            _mean(seeds, "updates_trained", ".0f"),
            _mean(seeds, "updates_started", ".0f"),
            seconds(seed_stats.mean(seeds, "wall_seconds")),
        )
        for label, seeds in _by_label(entries).items()
    ]
    caption = (
        f"Times to the target are {clock}. {_QUARTERS} "
        "trained: updates that a merge needed. started: updates that clients began."
    )
    return make(title, columns, rows, caption)


def _by_label(entries: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(entry["label"], []).append(entry)
    return groups


def _mean(records: seed_stats.Records, name: str, form: str) -> str:
    value = seed_stats.mean(records, name)
    return "–" if value is None else format(value, form)


def _time_to_target(seeds: Sequence[dict[str, Any]]) -> str:
    """Format the mean time to the target and its spread, with a note on every seed that did not reach it."""
    notes = []
    for entry in seeds:
        if entry["diverged_at"] is not None:
            notes.append(f"diverged at round {entry['diverged_at']}")
        elif entry["status"] == "dropped":
            notes.append(f"dropped at {entry['seconds']:.3g} s")
        elif entry["first_hit_seconds"] is None and entry["target_accuracy"]:
            notes.append(f"not by {entry['seconds']:.3g} s")
    mean, spread = (f(seeds, "first_hit_seconds") for f in (seed_stats.mean, seed_stats.spread))
    times = [] if mean is None else [f"{mean:.4g}{'' if spread is None else f' ± {about(spread)}'} s"]
    return "; ".join([*times, *dict.fromkeys(notes)]) or "–"


def bench_table(found: Mapping[str, Any]) -> Table:
    """Return the table of ``defedavg bench``."""
    model = f"{found['model']} on {'×'.join(map(str, found['image']))}, {found['runs']} runs together"
    rows = [
        ("loop over clients", f"{found['reference_updates_per_s']:,.4g} updates/s"),
        ("batched", f"{found['batched_updates_per_s']:,.4g} updates/s"),
        ("ratio", f"{found['ratio']:,.3g}"),
        ("mean batch", f"{found['mean_batch']:.3g} jobs, {found['batch_fill']:.0%} of the largest batch"),
        ("a large matrix product", f"{found['gemm_gflops']:,.4g} GFLOP/s"),
        ("  share achieved", f"{found['gemm_share']:.1%}"),
        ("a large memory copy", f"{found['bandwidth_gb_per_s']:,.4g} GB/s"),
        ("  share used by weights alone", f"{found['bandwidth_share']:.1%}"),
        ("peak memory", size(found["peak_memory_bytes"])),
    ]
    caption = f"PyTorch {found['torch']}, {found['precision']}, {found['threads']} threads"
    return make(f"{found['device']}: {model}", ("", "measured"), rows, caption)


def tuning_table(title: str, records: Sequence[dict[str, Any]], best: Sequence[str]) -> Table:
    """Return a table with one row per pair of learning rates, over its seeds, that marks the best of each setting."""
    rows = [
        (
            f"{label}{' ←' if label in best else ''}",
            _time_to_target(seeds),
            share(seed_stats.mean(seeds, "best_accuracy")),
            _mean(seeds, "seconds", ".4g"),
            ", ".join(dict.fromkeys(record["status"] for record in seeds)),
        )
        for label, seeds in _by_label(records).items()
    ]
    caption = "←: the best learning rates of a setting. dropped: stopped early, in the worse half or unable to win."
    return make(title, ("rates", "time to target", "best accuracy", "seconds run", "ended by"), rows, caption)
