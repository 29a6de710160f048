"""The tables of the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from statistics import fmean
from typing import Any, TypeVar

from rich.table import Table

from ..algorithms import ALGORITHMS
from ..config.study import TABLES
from ..config.timeouts import AUTOMATIC
from ..durations import duration
from ..errors import counted, printable
from ..planning.plan_stats import PlanStats
from ..runstore.client_results import FIGURES as CLIENT_FIGURES
from ..runstore.metrics import PER_POSITION, common_metric, metric_of, perplexity
from ..runstore.reader import RunEntry
from ..runstore.summary import ENERGY
from .figure_columns import CLIENT_CAPTION, CLIENT_COLUMNS, for_terminal
from .seed_figures import (
    Record,
    accuracy_text,
    mean,
    outcomes,
    over_seeds,
    over_seeds_caption,
    record_of,
    time_to_target,
)

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
_QUARTERS = "fastest ¼, slowest ¼: how often updates of these clients are merged, relative to an equal share (1.00)."
_READY = "ready: jobs that can be trained at once, since their start versions exist; mean over the batches of a run."
_LEAN = "–: not simulated, since no merge depends on it (clients.plan_detail)."
_STATE = "state: vectors that the server keeps from merge to merge, at most, × the size of a model."
_PREFIXES = ("", "k", "M", "G", "T", "P")
_HEARD = (
    "heard: share of the clients of which an update was merged by 10, 50 and 100 % of the time; never: number of the "
    "others at the end. Gini: of merged updates per client, 0 if all have the same number. timed out, drawn: clients "
    f"that did not answer within the timeout, and those drawn instead; unless training.timeout_seconds is set, it is "
    f"{AUTOMATIC}, if some may not answer. up, down: per client, median / 95 % / most; updates count whether they are "
    "merged or not."
)
_ENERGY = "energy: per client, median / 95 % / most, of all local steps, merged or not, and of all messages."
_COUNTS = (
    "trained: updates that the merges of these rounds used, with at least one local step; at most started: all updates "
    "that clients began in these rounds."
)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by their keys, in the order of their first items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def seconds(value: float | None) -> str:
    """Format a duration."""
    return "–" if value is None else f"{value:.4g} s"


def share(value: float | None) -> str:
    """Format a share as a percentage."""
    return "–" if value is None else f"{100 * value:.1f} %"


def score(value: float | None, metric: str) -> str:
    """Format the value of a metric: the accuracy as a percentage, others as they are."""
    return share(value) if metric == "accuracy" or value is None else f"{value:.4g}"


def score_and_perplexity(value: float | None, loss: float | None, metric: str) -> str:
    """Format the value of a metric and, if targets are tokens, the perplexity."""
    found = perplexity(metric, loss)
    return score(value, metric) if found is None else f"{score(value, metric)} (perplexity {found:.4g})"


def size(value: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def make(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None) -> Table:
    """Return a table with text in the first column and numbers in the others."""
    table = Table(
        title=printable(title), title_justify="left", caption=caption, caption_justify="left", box=None, pad_edge=False
    )
    for position, name in enumerate(columns):
        # On a narrow terminal a number is folded: one that is cut off would be another number.
        style: dict[str, Any] = {"justify": "right", "overflow": "fold"} if position else {"no_wrap": True}
        table.add_column(printable(name), header_style="bold", **style)
    for row in rows:
        table.add_row(*map(printable, row))
    return table


def _means(records: Sequence[Record], **formats: str) -> list[str]:
    """Format the means of some numbers, each in its own format."""
    means = {name: mean(records, name) for name in formats}
    return ["–" if value is None else format(value, formats[name]) for name, value in means.items()]


def _mean_counts(records: Sequence[Record], *names: str) -> list[str]:
    """Format the means of some counts; one that is not whole has a decimal, since 0.5 is not shown as none."""
    means = (mean(records, name) for name in names)
    return ["–" if value is None else f"{value:.{0 if value == round(value) else 1}f}" for value in means]


def _participation(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the mean participation of the fastest and of the slowest quarter of the clients."""
    return [f"{fmean(record['participation'][quarter] for record in records):.2f}" for quarter in (0, -1)]


def plan_table(
    labels: Sequence[str], stats: Sequence[Sequence[PlanStats]], rounds: int, seconds: float | None = None
) -> Table:
    """Return a table with one row per setting: means over its seeds; ``seconds`` were planned, or else ``rounds``."""
    columns: tuple[str, ...] = (
        "algorithm", "n", *(() if seconds is None else ("rounds", "updates")), "time/round", "stale mean", "p95", "max",
        "fastest ¼", "slowest ¼", "idle", "up", "down", "started", "merged", "ready",
    )  # fmt: skip
    stateful = any(each.state_vectors for group in stats for each in group)
    rows = [
        [*_plan_row(label, group, seconds is not None), *([_state(group)] if stateful else [])]
        for label, group in zip(labels, stats, strict=True)
    ]
    caption = f"{_QUARTERS} idle: neither training nor uploading. {_READY} {_LEAN}{' ' + _STATE if stateful else ''}"
    if stateful:
        columns = (*columns, "state")
    planned = counted(rounds, "round") if seconds is None else duration(seconds)
    return make(f"{planned}, mean over {counted(len(stats[0]), 'seed')}", columns, rows, caption)


def _plan_row(label: str, group: Sequence[PlanStats], timed: bool) -> list[str]:
    """Return the cells of one setting; ``timed`` plans differ in their rounds."""
    plans = [asdict(each) for each in group]
    return [
        label + _stalled(group),
        str(group[0].updates_per_round),
        *(_mean_counts(plans, "rounds", "jobs_merged") if timed else []),
        _duration(mean(plans, "seconds_per_round")),
        *_means(plans, staleness_mean=".1f", staleness_p95=".1f"),
        str(max(plan["staleness_max"] for plan in plans)),
        *_participation(plans),
        share(mean(plans, "idle_share")),
        *(size(mean(plans, name) or 0.0) for name in ("uplink_bytes", "downlink_bytes")),
        *_mean_counts(plans, "jobs_started"),
        share(mean(plans, "merged_share")),
        *_means(plans, ready_jobs_mean=".1f"),
    ]


def _stalled(group: Sequence[PlanStats]) -> str:
    """Return after how many rounds the plans of a setting stalled, and how many did if not all; nothing if none did."""
    ends = sorted(plan.rounds for plan in group if plan.stalled)
    if not ends:
        return ""
    some = "" if len(ends) == len(group) else f"{len(ends)} of {counted(len(group), 'seed')} "
    fewest = "" if ends[0] == ends[-1] else f"{ends[0]:,} to "
    return f" ({some}stalled after {fewest}{counted(ends[-1], 'round')})"


def clients_table(labels: Sequence[str], stats: Sequence[Sequence[PlanStats]]) -> Table:
    """Return a table of what clients did, with one row per setting: means over its seeds."""
    columns = ["algorithm", "heard: 10 %", "50 %", "100 %", "never", "Gini", "timeout", "timed out", "drawn"]
    spreads = {"uplink_per_client": "up", "downlink_per_client": "down", "energy_per_client": "energy"}
    powered = any(each.energy_per_client is not None for group in stats for each in group)
    if not powered:
        del spreads["energy_per_client"]
    rows = []
    for label, group in zip(labels, stats, strict=True):
        plans = [asdict(each) for each in group]
        rows.append(
            [
                label,
                *(f"{100 * fmean(plan['coverage'][i] for plan in plans):.0f} %" for i in range(3)),
                *_mean_counts(plans, "never_heard"),
                *_means(plans, gini=".2f"),
                _duration(mean(plans, "timeout_seconds")),
                *_mean_counts(plans, "timed_out", "substitutes"),
                *(_spread([plan[name] for plan in plans], "B" if "link" in name else "J") for name in spreads),
            ]
        )
    return make("clients", [*columns, *spreads.values()], rows, f"{_HEARD}{' ' + _ENERGY if powered else ''}")


def _spread(spreads: Sequence[Mapping[str, float] | None], unit: str) -> str:
    """Format the median, the 95th percentile and the maximum over clients, each as a mean over seeds, in one unit."""
    known = [spread for spread in spreads if spread is not None]
    if not known:
        return "–"
    values = [fmean(spread[name] for spread in known) for name in ("median", "p95", "most")]
    power = min((len(f"{values[-1]:.0f}") - 1) // 3, len(_PREFIXES) - 1)
    return f"{' / '.join(f'{value / 1000**power:.3g}' for value in values)} {_PREFIXES[power]}{unit}"


def _duration(value: float | None) -> str:
    """Format a duration that may be unknown."""
    return "–" if value is None else duration(value)


def _state(plans: Sequence[PlanStats]) -> str:
    """Format the state vectors of the plan that has most; nothing for plans without state."""
    most = max(plans, key=lambda plan: plan.state_peak)
    return f"{most.state_peak:,} × {size(most.state_bytes / most.state_peak)}" if most.state_peak else ""


def stats_json(stats: Sequence[PlanStats], swept: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the numbers of the plan table, one object per plan."""
    return [{**asdict(s), "swept": point} for s, point in zip(stats, swept, strict=True)]


def algorithm_rows() -> list[dict[str, Any]]:
    """Return the registered algorithms, ready for JSON."""
    return [
        {
            **{name: getattr(kind, name) for name in ("name", "summary", "equation", "citation")},
            "rates": [name for name in ("global_lr", "local_lr") if getattr(kind, f"uses_{name}")],
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
                "toml": "inf" if f.default == math.inf else json.dumps(f.default, ensure_ascii=False),
                "by_profile": f.metadata.get("profile", False),
                "help": f.metadata["help"],
            }
            for f in fields(kind)
        }
        for table, kind in kinds.items()
        if fields(kind)
    }


def result_table(title: str, entries: Sequence[dict[str, Any]], clock: str = "simulated seconds") -> Table:
    """Return a table with one row per setting, over its seeds."""
    targets = {entry["target_accuracy"] for entry in entries}
    target = targets.pop() if len(targets) == 1 else None
    metric = common_metric(map(metric_of, entries))
    goal = f"{100 * target:.0f} %" if target and metric == "accuracy" else f"{target:g}" if target else "target"
    tokens = metric == PER_POSITION
    columns = (
        "algorithm", f"time to {goal}", "rounds", f"best {metric}", f"final {metric}",
        *(["final perplexity"] if tokens else []),
        "staleness", "fastest ¼", "slowest ¼", "trained", "started", "real time",
    )  # fmt: skip
    rows = [
        [
            label,
            time_to_target(seeds),
            *_means(seeds, rounds=".0f"),
            *(accuracy_text(seeds, name, metric_of(seeds[0])) for name in ("best_accuracy", "final_accuracy")),
            *(_means(seeds, final_perplexity=".4g") if tokens else []),
            *_means(seeds, staleness_mean=".1f"),
            *_participation(seeds),
            *_means(seeds, updates_trained=".0f", updates_started=".0f"),
            seconds(mean(seeds, "wall_seconds")),
        ]
        for label, seeds in _by_label(entries).items()
    ]
    caption = f"{over_seeds_caption(metric)} Times to the target are {clock}. {_QUARTERS} {_COUNTS}"
    return make(title, columns, rows, caption)


def result_tables(title: str, entries: Sequence[dict[str, Any]]) -> list[Table]:
    """Return the table of results and, if some run has it, that of what each client gets and of energy."""
    clients = _client_results(entries)
    return [result_table(title, entries), *([] if clients is None else [clients])]


def _client_results(entries: Sequence[dict[str, Any]]) -> Table | None:
    known = [name for name in (*CLIENT_FIGURES, *ENERGY) if any(entry.get(name) is not None for entry in entries)]
    if not known:
        return None
    metric = common_metric(map(metric_of, entries))
    records = [{**dict.fromkeys((*CLIENT_FIGURES, *ENERGY)), **entry} for entry in entries]
    shown = for_terminal([column for column in CLIENT_COLUMNS if column.key in known])
    rows = [
        [label, *(over_seeds(seeds, each.key, each.in_metric(metric).factor).text(each.alone) for each in shown)]
        for label, seeds in _by_label(records).items()
    ]
    return make("clients", ["algorithm", *(each.in_metric(metric).heading for each in shown)], rows, CLIENT_CAPTION)


def _by_label(entries: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return grouped(entries, lambda entry: str(entry["label"]))


def bench_table(found: Mapping[str, Any]) -> Table:
    """Return the table of ``defedavg bench``."""
    model = f"{found['model']} on {'×'.join(map(str, found['image']))}, {found['runs']} runs together"
    rows = [
        (f"loop over clients, {found['reference_precision']}", f"{found['reference_updates_per_s']:,.4g} updates/s"),
        (f"batched, {found['precision']}", f"{found['batched_updates_per_s']:,.4g} updates/s"),
        ("ratio", f"{found['ratio']:,.3g}"),
        ("mean batch", f"{found['mean_batch']:.3g} jobs, {found['batch_fill']:.0%} of the largest batch"),
        ("  jobs ready at once", f"{found['ready_jobs_per_run']:.3g} per run, as its plan allows"),
        ("a large matrix product", f"{found['gemm_gflops']:,.4g} GFLOP/s"),
        ("  share achieved", f"{found['gemm_share']:.1%}"),
        ("a large memory copy", f"{found['bandwidth_gb_per_s']:,.4g} GB/s"),
        ("  share used by weights alone", f"{found['bandwidth_share']:.1%}"),
        ("peak memory", size(found["peak_memory_bytes"])),
        ("a tiny study beyond training and PyTorch", f"{found['overhead_seconds']:.2f} s"),
    ]
    caption = f"PyTorch {found['torch']}, {found['threads']} threads"
    return make(f"{found['device']}: {model}", ("", "measured"), rows, caption)


def tuning_table(title: str, entries: Iterable[RunEntry], best: Sequence[str]) -> Table:
    """Return a table with one row per pair of learning rates, over its seeds, that marks the best of each setting."""
    records = [{"label": entry.label, **record_of(entry)} for entry in entries]
    rows = [
        (
            f"{label}{' ←' if label in best else ''}",
            time_to_target(seeds),
            ", ".join(f"{count} {word}" for word, count in outcomes(seeds).items()),
            accuracy_text(seeds, metric=metric_of(seeds[0])),
            *_means(seeds, seconds=".4g"),
        )
        for label, seeds in _by_label(records).items()
    ]
    metric = common_metric(map(metric_of, records))
    caption = (
        f"{over_seeds_caption(metric)} ←: the best learning rates of a setting. dropped: stopped early, in the worse "
        "half or unable to win. missed: not reached within the limits."
    )
    return make(title, ("rates", "time to target", "seeds", f"best {metric}", "seconds run"), rows, caption)
