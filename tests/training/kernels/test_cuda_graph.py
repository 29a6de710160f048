"""The buffers of a captured step, replayed on the CPU: a stand-in for the graph calls the step itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from defedavg.algorithms.protocol import Update
from defedavg.training import LocalTraining, Reference, Trainer, TrainingJob, local_training
from defedavg.training.kernels import cuda_graph
from defedavg.training.kernels.cuda_graph import StepGraphs
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

    captured = StepGraphs._graph

    def graph(self: StepGraphs, slots: int) -> Any:
        found: Any = captured(self, slots)
        found.step = partial(self._once, slots)
        return found

    def send(_: DeviceMinibatches, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    monkeypatch.setattr(StepGraphs, "_graph", graph)
    monkeypatch.setattr(DeviceMinibatches, "send", send)
    for name, value in {
        "Stream": Stream, "current_stream": Stream, "stream": lambda _: nullcontext(), "CUDAGraph": Replayed,
        "graph": lambda *_, **__: nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


def trained(trainer: Trainer, jobs: list[TrainingJob]) -> list[Tensor]:
    trainer.asynchronous = True
    return trainer.train(jobs)


@pytest.mark.parametrize("two_streams", [2, 64])
@pytest.mark.parametrize("option", ["plain", *OPTIONS])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_replayed_steps_agree_with_the_reference(
    model: str, option: str, two_streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unused slots, halves of a step, jobs of different lengths and a second batch in the buffers change nothing."""
    monkeypatch.setattr(cuda_graph, "TWO_STREAMS", two_streams)
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


def test_a_step_replays_the_smallest_graph_for_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five jobs of which one does four steps, and one does three: after two steps, two slots are enough."""
    task, training = task_of("mlp"), LocalTraining(0, batch_size=4)
    executor = Reference(task, training)
    trainer = Trainer(task, executor.module, batch_size=4, max_batch_jobs=6)
    slots: list[int] = []
    once = StepGraphs._once

    def recorded(self: StepGraphs, count: int) -> None:
        slots.append(count)
        once(self, count)

    monkeypatch.setattr(StepGraphs, "_once", recorded)
    jobs = [
        TrainingJob(training, task, executor.versions[0], Update(i, 0, 0, steps))
        for i, steps in enumerate((2, 4, 1, 3, 2))
    ]
    trained(trainer, jobs)  # captures the graphs
    slots.clear()
    trained(trainer, jobs)
    assert slots == [6, 4, 2, 1]


@pytest.mark.parametrize("sampling", ["replacement", "shuffle"])
@pytest.mark.parametrize("most", [0, 1 << 24])
def test_a_device_draws_what_the_host_draws(sampling: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients with few samples pass over them several times, and clients differ in their number of samples."""
    monkeypatch.setattr(local_training, "MAX_SORTED", most)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    sizes = (*(np.arange(start, 50, 3) for start in range(3)), np.array([52, 50, 51]))
    task = replace(task_of("mlp"), clients=sizes)
    training = LocalTraining(3, batch_size=4, sampling=sampling)
    updates = [Update(client, index, 0, 5 - client) for client in range(4) for index in range(3)]
    jobs = [TrainingJob(training, task, torch.zeros(1), update) for update in updates]
    found = DeviceMinibatches(torch.device("cpu")).draw(jobs, 5).numpy()
    for update, samples in zip(updates, found, strict=True):
        assert (samples[: update.steps] == training.samples(task, update)).all()
