"""On a CUDA device: agreement, equal bits whatever shares a batch, sampling, memory. Skipped where there is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from defedavg.algorithms import ALGORITHMS
from defedavg.algorithms.protocol import Update
from defedavg.config.build import make_executor
from defedavg.errors import UserError
from defedavg.experiments.simulation import Simulation
from defedavg.tasks import Task, build, make_task
from defedavg.training import BatchedRun, RunState, Trainer, drive_batched
from defedavg.training.device_minibatches import Shares
from defedavg.training.precision import computing_in
from defedavg.training.trainer import TrainingJob
from helpers.modules import named
from helpers.settings_tables import settings
from helpers.small_runs import MODELS, how, lane_of, reference, task_of

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

# Relative to the way that a model has gone after so many merges; where units switch, small differences grow.
MERGES = 10
TOLERANCES = {"float32": 1e-5, "tf32": 1e-1, "bf16": 2e-1}


def images(model: str) -> Task:
    """Six clients with random 28×28 images."""
    source = np.random.default_rng(0)
    data = source.normal(size=(120, 1, 28, 28)).astype(np.float32), source.integers(0, 10, 120)
    parts = [np.arange(i, 120, 6) for i in range(6)]
    return make_task(model=lambda: build(model, (1, 28, 28), 10), train=data, test=data, clients=parts)


def run(runs: list[tuple[Any, int]], task: Task, rounds: int, **means: Any) -> list[Tensor]:
    """The last versions of runs that share batches."""
    lanes = [lane_of(chosen, task, rounds, seed) for chosen, seed in runs]
    precision = means.get("precision", "tf32")
    with computing_in(precision):
        trainer = Trainer(task, lanes[0].reference.module, batch_size=4, **means)
        for _ in drive_batched(lanes, trainer):
            pass
    return [lane.reference.versions[lane.newest] for lane in lanes]


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("model", list(MODELS))
def test_fifty_merges_agree_with_the_reference(model: str, algorithm: str) -> None:
    task, chosen = task_of(model), how(algorithm)
    truth = reference(chosen, task, 50)
    (found,) = run([(chosen, 0)], task.to("cuda"), 50, precision="float32")
    assert float((found.cpu() - truth).norm() / truth.norm()) < 1e-10


@pytest.mark.parametrize("precision", list(TOLERANCES))
@pytest.mark.parametrize("model", ["cnn", "mlp", "resnet", "transformer"])
def test_lower_precisions_stay_within_their_tolerance(model: str, precision: str) -> None:
    task, chosen = images(model), how("defedavg-iid", local_lr=0.01)
    start = make_executor(chosen, 0, task).versions[0]
    truth = reference(chosen, task, MERGES)
    (found,) = run([(chosen, 0)], task.to("cuda"), MERGES, precision=precision)
    far = float((found.cpu() - truth).norm() / (truth - start).norm())
    print(f"{model} {precision}: {far:.1e}")
    assert far < TOLERANCES[precision]


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_no_mixture_of_runs_and_no_width_changes_a_bit(model: str) -> None:
    task = images(model).to("cuda")
    runs = [
        (how("defedavg-iid"), 0),
        (how("favano", local_lr=0.02), 1),
        (how("asysg", global_lr=0.05), 0),
        (how("fedavg", local_steps=7), 2),
    ]
    together = {width: run(runs, task, 12, width=width) for width in (1, 3, 64)}
    alone = [run([one], task, 12)[0] for one in runs]
    for found in together.values():
        for a, b in zip(found, alone, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "model",
    [
        "resnet", "transformer", "residual with dropout", "frozen", "convolutions", "encoder, norm first",
        "cross attention with dropout", "dropout", "batch normalisation", "mean of the batch", "again", "hooked",
    ],
)  # fmt: skip
def test_modules_of_all_kinds_agree(model: str) -> None:
    """What is stacked on the CPU is stacked, captured and right on the device, too."""
    task, chosen = named(model), how("defedavg-iid")
    truth = reference(chosen, task, 6)
    (found,) = run([(chosen, 0)], task.to("cuda"), 6, precision="float32")
    assert float((found.cpu() - truth).norm() / truth.norm()) < 1e-10


def test_the_device_draws_what_the_host_draws() -> None:
    task = images("mlp").to("cuda")
    recipe = make_executor(how("defedavg-iid"), 3, task).recipe
    start = torch.zeros(1, device="cuda")
    jobs = [TrainingJob(recipe, task, start, Update(client, 0, index, 5)) for client in range(6) for index in range(4)]
    found = Shares(torch.device("cuda")).samples(jobs, 5).cpu().numpy()
    for job, own in zip(jobs, found, strict=True):
        assert (own == recipe.samples(task, job.update)).all()


def test_a_run_ends_as_the_reference_ends_it() -> None:
    base: dict[str, Any] = {"task": {"model": "softmax"}, "clients": {"num_clients": 20}}
    training = {"updates_per_round": 4, "local_steps": 5}
    for stop in ({"target_accuracy": 0.6}, {"max_seconds": 1.5}, {"max_rounds": 7}):
        chosen = settings("defedavg-niid", **base, training=training, stop=stop)
        plain = Simulation(chosen, 0)
        fast = Simulation(chosen, 0, plain.task.to("cuda"))
        truth = list(plain)
        trainer = Trainer(fast.task, fast.executor.module, width=16, precision="float32")
        found = [e for _, e in drive_batched([fast.lane()], trainer) if e]
        assert [(e.round, e.seconds, e.updates) for e in found] == [(e.round, e.seconds, e.updates) for e in truth]
        assert [e.accuracy for e in found] == pytest.approx([e.accuracy for e in truth], abs=0.002)
        assert fast.progress.status == plain.progress.status
        assert fast.plan.hash() == plain.plan.hash()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A device with 700 MB left."""
    gc.collect()
    torch.cuda.empty_cache()
    used = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((used + 0.7e9) / torch.cuda.mem_get_info()[1])
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_where_memory_runs_out_batches_shrink(little_memory: None) -> None:
    """The memory is claimed to be plenty, so that it does run out."""
    task = images("cnn").to("cuda")
    chosen = how("defedavg-iid", updates_per_round=6)
    lanes = [lane_of(chosen, task, 4, seed) for seed in range(8)]
    with computing_in("tf32"):
        trainer = Trainer(task, lanes[0].reference.module, batch_size=4, width=512, memory=100 << 30)
        for _ in drive_batched(lanes, trainer):
            pass
    assert trainer.width < 512
    (alone,) = run([(chosen, 0)], task, 4)
    assert torch.equal(lanes[0].reference.versions[4], alone)


def test_too_little_memory_for_one_client_is_one_line() -> None:
    task = images("cnn").to("cuda")
    module: nn.Module = make_executor(how("fedavg"), 0, task).module
    with pytest.raises(UserError, match="--memory"):
        Trainer(task, module, memory=1 << 20)


@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize("model", ["cnn", "resnet", "transformer"])
def test_a_run_taken_up_again_has_the_same_bits(model: str, at: int) -> None:
    """Also of models whose bits depend on the batch: the updates that wait are kept, and batches are as they were."""
    task = images(model).to("cuda")
    runs = [(how("defedavg-niid"), 0), (how("fedavg", local_steps=7), 1)]
    truth = run(runs, task, 12, width=8)
    lanes, again = ([lane_of(chosen, task, 12, seed) for chosen, seed in runs] for _ in range(2))
    stands: list[RunState] = []
    count = 0

    def rest() -> None:
        nonlocal count
        count += 1
        if count == at:
            stands.extend(RunState.of_lane(lane, trainer) for lane in lanes)

    with computing_in("tf32"):
        trainer = Trainer(task, lanes[0].reference.module, batch_size=4, width=8)
        for _ in drive_batched(lanes, trainer, rest=rest):
            pass
        taken = []
        for new, old, standing in zip(again, lanes, stands, strict=True):
            standing.restore(new.reference, new.progress, old.progress.evaluations[:1])
            records = standing.skip(new.records)
            taken.append(BatchedRun(new.reference, records, new.goal, new.progress, tally=standing.tally))
            standing.restore_lane(taken[-1], trainer)
        for _ in drive_batched([], trainer, taken):
            pass
    for lane, weights in zip(taken, truth, strict=True):
        assert torch.equal(lane.reference.versions[lane.newest], weights)
