"""What each client did and gets at the end of a run: a row per client, and the figures over clients in a summary.

A row has the client's training samples, the seconds that it needs to answer a request (download, local steps, upload),
its merged updates, its energy, and loss and accuracy of the last version on its own test samples. Test users that are
not clients have rows of their own, without what only a client has. What is unknown is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import counted
from ..jsonio import is_whole
from .metrics import number, read_lines

if TYPE_CHECKING:
    from ..training.client_evaluation import ClientScores

WHOLE = ("client", "train_samples", "updates", "test_samples")
REAL = ("answer_seconds", "joules", "accuracy", "loss")
COLUMNS = (
    "client", "user", "train_samples", "answer_seconds", "updates", "joules", "test_samples", "accuracy", "loss",
)  # fmt: skip
AGAINST = {"slowness": "answer_seconds", "samples": "train_samples", "updates": "updates"}
"""What the accuracy of a client is compared with -> the column that has it."""
FIGURES = (
    "clients_evaluated", "clients_left_out", "client_accuracy_mean", "client_accuracy_worst_decile",
    "client_accuracy_best_decile", "client_accuracy_worst", "client_accuracy_spread", "client_loss_mean",
    "client_loss_worst_decile", *(f"client_correlation_{name}" for name in AGAINST),
)  # fmt: skip
"""The figures over clients in an entry of a summary."""

Row = dict[str, Any]
Values = NDArray[Any]


def client_rows(
    scores: ClientScores | None,
    *,
    train_samples: Sequence[int] | None,
    answer_seconds: Values,
    updates: Values,
    joules: Values | None,
) -> list[Row]:
    """Return the rows of one run: of all clients, then of test users that are not clients."""
    rows: list[Row] = [
        {
            **dict.fromkeys(COLUMNS),
            "client": client,
            "user": str(client),
            "train_samples": None if train_samples is None else train_samples[client],
            "answer_seconds": float(seconds),
            "updates": int(updates[client]),
            "joules": None if joules is None else float(joules[client]),
            "test_samples": 0,
        }
        for client, seconds in enumerate(answer_seconds)
    ]
    if scores is None:
        return rows
    for i, (client, name) in enumerate(zip(scores.tests.clients, scores.tests.names, strict=True)):
        row = dict.fromkeys(COLUMNS) if client is None else rows[client]
        if client is None:
            rows.append(row)
        accuracy = None if scores.accuracy is None else _finite(scores.accuracy[i])
        loss = _finite(scores.loss[i])
        row |= {"user": name, "test_samples": int(scores.samples[i]), "accuracy": accuracy, "loss": loss}
    return rows


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def client_figures(rows: Iterable[Row]) -> dict[str, float | None]:
    """Return the figures over clients, each client with the same weight; none if no client was evaluated.

    A decile is the mean over a tenth of the clients, rounded up: those with the lowest or the highest accuracy, or with
    the highest loss. The spread is the standard deviation. Correlations are Spearman's, of the accuracy.
    """
    listed = list(rows)
    tested = [row for row in listed if row["test_samples"]]
    if not tested:
        return {}
    # Test users that are not clients replace the clients, which then have no samples.
    others = any(row["client"] is None for row in tested)
    found: dict[str, float | None] = dict.fromkeys(FIGURES)
    found["clients_evaluated"] = len(tested)
    found["clients_left_out"] = 0 if others else len(listed) - len(tested)
    losses = np.sort([row["loss"] for row in tested if row["loss"] is not None])
    if len(losses):
        found["client_loss_mean"] = float(losses.mean())
        found["client_loss_worst_decile"] = float(losses[-_tenth(losses) :].mean())
    return found | _accuracy_figures([row for row in tested if row["accuracy"] is not None])


def _accuracy_figures(rows: Sequence[Row]) -> dict[str, float | None]:
    if not rows:
        return {}
    ordered = np.sort([row["accuracy"] for row in rows])
    found: dict[str, float | None] = {
        "client_accuracy_mean": float(ordered.mean()),
        "client_accuracy_worst_decile": float(ordered[: _tenth(ordered)].mean()),
        "client_accuracy_best_decile": float(ordered[-_tenth(ordered) :].mean()),
        "client_accuracy_worst": float(ordered[0]),
        "client_accuracy_spread": float(ordered.std()),
    }
    for name, column in AGAINST.items():
        pairs = [(row[column], row["accuracy"]) for row in rows if row[column] is not None]
        found[f"client_correlation_{name}"] = rank_correlation(*zip(*pairs, strict=True)) if pairs else None
    return found


def _tenth(values: Values) -> int:
    return -(-len(values) // 10)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, with mean ranks for ties; None if one side has equal values alone."""
    ranks = [_ranks(np.asarray(values, np.float64)) for values in (one, other)]
    deviations = [each - each.mean() for each in ranks]
    scale = math.sqrt(float(deviations[0] @ deviations[0]) * float(deviations[1] @ deviations[1]))
    return float(deviations[0] @ deviations[1]) / scale if scale else None


def _ranks(values: Values) -> Values:
    _, groups, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[groups])


def read_client_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Return the rows in a file of a run folder, and notes about what cannot be read; none if there is no file."""
    if not path.exists():
        return [], []
    lines = read_lines(path)
    rows = [row for raw in lines.objects if (row := _row(raw)) is not None]
    notes = lines.notes(path.name)
    if len(rows) < len(lines.objects):
        left_out = counted(len(lines.objects) - len(rows), "line")
        notes.append(f"{path.name}: left out {left_out} without a client")
    return rows, notes


def _row(raw: Mapping[str, Any]) -> Row | None:
    """Return a line of a file as a row; None if it does not name a client or a user."""
    if not isinstance(raw.get("user"), str) or not is_whole(raw.get("test_samples")):
        return None
    whole = {name: raw.get(name) if is_whole(raw.get(name)) else None for name in WHOLE}
    values = {**whole, **{name: number(raw.get(name)) for name in REAL}, "user": raw["user"]}
    return {name: values[name] for name in COLUMNS}
