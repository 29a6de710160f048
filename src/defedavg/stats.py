"""What a plan says without training: speed, staleness, participation, idleness, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .plan import Absence, Job, Plan, Replacement, Sent, Stall, Uploaded
from .profiles import Fleet

QUARTERS = 4


@dataclass(frozen=True, slots=True)
class PlanStats:
    """The figures of one plan; ``participation`` is per quarter of the clients, fastest first, 1 an equal share."""

    algorithm: str
    updates_per_round: int
    seed: int
    rounds: int
    seconds: float
    seconds_per_round: float
    staleness_mean: float
    staleness_p95: float
    staleness_max: int
    participation: tuple[float, ...]
    idle_share: float
    jobs_started: int
    jobs_merged: int
    merged_share: float
    uplink_bytes: float
    downlink_bytes: float
    absences: int
    replacements: int
    stalled: bool


def summarise(plan: Plan, fleet: Fleet) -> PlanStats:
    """The figures of a plan that this fleet carried out."""
    horizon = plan.seconds
    staleness = np.array([s for record in plan.rounds for s in record.merge.staleness])
    merged = np.array([u.client for record in plan.rounds for u, _ in record.merge.updates], dtype=np.int64)
    counts = np.bincount(merged, minlength=fleet.num_clients)
    size = fleet.model_megabytes * 1e6
    down = sum(fleet.num_clients if record.client is None else 1 for record in plan.records if isinstance(record, Sent))
    return PlanStats(
        algorithm=plan.header.algorithm,
        updates_per_round=plan.header.updates_per_round,
        seed=plan.header.seed,
        rounds=len(plan.rounds),
        seconds=horizon,
        seconds_per_round=horizon / len(plan.rounds) if plan.rounds else float("nan"),
        staleness_mean=float(staleness.mean()) if len(staleness) else 0.0,
        staleness_p95=float(np.percentile(staleness, 95)) if len(staleness) else 0.0,
        staleness_max=int(staleness.max()) if len(staleness) else 0,
        participation=_participation(counts, fleet),
        idle_share=_idle(plan, fleet),
        jobs_started=len(plan.jobs),
        jobs_merged=len(merged),
        merged_share=len(merged) / len(plan.jobs) if plan.jobs else 0.0,
        uplink_bytes=len(plan.uploads) * size,
        downlink_bytes=down * size,
        absences=sum(isinstance(record, Absence) for record in plan.records),
        replacements=sum(isinstance(record, Replacement) for record in plan.records),
        stalled=any(isinstance(record, Stall) for record in plan.records),
    )


def _participation(counts: np.ndarray[Any, Any], fleet: Fleet) -> tuple[float, ...]:
    order = np.argsort(fleet.step_times, kind="stable")
    parts = np.array_split(counts[order], min(QUARTERS, fleet.num_clients))
    mean = counts.mean()
    return tuple(float(part.mean() / mean) if mean else 0.0 for part in parts)


def _idle(plan: Plan, fleet: Fleet) -> float:
    """The share of client time spent neither training nor sending; what overlaps counts once."""
    horizon = plan.seconds
    if not horizon:
        return 0.0
    spans: dict[int, list[tuple[float, float]]] = {}
    for record in plan.records:
        if isinstance(record, Job | Uploaded):
            spans.setdefault(record.client, []).append((record.start, min(record.end, horizon)))
    total = 0.0
    for own in spans.values():
        reach = 0.0
        for start, end in sorted(own):
            if end > reach:
                total += end - max(start, reach)
                reach = end
    return 1.0 - total / (horizon * fleet.num_clients)
