"""Running statistics are averaged with the weights of a merge, and never merged as differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from defedavg import Result, simulate
from defedavg.algorithms import ALGORITHMS
from defedavg.algorithms.protocol import FROM_VERSION, Merge, Update
from defedavg.config.build import make_executor, make_plan
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.study_run import StudyRun
from defedavg.planning.records import Round
from defedavg.training import LocalTraining, Reference, StackingError
from defedavg.training.stacking.stacked_model import stack
from helpers.command_line import call, refuse
from helpers.interrupted_studies import assert_same, ignore, interrupted, study, uninterrupted
from helpers.shifted_inputs import CLIENTS, TASK_FILE, X, batch_norm_net, shifted_task
from helpers.small_runs import batched_run, final_versions, how, reference

NAMES = [name for name, kind in ALGORITHMS.items() if kind.job_start == FROM_VERSION]
STATISTICS = 2 * 4 + 2 * 6  # of batch_norm_net


class Tracking(nn.Module):
    """A running mean of its own beside a constant and a counter; ``assign`` replaces the tensors."""

    mean: Tensor
    table: Tensor
    mask: Tensor
    count: Tensor

    def __init__(self, assign: bool = False) -> None:
        super().__init__()
        self.leave, self.assign = nn.Linear(4, 2), assign
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.linspace(0.1, 0.7, 4))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.assign:
            self.mean, self.count = 0.9 * self.mean + 0.1 * x.mean(0), self.count + 1
        elif self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.count.add_(1)
        out: Tensor = self.leave(x - self.mean + self.table)
        return out


def trained(
    name: str, executor: str, changes: Mapping[str, float], model: Callable[[], nn.Module] = batch_norm_net
) -> Result:
    """Return the result of 40 rounds."""
    options = {"training.updates_per_round": 3, "training.local_steps": 5, "stop.max_rounds": 40, **changes}
    unused = {f"training.{key}" for key in ALGORITHMS[name].unused_training()}
    options = {key: value for key, value in options.items() if key not in unused}
    return simulate(name, task=shifted_task(model), settings=options, executor=executor)


@pytest.mark.parametrize("executor", ["reference", "batched"])
@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_trains_a_model_with_batch_normalisation(name: str, executor: str) -> None:
    rate = 0.5 if ALGORITHMS[name].server_optimizer == "sgd" else 0.02
    result = trained(name, executor, {"training.global_lr": rate, "training.local_lr": 0.05})
    assert result.status == "max_rounds"
    assert all(np.isfinite(e.loss) for e in result.evaluations)
    state = result.state_dict()
    assert all(bool((state[f"{layer}.running_var"] > 0).all()) for layer in (0, 2))
    accuracy = result.evaluations[-1].accuracy
    assert accuracy is not None
    assert accuracy > 0.7


@pytest.mark.no_cover
@pytest.mark.parametrize("name", [name for name in NAMES if ALGORITHMS[name].uses_updates_per_round])
def test_without_learning_the_statistics_become_those_of_the_data(name: str) -> None:
    rates = {"training.local_lr": 1e-9, "training.global_lr": 1e-9 if name == "asysg" else 1.0}
    size = {"training.batch_size": 40, "training.local_steps": 20, "training.updates_per_round": 6}
    result = trained(name, "batched", {**rates, **size, "stop.eval_every_rounds": 40})
    state, last = result.state_dict(), result.plan.rounds[-1].merge.updates
    # A merge of one update has the statistics of its client.
    pooled = X[:300] if len(last) > 1 else X[last[0][0].client : 300 : CLIENTS]
    assert bool((np.abs(state["0.running_mean"].numpy() - pooled.mean(0)) < 0.2 * pooled.std(0)).all())
    np.testing.assert_allclose(state["0.running_var"], pooled.var(0), rtol=0.2)


# One merge against an oracle


def client_model(executor: Reference, update: Update, task: Any, training: LocalTraining) -> nn.Module:
    """Train one client with torch.optim, from the named tensors of its start version."""
    module = batch_norm_net().double()
    module.load_state_dict(executor.named(executor.versions[update.version]))
    optimiser = torch.optim.SGD(module.parameters(), training.local_lr)
    for samples in training.samples(task, update):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(module(task.train.inputs[samples]), task.train.targets[samples])
        torch.autograd.backward(loss)
        optimiser.step()
    return module


def convex(merge: Merge, finals: dict[Update, dict[str, Tensor]], before: dict[str, Tensor], name: str) -> Tensor:
    """Return Σ |b|·s / Σ |b| over the updates with steps; they count equally where all of them enter through state."""
    weights = {update: abs(b) for update, b in merge.updates if update.steps and b}
    if not weights:
        used = {update for assignment in (*merge.before, *merge.after) for update, _ in assignment.updates}
        weights = {update: 1.0 for update, _ in merge.updates if update.steps and update in used}
    if not weights:
        return before[name]
    return torch.stack([b * finals[u][name] for u, b in weights.items()]).sum(0) / sum(weights.values())


@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_the_convex_mean_of_the_clients_final_statistics(name: str) -> None:
    task, chosen = shifted_task(), how(name)
    executor = make_executor(chosen, 0, task)
    for record in make_plan(chosen, 0, 8).rounds:
        merge = record.merge
        trained_updates = [update for update, _ in merge.updates if update.steps]
        finals = {
            update: dict(client_model(executor, update, task, executor.local_training).state_dict())
            for update in trained_updates
        }
        before = executor.named(executor.versions[merge.version - 1])
        found = executor.named(executor.apply(record))
        for layer, kind in ((0, "mean"), (0, "var"), (2, "mean"), (2, "var")):
            expected = convex(merge, finals, before, f"{layer}.running_{kind}")
            torch.testing.assert_close(found[f"{layer}.running_{kind}"], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("updates", [(), ((Update(0, 0, 0, 4), 0.0),), ((Update(0, 0, 0, 0), -1.0),)])
def test_a_merge_without_trained_updates_keeps_the_statistics(updates: Any) -> None:
    executor = make_executor(how("fedavg"), 0, shifted_task())
    executor.versions[1], executor.version_seconds[1] = torch.rand_like(executor.versions[0]), 0.5
    record = Round(1.0, Merge(2, ((0, 0.25), (1, 0.75)), updates), ())
    delta = torch.rand_like(executor.versions[0])
    found = executor.merge(record, {Update(0, 0, 0, 4): delta})
    assert torch.equal(found[-STATISTICS:], executor.versions[1][-STATISTICS:])
    weights = 0.25 * executor.versions[0] + 0.75 * executor.versions[1]
    torch.testing.assert_close(found[:-STATISTICS], weights[:-STATISTICS])


def test_extreme_weights_keep_a_variance_at_or_above_zero_and_equal_values_exact() -> None:
    executor = make_executor(how("fedavg"), 0, shifted_task(dtype=torch.float32))
    draws = np.random.Generator(np.random.Philox(key=1))
    for _ in range(200):
        weights = [float(-(10.0 ** draws.uniform(-12, 2))) for _ in range(7)]
        updates = [Update(i, 0, 0, 4) for i in range(7)]
        deltas = {u: torch.zeros_like(executor.versions[0]) for u in updates}
        for delta in deltas.values():
            delta[-STATISTICS:] = 0.3
            delta[-6:] = torch.from_numpy(draws.choice([0.0, 1e-30, 1.0, 1e6], 6))
        record = Round(1.0, Merge(1, ((0, 1.0),), tuple(zip(updates, weights, strict=True))), ())
        found = executor.merge(record, deltas)
        assert bool((found[-6:] >= 0).all())
        assert bool((found[-STATISTICS:-6] == torch.tensor(0.3)).all())


# Executors


@pytest.mark.parametrize("name", NAMES)
def test_the_batched_executor_agrees_with_the_reference(name: str) -> None:
    task, chosen = shifted_task(), how(name)
    expected = reference(chosen, task, 50)
    (found,) = final_versions([batched_run(chosen, task, 50)], task, 64)
    for part in (slice(None, -STATISTICS), slice(-STATISTICS, None)):
        assert float((found[part] - expected[part]).norm() / expected[part].norm()) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_is_bit_identical_in_every_batch(dtype: torch.dtype) -> None:
    task = shifted_task(dtype=dtype)
    runs = [(how(name, local_steps=steps), seed) for name, steps, seed in (("fedavg", 4, 0), ("favano", 5, 1))]
    together = [
        final_versions([batched_run(chosen, task, 8, seed) for chosen, seed in runs], task, jobs) for jobs in (1, 3, 40)
    ]
    for versions in together[1:]:
        assert all(torch.equal(one, other) for one, other in zip(together[0], versions, strict=True))


def test_a_client_without_a_learning_rate_keeps_its_statistics() -> None:
    """On a CUDA device, jobs that have ended and unused slots have the learning rate zero."""
    task = shifted_task()
    module, x = task.model(), task.train.inputs
    stacked = stack(module, None, x[:3])
    names = [*dict(module.named_parameters()), *sorted(stacked.statistics)]
    weights = {n: torch.stack([module.state_dict()[n]] * 2).contiguous() for n in names}
    before = {n: w.clone() for n, w in weights.items()}
    rates = torch.tensor([0.0, 0.1], dtype=torch.float64)
    trainable, keys = list(dict(module.named_parameters())), torch.zeros(2, dtype=torch.int64)
    stacked.sgd_step(weights, trainable, rates, keys, x[:8], lambda out: out.square().sum())
    assert all(torch.equal(w[0], before[n][0]) for n, w in weights.items())
    assert not any(torch.equal(weights[n][1], before[n][1]) for n in stacked.statistics)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)), "BatchNorm1d with momentum=None"),
        (lambda: Tracking(assign=True), "assigns a new tensor to the buffer"),
        (Tracking, "the buffer count changes"),
    ],
)
def test_state_that_no_version_has_is_not_stacked(model: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(StackingError, match=words):
        stack(model(), None, torch.from_numpy(X[:3]).float())


@pytest.mark.parametrize("executor", ["batched", "reference"])
def test_a_resumed_study_is_bit_identical(tmp_path: Path, executor: str) -> None:
    (tmp_path / "mine.py").write_text(TASK_FILE)
    chosen = study(task={"module": f"{tmp_path / 'mine.py'}:make"})
    compute = ComputeConfig(executor=executor)
    whole = uninterrupted(tmp_path / "whole", chosen, compute)
    cut = interrupted(tmp_path / "cut", chosen, 9, compute)
    assert StudyRun(chosen, cut, compute=compute, resume=True).run(ignore)
    assert_same(whole, cut)
    (weights,) = (load_file(path) for path in sorted((cut / "weights").iterdir())[:1])
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model.load_state_dict(weights)
    assert bool((weights["0.running_var"] > 1.5).all())


# Buffers of other kinds


@pytest.mark.parametrize("assign", [False, True])
def test_own_statistics_are_averaged_and_constants_stay(assign: bool) -> None:
    task, chosen = shifted_task(lambda: Tracking(assign)), how("favano")
    executor = make_executor(chosen, 0, task)
    first = executor.named(executor.versions[0])
    for record in make_plan(chosen, 0, 30).rounds:
        executor.apply(record)
    last = executor.named(executor.versions[30])
    assert all(torch.equal(last[name], first[name]) for name in ("table", "mask", "count"))
    assert bool((last["mean"] - torch.from_numpy(X[:300].mean(0))).abs().max() < 1.5)
    assert executor.versions[30].isfinite().all()


def test_a_job_does_not_depend_on_the_jobs_before_it() -> None:
    executor = make_executor(how("fedavg"), 0, shifted_task(lambda: Tracking(assign=True)))
    (first, _), (second, _), *_ = make_plan(how("fedavg"), 0, 1).rounds[0].merge.updates
    alone = executor.train(first, executor.versions[0])[0]
    executor.train(second, executor.versions[0])
    assert torch.equal(alone, executor.train(first, executor.versions[0])[0])


# Results


@pytest.mark.parametrize("executor", ["reference", "batched"])
def test_the_state_dict_of_a_result_is_the_model_that_was_evaluated(executor: str) -> None:
    task = shifted_task()
    result = trained("fedavg", executor, {"stop.max_rounds": 5})
    model = batch_norm_net().double()
    model.load_state_dict(result.state_dict())
    with torch.no_grad():
        outputs = model.eval()(task.test.inputs)
    accuracy = float((outputs.argmax(1) == task.test.targets).double().mean())
    assert accuracy == pytest.approx(result.evaluations[-1].accuracy)
    values = [v.reshape(-1) for v in (*model.parameters(), *model.buffers()) if v.is_floating_point()]
    assert torch.equal(torch.cat(values).detach(), result.weights)
    result.state_dict()["1.weight"].zero_()
    assert bool(result.state_dict()["1.weight"].any())


# Refusals


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in NAMES])
def test_clients_that_keep_their_models_cannot_have_running_statistics(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(TASK_FILE)
    (tmp_path / "study.toml").write_text(
        f'algorithms = ["fedavg", "{name}"]\n[task]\nmodule = "mine.py:make"\n[clients]\nnum_clients = 20\n'
        "[training]\nupdates_per_round = 2\n[stop]\nmax_rounds = 2\n"
    )
    refuse(call("run", "study.toml", cwd=tmp_path), "running statistics", "GroupNorm")
    assert not list((tmp_path / "runs").glob("**/metrics.jsonl"))


# Batches of one sample


def test_batches_of_one_sample_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"batch_size is 1, .*larger batch_size, or use GroupNorm"):
        trained("fedavg", "batched", {"training.batch_size": 1})
    (tmp_path / "mine.py").write_text(TASK_FILE)
    (tmp_path / "study.toml").write_text(
        'algorithms = ["fedavg"]\n[task]\nmodule = "mine.py:make"\n[clients]\nnum_clients = 20\n'
        "[training]\nupdates_per_round = 2\nbatch_size = 1\n[stop]\nmax_rounds = 2\n"
    )
    refuse(call("run", "study.toml", cwd=tmp_path), "batch_size is 1", "GroupNorm")


def test_a_client_with_one_sample_trains_in_full_batches() -> None:
    """Mini-batches repeat the samples of a small client; none is smaller than batch_size."""
    task = shifted_task()
    task = dataclasses.replace(task, clients=(task.clients[0][:1], *task.clients[1:]))
    executor = Reference(task, LocalTraining(seed=0, batch_size=4))
    assert executor.train(Update(0, 0, 0, 3), executor.versions[0])[1] == 3


def test_images_in_batches_of_one_are_trained() -> None:
    """A channel of an image has more than one value."""
    net = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
    result = trained("defedavg-iid", "batched", {"training.batch_size": 1, "stop.max_rounds": 2}, lambda: net)
    assert result.status == "max_rounds"
