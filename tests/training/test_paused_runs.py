"""Runs that the caller pauses and releases: on a device, the next batch is chosen before the last results arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from defedavg.tasks import Data, Task
from defedavg.training import Trainer, TrainingJob, run_batched
from defedavg.training import batched as batched_module
from defedavg.training.batched import PendingEvals
from defedavg.training.evaluation import EvalResult
from defedavg.training.stacked_optimizer import LocalMethod
from helpers.small_runs import batched_run, how, task_of


class LateResults(Trainer):
    """A trainer whose results are late, as those of a device, and which computes on the CPU."""

    def _train_on_device(self, jobs: Sequence[TrainingJob], method: LocalMethod) -> list[Tensor]:
        return self._train_in_threads(jobs, method)

    def _evaluate(self, versions: Sequence[Tensor], data: Data) -> Tensor:
        return self._evaluate_in_threads(versions, data)


def late(monkeypatch: pytest.MonkeyPatch, task: Task, max_batch_jobs: int) -> Trainer:
    """Return a trainer with late results."""

    def start(pending: PendingEvals, trainer: Trainer) -> Callable[[], list[EvalResult]]:
        found = batched_module._evaluated_now(pending, trainer)
        return lambda: found

    monkeypatch.setattr(batched_module, "_start_evaluation", start)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    trainer = LateResults(task, task.model(), max_batch_jobs=max_batch_jobs)
    trainer.asynchronous = True
    return trainer


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_run_that_waits_for_the_last_result_of_another_is_completed(
    monkeypatch: pytest.MonkeyPatch, most: int, after: int, device: bool
) -> None:
    task, chosen = task_of("mlp"), how("fedavg")
    trainer = late(monkeypatch, task, most) if device else Trainer(task, task.model(), max_batch_jobs=most)
    short, long = (batched_run(chosen, task, rounds, seed, every_rounds=1) for seed, rounds in enumerate((4, 8)))
    seen = dict.fromkeys((short, long), 0)
    for run, evaluation in run_batched([short, long], trainer):
        seen[run] += evaluation is not None
        if run is long and seen[long] == after and short.running:
            long.held = True
        if not short.running:
            long.held = False
    assert [(run.progress.rounds, run.running) for run in (short, long)] == [(4, False), (8, False)]
    assert seen == {short: 5, long: 9}
