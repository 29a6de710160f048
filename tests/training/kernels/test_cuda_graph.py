"""The buffers of a captured step, replayed on the CPU: a stand-in for the graph calls the step itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from defedavg.algorithms.protocol import Update
from defedavg.tasks import Data, make_task
from defedavg.tasks.samples import channels_last
from defedavg.training import LocalTraining, Reference, Trainer, TrainingJob, local_training
from defedavg.training import trainer as trainer_module
from defedavg.training.kernels import cuda_graph
from defedavg.training.kernels.cuda_graph import StepGraphs
from defedavg.training.local_training import DeviceMinibatches
from helpers.local_options import OPTIONS
from helpers.replayed_graphs import Stream, trained, without_a_device
from helpers.small_runs import CLIENTS, task_of


@pytest.fixture(autouse=True)
def _without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)


def recorded_streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Let steps with two slots or more use two streams, and return the list of main streams."""
    monkeypatch.setattr(cuda_graph, "TWO_STREAMS", 2)
    monkeypatch.setattr(cuda_graph, "ALIGNED", 1)
    streams: list[Stream] = []

    def current_stream() -> Stream:
        streams.append(Stream())
        return streams[-1]

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return streams


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


@pytest.mark.parametrize(("sampling", "most"), [("replacement", 0), ("shuffle", 0), ("shuffle", 1 << 22)])
def test_a_device_draws_what_the_host_draws(sampling: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients differ in their number of samples; those with few samples pass over them several times."""
    monkeypatch.setattr(local_training, "MAX_SORTED", most)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    clients = (*(np.arange(start, 50, 3) for start in range(3)), np.array([52, 50, 51]), np.array([53]))
    task = replace(task_of("mlp"), clients=clients)
    training = LocalTraining(3, batch_size=4, sampling=sampling)
    updates = [Update(client, index, 0, 5 - client) for client in range(5) for index in range(3)]
    jobs = [TrainingJob(training, task, torch.zeros(1), update) for update in updates]
    found = DeviceMinibatches(torch.device("cpu")).draw(jobs, 5).numpy()
    for update, samples in zip(updates, found, strict=True):
        assert (samples[: update.steps] == training.samples(task, update)).all()


def test_one_batch_draws_with_both_samplings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    task = task_of("mlp")
    trainings = [LocalTraining(3, batch_size=4, sampling=sampling) for sampling in ("replacement", "shuffle")]
    jobs = [TrainingJob(each, task, torch.zeros(1), Update(1, 0, 0, 5)) for each in trainings]
    for job, samples in zip(jobs, DeviceMinibatches(torch.device("cpu")).draw(jobs, 5).numpy(), strict=True):
        assert (samples == job.local_training.samples(task, job.update)).all()


@pytest.mark.parametrize("capacity", [5, 6, 7])
def test_halves_of_a_step_agree_with_the_reference(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves may differ in size; a stream waits for the other before it continues."""
    streams = recorded_streams(monkeypatch)
    task, training = task_of("cnn"), LocalTraining(0, batch_size=4)
    executor = Reference(task, training)
    trainer = Trainer(task, executor.module, batch_size=4, max_batch_jobs=capacity)
    jobs = [
        TrainingJob(training, task, executor.versions[0], Update(i, 0, 0, steps))
        for i, steps in enumerate((2, 4, 1, 3, 2))
    ]
    for job, delta in zip(jobs, trained(trainer, jobs), strict=True):
        expected, _ = executor.train(job.update, executor.versions[0])
        torch.testing.assert_close(delta, expected, rtol=1e-10, atol=1e-12)
    forked = [stream for stream in streams if stream in trainer.side.waits]
    assert forked
    assert all(stream.waits == [trainer.side] for stream in forked)


def test_a_half_that_fails_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a capture would end with an error of its own."""
    streams = recorded_streams(monkeypatch)
    task, training = task_of("mlp"), LocalTraining(0, batch_size=4)
    executor = Reference(task, training)
    trainer = Trainer(task, executor.module, batch_size=4, max_batch_jobs=4)

    def fails(*_: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(trainer, "step", fails)
    job = TrainingJob(training, task, executor.versions[0], Update(0, 0, 0, 2))
    with pytest.raises(RuntimeError, match="something else"):
        trained(trainer, [job])
    (forked,) = (stream for stream in streams if stream in trainer.side.waits)
    assert forked.waits == [trainer.side]


def test_too_little_memory_for_all_slots_halves_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of one job needs the memory of the largest batch, too: it must not be refused for this."""
    task, training = task_of("mlp"), LocalTraining(0, batch_size=4)
    executor = Reference(task, training)
    trainer = Trainer(task, executor.module, batch_size=4, max_batch_jobs=64)
    split = trainer.split

    def limited(vectors: Tensor) -> dict[str, Tensor]:
        if len(vectors) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return split(vectors)

    monkeypatch.setattr(trainer, "split", limited)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    job = TrainingJob(training, task, executor.versions[0], Update(0, 0, 0, 2))
    (delta,) = trained(trainer, [job])
    expected, _ = executor.train(job.update, executor.versions[0])
    torch.testing.assert_close(delta, expected, rtol=1e-10, atol=1e-12)
    assert trainer.max_batch_jobs == 8


def test_longer_jobs_need_new_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "LEAST_STEPS", 2)
    task, training = task_of("mlp"), LocalTraining(0, batch_size=4)
    executor = Reference(task, training)
    trainer = Trainer(task, executor.module, batch_size=4)
    for steps in (2, 1, 5, 3):
        job = TrainingJob(training, task, executor.versions[0], Update(0, steps, 0, steps))
        (delta,) = trained(trainer, [job])
        expected, _ = executor.train(job.update, executor.versions[0])
        torch.testing.assert_close(delta, expected, rtol=1e-10, atol=1e-12)
    (graphs,) = trainer._graphs.values()
    assert graphs.steps == 8


def test_images_stored_channels_last_give_equal_results() -> None:
    source = np.random.default_rng(0)
    data = source.normal(size=(24, 3, 6, 6)).astype(np.float32), source.integers(0, 3, 24)
    model = partial(nn.Sequential, nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    task = make_task(model=model, train=data, test=data, clients=np.split(np.arange(24), 3))
    training = LocalTraining(0, batch_size=4)
    executor = Reference(task, training)
    jobs = [TrainingJob(training, task, executor.versions[0], Update(i, 0, 0, 2 + i)) for i in range(3)]
    deltas = []
    for layers in ((), ("0.weight",)):
        trainer = Trainer(task, executor.module, batch_size=4)
        trainer._images = channels_last(task.train, for_layers=layers)
        assert (trainer._images is not None) == bool(layers)
        deltas.append(trained(trainer, jobs))
    assert all(torch.equal(a, b) for a, b in zip(*deltas, strict=True))
    grey = Data(torch.zeros(2, 1, 6, 6), torch.zeros(2))
    assert channels_last(grey, for_layers=("0.weight",)) is None
