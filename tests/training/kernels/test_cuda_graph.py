"""The buffers of a captured step, replayed on the CPU: a stand-in for the graph calls the step itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from defedavg.algorithms.protocol import Update
from defedavg.training import LocalTraining, Reference, Trainer, TrainingJob
from defedavg.training.kernels.cuda_graph import StepGraph
from defedavg.training.local_training import DeviceMinibatches
from helpers.local_options import OPTIONS
from helpers.small_runs import CLIENTS, task_of


class Replayed:
    """A graph whose replay is the step that would have been captured."""

    def replay(self) -> None:
        assert self.step is not None
        self.step()

    step: Any = None


@pytest.fixture(autouse=True)
def _without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def wait_stream(self, _: Any) -> None: ...

    init = StepGraph.__init__

    def initialised(self: StepGraph, *args: Any) -> None:
        init(self, *args)
        self._step.zero_()
        self._graph.step = self._once  # type: ignore[attr-defined]

    def send(_: DeviceMinibatches, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    monkeypatch.setattr(StepGraph, "__init__", initialised)
    monkeypatch.setattr(DeviceMinibatches, "send", send)
    for name, value in {
        "Stream": Stream, "current_stream": Stream, "stream": lambda _: nullcontext(), "CUDAGraph": Replayed,
        "graph": lambda *_, **__: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


def trained(trainer: Trainer, jobs: list[TrainingJob]) -> list[Tensor]:
    trainer.asynchronous = True
    return trainer.train(jobs)


@pytest.mark.parametrize("option", ["plain", *OPTIONS])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_replayed_steps_agree_with_the_reference(model: str, option: str) -> None:
    """Unused slots, jobs of different lengths and a second batch in the same buffers change nothing."""
    task, training = task_of(model), LocalTraining(0, batch_size=4, **OPTIONS.get(option, {}))
    executor = Reference(task, training)
    start, rates = executor.versions[0], (0.05, 0.0, 0.02)
    trainer = Trainer(task, executor.module, batch_size=4)
    for first in (0, 5):
        updates = [Update(i % CLIENTS, i, 0, 2 + i % 4) for i in range(first, first + 5)]
        jobs = [TrainingJob(training, task, start, update, rates[update.index % 3]) for update in updates]
        for job, delta in zip(jobs, trained(trainer, jobs), strict=True):
            expected, _ = executor.train(job.update, start, rate=job.rate)
            torch.testing.assert_close(delta, expected, rtol=1e-10, atol=1e-12)


def test_replayed_steps_have_centres_and_corrections() -> None:
    task, training = task_of("cnn"), LocalTraining(0, batch_size=4, prox=0.5, optimizer="adam")
    executor = Reference(task, training)
    start = executor.versions[0]
    trainer = Trainer(task, executor.module, batch_size=4)
    for shift in (0.1, 0.3):
        correction = torch.full_like(start, shift)
        jobs = [
            TrainingJob(training, task, start, Update(i, 0, 0, 3 + i % 2), 0.01, start + i * shift, correction)
            for i in range(3)
        ]
        for job, delta in zip(jobs, trained(trainer, jobs), strict=True):
            expected, _ = executor.train(job.update, start, rate=0.01, centre=job.centre, correction=correction)
            torch.testing.assert_close(delta, expected, rtol=1e-10, atol=1e-12)
