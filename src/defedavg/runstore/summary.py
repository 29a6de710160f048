"""The entries of summary.json, and the labels that name a run in files, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config.study import SweepPoint
from ..jsonio import is_whole
from ..planning.plan_stats import PlanStats
from .client_results import FIGURES as CLIENT_FIGURES
from .metrics import PER_POSITION, metric_field, number, perplexity

if TYPE_CHECKING:
    from ..training import RunProgress

ENERGY = ("energy_joules", "client_energy_median", "client_energy_p95", "client_energy_most")
"""The energy of all clients, and per client, if steps or bytes take some."""

NUMBERS = (
    "target_accuracy", "first_hit_seconds", "sustained_seconds", "rounds", "seconds", "best_accuracy",
    "final_accuracy", "diverged_at", "updates_trained", "updates_started", "staleness_mean", "uplink_bytes",
    "downlink_bytes", "wall_seconds", "final_perplexity", *CLIENT_FIGURES, *ENERGY,
)  # fmt: skip
"""The numbers in an entry of a summary."""

_OPTIONAL = ("uplink_bytes", "downlink_bytes", "final_perplexity", *CLIENT_FIGURES, *ENERGY)


def run_entry(
    point: SweepPoint,
    seed: int,
    progress: RunProgress,
    stats: PlanStats,
    plan_hash: str,
    *,
    metric: str,
    wall_seconds: float,
    threads: int,
    clients: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """Return the entry of one run; ``metric`` names what its accuracies are, ``clients`` has the figures over clients.

    ``updates_trained`` are those of its rounds, without what was computed ahead.
    """
    last = progress.evaluations[-1].loss if progress.evaluations else None
    tokens = {"final_perplexity": perplexity(metric, last)} if metric == PER_POSITION else {}
    return {
        "algorithm": point.settings.algorithm,
        "label": point.label,
        "swept": dict(point.swept),
        "seed": seed,
        "status": str(progress.status),
        **metric_field(metric),
        "target_accuracy": point.settings.stop.target_accuracy or None,
        "first_hit_seconds": progress.first_hit_seconds,
        "sustained_seconds": progress.sustained_seconds,
        "rounds": progress.rounds,
        "seconds": progress.seconds,
        "best_accuracy": progress.best_accuracy,
        "final_accuracy": progress.final_accuracy,
        **tokens,
        "diverged_at": progress.diverged_at,
        "updates_trained": stats.jobs_trained,
        "updates_started": stats.jobs_started,
        "staleness_mean": stats.staleness_mean,
        # A sparse plan omits messages that no merge depends on, so their bytes are unknown.
        "uplink_bytes": None if stats.jobs_started is None else stats.uplink_bytes,
        "downlink_bytes": None if stats.jobs_started is None else stats.downlink_bytes,
        **(clients or {}),
        **_energy(stats),
        "participation": list(stats.participation),
        "plan_sha256": plan_hash,
        "wall_seconds": wall_seconds,
        "torch_threads": threads,
    }


def _energy(stats: PlanStats) -> dict[str, float]:
    each = stats.energy_per_client
    if stats.energy_joules is None or each is None:
        return {}
    return dict(zip(ENERGY, (stats.energy_joules, each.median, each.p95, each.most), strict=True))


def is_whole_entry(entry: Mapping[str, Any]) -> bool:
    """Return whether a stored entry has the fields that a table of finished runs needs; an unknown number is None."""
    numbers = [entry.get(name) if name in _OPTIONAL else entry.get(name, "missing") for name in NUMBERS]
    shares = entry.get("participation")
    return (
        all(isinstance(entry.get(name), str) for name in ("label", "status"))
        and is_whole(entry.get("seed"))
        and all(value is None or number(value) is not None for value in numbers)
        and isinstance(shares, list)
        and len(shares) > 0
        and all(number(share) is not None for share in shares)
    )


def label_with_rates(label: str, global_lr: float | None, local_lr: float | None) -> str:
    """Return the label of a pair of learning rates; a rate that the algorithm does not have is None."""
    rates = [f"{name}={value:g}" for name, value in (("η", global_lr), ("η̄", local_lr)) if value]
    return " ".join([label, *rates])
