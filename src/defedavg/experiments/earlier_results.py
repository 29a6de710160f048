"""What an earlier session left beside its checkpoints: evaluations, and the results of a finished study."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from ..config.renamed_settings import current_label, current_name
from ..errors import UserError
from ..fileio import read_text
from ..runstore.layout import RunFiles
from ..runstore.metrics import measurement, metric_of
from ..runstore.summary import is_whole_entry
from ..training import Evaluation


def finished_results(
    files: RunFiles, expected: Iterable[tuple[str, int, str]]
) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
    """Return the entries and the provenance of a finished study; None if it is not finished.

    Raise ``UserError`` unless the entries are whole and those of the runs ``expected``: label, seed and metric.
    """
    try:
        summary = json.loads(read_text(files.summary)) if files.summary.exists() else {}
        if summary.get("finished") is not True:
            return None
        entries, origin = [dict(entry) for entry in summary["runs"]], dict(summary["provenance"])
        found = [(current_label(entry["label"]), entry["seed"], metric_of(entry)) for entry in entries]
        valid = all(map(is_whole_entry, entries)) and sorted(found) == sorted(expected)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise UserError(f"{files.summary} is not valid; start again with --force")
    return entries, origin


def evaluation_of(line: Mapping[str, Any]) -> Evaluation:
    """Return the evaluation in a line of the metrics; a loss that was not finite is NaN again.

    Raise ``KeyError`` or ``TypeError`` for a line without the numbers of an evaluation.
    """
    found = measurement(line)
    if found is None or any(type(line[name]) not in (int, float, NoneType) for name in found.values):
        raise TypeError("not the numbers of an evaluation")
    values: dict[str, Any] = {**found.values}
    return Evaluation(**{**values, "loss": float("nan") if values["loss"] is None else values["loss"]})


def evaluations_by_run(path: Path, text: str, key: Callable[[Mapping[str, Any]], str]) -> dict[str, list[Evaluation]]:
    """Return the evaluations in the text of a journal by the ``key`` of their run, with present names of settings."""
    evaluations: dict[str, list[Evaluation]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            values = {current_name(name): value for name, value in json.loads(line).items()}
            values["label"] = current_label(values["label"])
            evaluations.setdefault(key(values), []).append(evaluation_of(values))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError(f"{path}, line {number} is damaged; start again with --force") from None
    return evaluations
