"""Evaluators: whether versions are finite, their loss and accuracy. Evaluation reads versions and changes no run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..tasks import Data
from .eval_schedule import EvalResult, EvalSchedule, PendingEval
from .reference import Reference
from .trainer import Trainer

PendingResults = Callable[[], list[EvalResult]]
"""Waits for the results of an evaluation and returns them."""


def evaluate_version(executor: Reference, schedule: EvalSchedule, pending: PendingEval) -> EvalResult:
    """Evaluate a version now."""
    if not bool(torch.isfinite(pending.weights).all()):
        return EvalResult(finite=False)
    if not pending.evaluate:
        return EvalResult(finite=True)
    loss, accuracy = executor.evaluate(pending.weights, schedule.test)
    train_loss = executor.evaluate(pending.weights, schedule.train_subset)[0] if schedule.train_subset else None
    return EvalResult(True, loss, accuracy, train_loss)


class EvaluatedRun(Protocol):
    """A run whose versions an evaluator evaluates."""

    reference: Reference
    schedule: EvalSchedule


class Evaluator:
    """Evaluates versions one after the other on the CPU, and stacked on a CUDA device without waiting for it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def start(self, pending: Sequence[tuple[EvaluatedRun, PendingEval]]) -> PendingResults:
        """Start to evaluate versions; the returned call waits for the results."""
        if not pending or not self._trainer.asynchronous:
            return lambda: [evaluate_version(run.reference, run.schedule, one) for run, one in pending]
        finite = [torch.isfinite(one.weights).all().double() for _, one in pending]
        chosen = [(i, run, one) for i, (run, one) in enumerate(pending) if one.evaluate]
        test = self._evaluate([(i, run.schedule.test, one) for i, run, one in chosen])
        subsets = [(i, run.schedule.train_subset, one) for i, run, one in chosen]
        train = self._evaluate([(i, subset, one) for i, subset, one in subsets if subset is not None])
        none = torch.full((2,), math.nan, dtype=torch.float64, device=finite[0].device)
        rows = [
            torch.stack([seen, *test.get(i, none).unbind(), train.get(i, none)[0]]) for i, seen in enumerate(finite)
        ]
        host = torch.empty((len(rows), 4), dtype=torch.float64, pin_memory=True)
        host.copy_(torch.stack(rows), non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def results() -> list[EvalResult]:
            done.synchronize()
            return [_result(row, run, one) for row, (run, one) in zip(host.tolist(), pending, strict=True)]

        return results

    def _evaluate(self, entries: Sequence[tuple[int, Data, PendingEval]]) -> dict[int, Tensor]:
        """Return loss and accuracy by number of the entry; versions with the same data are evaluated together."""
        groups: dict[int, list[tuple[int, Data, PendingEval]]] = {}
        for entry in entries:
            groups.setdefault(id(entry[1]), []).append(entry)
        values: dict[int, Tensor] = {}
        for group in groups.values():
            rows = self._trainer.evaluate([pending.weights for *_, pending in group], group[0][1])
            values.update(zip((i for i, *_ in group), rows, strict=True))
        return values


def _result(row: Sequence[float], run: EvaluatedRun, pending: PendingEval) -> EvalResult:
    finite, loss, accuracy, train_loss = row
    if not finite:
        return EvalResult(finite=False)
    if not pending.evaluate:
        return EvalResult(finite=True)
    classes = run.reference.task.classes is not None
    return EvalResult(True, loss, accuracy if classes else None, train_loss if run.schedule.train_subset else None)
