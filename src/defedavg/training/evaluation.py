"""Looks at many versions at once: whether they are numbers, their loss and accuracy. Reading changes no run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..tasks import Data
from .reference import Reference
from .stopping import EvalResult, EvalSchedule, PendingEval, look
from .trainer import Trainer

Verdict = Callable[[], list[EvalResult]]


class PendingResults(Protocol):
    """A run whose versions are looked at."""

    reference: Reference
    meter: EvalSchedule


class Evaluator:
    """On the CPU versions are measured one after the other; on a device stacked, and read when they are asked for."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def look(self, fresh: Sequence[tuple[PendingResults, PendingEval]]) -> Verdict:
        """Begin to look at versions; call what comes back to know."""
        if not fresh or not self._trainer.asynchronous:
            return lambda: [look(run.reference, run.meter, due) for run, due in fresh]
        finite = [torch.isfinite(due.weights).all().double() for _, due in fresh]
        test = self._measure([(i, run.meter.test, due) for i, (run, due) in enumerate(fresh) if due.measured])
        probes = [(i, run.meter.probe, due) for i, (run, due) in enumerate(fresh) if due.measured]
        train = self._measure([(i, probe, due) for i, probe, due in probes if probe is not None])
        none = torch.full((2,), math.nan, dtype=torch.float64, device=finite[0].device)
        rows = [
            torch.stack([seen, *test.get(i, none).unbind(), train.get(i, none)[0]]) for i, seen in enumerate(finite)
        ]
        host = torch.empty((len(rows), 4), dtype=torch.float64, pin_memory=True)
        host.copy_(torch.stack(rows), non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def verdict() -> list[EvalResult]:
            done.synchronize()
            return [_outcome(row, run, due) for row, (run, due) in zip(host.tolist(), fresh, strict=True)]

        return verdict

    def _measure(self, entries: Sequence[tuple[int, Data, PendingEval]]) -> dict[int, Tensor]:
        """Loss and accuracy by number of the entry; versions that are measured on the same data go together."""
        groups: dict[int, list[tuple[int, Data, PendingEval]]] = {}
        for entry in entries:
            groups.setdefault(id(entry[1]), []).append(entry)
        found: dict[int, Tensor] = {}
        for group in groups.values():
            values = self._trainer.measure([due.weights for *_, due in group], group[0][1])
            found.update(zip((i for i, *_ in group), values, strict=True))
        return found


def _outcome(row: Sequence[float], run: PendingResults, due: PendingEval) -> EvalResult:
    finite, loss, accuracy, train_loss = row
    if not finite:
        return EvalResult(finite=False)
    if not due.measured:
        return EvalResult(finite=True)
    classes = run.reference.task.classes is not None
    return EvalResult(True, loss, accuracy if classes else None, train_loss if run.meter.probe else None)
