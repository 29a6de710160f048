"""Hypothesis strategies for settings files: small studies with changed, unknown, misplaced and combined settings."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS
from defedavg.algorithms.protocol import SERVER_OPTIMIZERS, WEIGHTINGS
from defedavg.config.settings import OPTIMIZERS, SCHEDULE_BY, TABLES
from helpers.corruption import scalars
from helpers.strategies import variants

SMALL: dict[str, Any] = {
    "algorithms": ["fedavg", "defedavg-niid"],
    "seeds": [0],
    "task": {"model": "softmax"},
    "clients": {"num_clients": 6},
    "training": {"updates_per_round": 2, "local_steps": 2, "batch_size": 2},
    "stop": {"max_rounds": 3},
}
KINDS = {**TABLES, **{name: kind.settings_type for name, kind in ALGORITHMS.items()}}
KEYS = [(table, item) for table, kind in KINDS.items() for item in dataclasses.fields(kind)]
TASK_KEYS = {"data", "module", "trace"}  # they name files: tested on their own
SCHEDULES = ["constant", "step(1, 0.5)", "step(2, 1e-300)", "cosine(2)", "cosine(1e-9)", "inverse-sqrt(3)"]
AUGMENTATIONS = ["none", "flip", "crop(1)", "flip+crop(2)", "crop(27)"]
FUNCTIONS = [
    *SCHEDULES,
    *AUGMENTATIONS,
    "windows(1, 2)",
    "windows(0, 0)",
    "lognormal(1)",
    "uniform(5, 1)",
    "pareto(0)",
    "two-speed(2, -1)",
    "equal(",
    "inverse-sqrt(0)",
    "step(1, 2)",
    "crop(99)",
]

GROUPS: list[dict[tuple[str, str], list[Any]]] = [
    {
        ("training", "server_optimizer"): list(SERVER_OPTIMIZERS),
        ("training", "server_momentum"): [0.0, 0.5, 0.999999],
        ("training", "server_beta2"): [0.0, 0.9, 0.999999],
        ("training", "server_epsilon"): [1e-300, 1e-8, 1e-3, 1e300],
        ("training", "global_lr"): [1e-30, 0.01, 1.0, 1e30],
    },
    {
        ("training", "optimizer"): list(OPTIMIZERS),
        ("training", "momentum"): [0.0, 0.5, 0.999999],
        ("training", "nesterov"): [True, False],
        ("training", "beta1"): [0.0, 0.9],
        ("training", "beta2"): [0.0, 0.999],
        ("training", "epsilon"): [1e-30, 1e-8, 1],
        ("training", "local_lr"): [1e-30, 0.05, 1e30],
    },
    {
        ("training", "weight_decay"): [0.0, 0.1, 1e30],
        ("training", "prox"): [0.0, 0.5, 1e30],
        ("training", "clip_norm"): [0.0, 1e-30, 0.1, 1e30],
    },
    {
        ("training", "local_schedule"): SCHEDULES,
        ("training", "global_schedule"): SCHEDULES,
        ("training", "schedule_by"): list(SCHEDULE_BY),
    },
    {
        ("training", "augment"): AUGMENTATIONS,
        ("task", "normalise"): ["standard", "unit"],
        ("task", "model"): ["softmax", "mlp", "cnn"],
    },
    {
        ("training", "weighting"): list(WEIGHTINGS),
        ("training", "sampling"): ["replacement", "shuffle"],
        ("task", "split"): ["iid", "classes", "dirichlet", "shards", "sampled", "sampled-classes"],
        ("task", "alpha"): [0.01, 1e9],
    },
    {
        ("clients", "failure_rate"): [0.0, 0.3, 0.9],
        ("clients", "return_seconds"): [0.0, 0.1, float("inf")],
        ("clients", "availability"): ["always", "windows(0.1, 1)", "windows(3, 0)"],
        ("clients", "jitter"): [0.0, 1.0],
        ("clients", "latency_seconds"): [0.0, 0.5],
        ("training", "timeout_seconds"): [0.0, 1e-9, 1.0],
    },
    {
        ("stop", "target_accuracy"): [0.01, 1.0],
        ("stop", "stop_at_target"): [True, False],
        ("stop", "consecutive_hits"): [1, 2],
        ("stop", "eval_every_rounds"): [1, 2],
        ("stop", "train_samples"): [0, 1, 50],
    },
]
"""Settings that act together, each with values that are valid alone: table and key -> values."""


def _choices(item: dataclasses.Field[Any]) -> list[Any]:
    """Return values that the setting may accept: its default, and the words of its help text."""
    if isinstance(item.default, bool):
        return [True, False]
    if isinstance(item.default, str):
        return [item.default, *re.findall(r"[a-z-]+", item.metadata.get("help", "")), *FUNCTIONS]
    return [item.default, 0, 1, 2, 3, 0.5]


def _affordable(value: Any) -> bool:
    """Whether training with this size would end soon, or must be refused."""
    numbers = value if isinstance(value, list) else [value]
    return all(not isinstance(n, int | float) or not 4 < n < 1e15 for n in numbers)


def _put(study: dict[str, Any], table: str, key: str, value: Any) -> None:
    holder = study.setdefault(table, {})
    if isinstance(holder, dict):
        holder[key] = value


def _combine(draw: st.DrawFn, study: dict[str, Any]) -> None:
    """Set some settings of a group to valid values, in their own table or for one algorithm alone."""
    group = draw(st.sampled_from(GROUPS))
    own = draw(st.sampled_from([None, None, *study["algorithms"]]))
    for table, key in draw(st.lists(st.sampled_from(list(group)), min_size=1, unique=True)):
        _put(study, own if own and table == "training" else table, key, draw(st.sampled_from(group[table, key])))


def _configure(draw: st.DrawFn, study: dict[str, Any]) -> None:
    """Fill the tables of the algorithms that are run with valid values; sometimes one of them may be invalid."""
    for name in study["algorithms"]:
        own = draw(st.sampled_from(variants(ALGORITHMS[name])))
        for item in dataclasses.fields(own):
            valid = draw(st.integers(0, 7)) != 5
            _put(study, name, item.name, getattr(own, item.name) if valid else draw(st.sampled_from(_choices(item))))


@st.composite
def studies(draw: st.DrawFn, *, trained: bool) -> dict[str, Any]:
    """Return a small study with combined, changed, unknown and misplaced settings; with ``trained``, one to train."""
    study: dict[str, Any] = {
        name: dict(value) if isinstance(value, dict) else list(value) for name, value in SMALL.items()
    }
    study["algorithms"] = draw(st.lists(st.sampled_from(sorted(ALGORITHMS)), min_size=1, max_size=2, unique=True))
    for _ in range(draw(st.integers(0, 3))):
        _combine(draw, study)
    if draw(st.booleans()):
        _configure(draw, study)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 4, 0, 0]))):
        table, item = draw(st.sampled_from(KEYS))
        if item.name in TASK_KEYS:
            continue
        value = draw(st.sampled_from(_choices(item)) | scalars() | st.lists(scalars(), max_size=3))
        if trained and (item.name in ("max_rounds", "max_seconds") or not _affordable(value)):
            continue
        _put(study, table, item.name, value)
    match draw(st.integers(0, 20)):  # values near the ends are drawn more often
        case 7:
            study[draw(st.sampled_from(sorted(study)) | st.text(max_size=6))] = draw(scalars())
        case 9:
            study["seeds"] = draw(st.lists(scalars(), max_size=3) | st.just([2**70, -5]))
        case 11:
            study["name"] = draw(scalars())
        case 13:
            _put(study, draw(st.sampled_from(sorted(KINDS))), draw(st.text(max_size=6)), 1)
    return study
