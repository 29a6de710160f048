"""StackedModel forms of all kinds of modules agree with the modules; other modules are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from defedavg import rng as keyed
from defedavg.config.build import make_executor, make_plan
from defedavg.tasks import Task
from defedavg.training import StackedPass, StackingError
from defedavg.training.kernels.plain import LayerKernels
from defedavg.training.module_state import same_constants
from defedavg.training.stacking import stacked_model as stacked_forms
from defedavg.training.stacking.attention import PlainAttention
from defedavg.training.stacking.dropout import factors
from defedavg.training.stacking.layer_registry import StackedModel
from defedavg.training.stacking.stacked_model import stack
from defedavg.training.tensor_rng import signed
from helpers import modules
from helpers.modules import ENTER, MODELS, RANDOM, WORDS, Around, Encoder, Language, Residual, X, named, task_of
from helpers.small_runs import batched_run, final_versions, how, reference


def form_of(module: nn.Module, sample: Tensor | None) -> str:
    """Return the name of the form in which a module is stacked."""
    tried = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("chain", "composed", "mapped"):
            form: Callable[..., StackedModel] = getattr(stacked_forms, name)

            def recorded(*args: Any, name: str = name, form: Callable[..., StackedModel] = form) -> StackedModel:
                tried.append(name)
                return form(*args)

            patch.setattr(stacked_forms, name, recorded)
        stack(module, LayerKernels(), sample)
    return tried[-1]


def merged(task: Task, rounds: int, max_batch_jobs: int = 64) -> Tensor:
    """Return the version after some rounds."""
    (version,) = final_versions([batched_run(how("defedavg-niid"), task, rounds)], task, max_batch_jobs)
    return version


@pytest.mark.parametrize("model", list(MODELS))
def test_every_form_agrees_with_the_reference(model: str) -> None:
    task = named(model)
    assert form_of(task.model(), task.train.inputs[:3]) == MODELS[model][0]
    expected = reference(how("defedavg-niid"), task, 6)
    found = merged(task, 6)
    assert bool(expected.isfinite().all())
    assert float((found - expected).norm() / expected.norm()) < 1e-10


BATCH_NORMS = ["batch normalisation", "batch normalisation of features", "running statistics", "normalised twice"]


@pytest.mark.parametrize("model", ["dropout", "residual with dropout", "encoder", *BATCH_NORMS])
def test_a_model_is_bit_identical_in_every_batch(model: str) -> None:
    task = named(model)
    found = [merged(task, 3, jobs) for jobs in (1, 2, 3)]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_mapped_batch_normalisation_is_not_bit_identical_in_every_batch() -> None:
    x = torch.from_numpy(X[:3])
    assert stack(named("running statistics").model(), LayerKernels(), x).batch_invariant
    assert not stack(named("running statistics, mapped").model(), LayerKernels(), x).batch_invariant


@pytest.mark.parametrize("model", ["residual with dropout", "language, tied"])
def test_threads_are_independent(model: str) -> None:
    net, x = named(model).model(), named(model).train.inputs[:4]
    stacked, rates = stack(net, LayerKernels(), x[:3]), torch.ones(2, dtype=torch.float64)

    def outputs(seed: int) -> Tensor:
        keys = torch.tensor([seed, seed + 1])
        weights = {name: torch.stack([p.detach(), p.detach() * (1 + seed)]) for name, p in net.named_parameters()}
        with torch.no_grad():
            return stacked.run(StackedPass(weights, rates, keys), x)

    alone = [outputs(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(outputs, [0, 1, 2, 3] * 25))
    assert all(torch.equal(out, alone[i % 4]) for i, out in enumerate(found))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [None, torch.bool, torch.float64])
def test_attention_in_plain_operations_is_attention(causal: bool, kind: torch.dtype | None) -> None:
    q, k, v = torch.from_numpy(RANDOM.normal(size=(3, 2, 3, 5, 4)))
    given = None if kind is None or causal else torch.ones(5, 5, dtype=torch.bool).tril()
    mask = given if given is None or kind == torch.bool else given.to(kind)
    with PlainAttention():
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=0.3)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=0.3)
    torch.testing.assert_close(found, wanted)


def test_dropout_is_active_in_training_and_not_in_evaluation() -> None:
    task = named("dropout")
    with_it = merged(task, 2)
    plain = task_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(ENTER, 8), nn.ReLU(), nn.Linear(8, 3)))
    assert not torch.allclose(with_it, merged(plain, 2))
    executor = make_executor(how("fedavg"), 0, task)
    stacked, x = stack(executor.module, LayerKernels(), task.train.inputs[:3]), task.train.inputs[:10]
    weights = {
        name: p.detach()[None].expand(2, *p.shape).contiguous() for name, p in executor.module.named_parameters()
    }
    with torch.no_grad():
        wanted = executor.module.eval()(x)
        torch.testing.assert_close(stacked.run(StackedPass(weights), x), wanted)
    with pytest.raises(ValueError, match="key"):
        stacked.run(StackedPass(weights, torch.ones(2, dtype=x.dtype)), x)


def test_reference_masks_do_not_use_the_global_generator() -> None:
    executor = make_executor(how("fedavg"), 0, named("encoder"))
    update = make_plan(how("fedavg"), 0, 1).rounds[0].merge.updates[0][0]
    state = torch.random.get_rng_state()
    first = executor._train(update)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(3)
    assert torch.equal(first, executor._train(update))


# Masks


def masks(*parts: int, p: float = 0.25, shape: tuple[int, ...] = (4, 50)) -> Tensor:
    """Return the factors of a layer, by (job, step, number of the layer)."""
    job, step, layer = parts
    keys = torch.tensor([signed(keyed.extend(keyed.key(3, "layers", job, 0), step))])
    return factors(keys, layer, p, shape, torch.float64)


def test_masks_are_drawn_from_their_keys() -> None:
    found = masks(1, 2, 3).flatten()
    start = keyed.extend(keyed.extend(keyed.key(3, "layers", 1, 0), 2), 3)
    wanted = [(keyed.uniform(keyed.extend(start, element)) >= 0.25) / 0.75 for element in range(200)]
    assert found.tolist() == wanted


def test_masks_differ_between_samples_steps_clients_and_layers() -> None:
    first = masks(0, 0, 0)
    assert len({tuple(row.tolist()) for row in first}) == 4
    for other in (masks(1, 0, 0), masks(0, 1, 0), masks(0, 0, 1)):
        # Two masks agree in as many elements as two independent ones.
        same = float((first == other).double().mean())
        assert abs(same - (0.75**2 + 0.25**2)) < 5 * (0.625 * 0.375 / 200) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_kept_elements(p: float) -> None:
    found = masks(0, 0, 0, p=p, shape=(100, 1000))
    assert set(found.flatten().tolist()) == {0.0, 1 / (1 - p)}
    deviation = (p * (1 - p) / 100_000) ** 0.5
    assert abs(float((found > 0).double().mean()) - (1 - p)) < 5 * deviation
    columns = (found > 0).double().mean(0)
    assert float((columns - (1 - p)).abs().max()) < 6 * (p * (1 - p) / 100) ** 0.5


def test_dropout_of_everything_and_of_nothing() -> None:
    assert not masks(0, 0, 0, p=1.0).any()
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(ENTER, 3))
    stacked = stack(net.double(), LayerKernels(), torch.from_numpy(X[:3]))
    weights = {name: p.detach()[None] for name, p in net.named_parameters()}
    stacked.run(StackedPass(weights, torch.ones(1, dtype=torch.float64)), torch.from_numpy(X[:4]))  # no keys are needed


def test_whole_channels_are_dropped() -> None:
    x = torch.ones(6, 5, 3, 3, dtype=torch.float64)
    stacked = stack(nn.Sequential(nn.Dropout2d(0.5), nn.Conv2d(5, 2, 1)).double(), LayerKernels(), x[:3])
    weight = torch.eye(5, dtype=torch.float64)[:2].reshape(1, 2, 1, 1, 5).repeat(3, 1, 1, 1, 1)
    step = StackedPass(
        {"1.weight": weight, "1.bias": torch.zeros(3, 2, dtype=torch.float64)},
        torch.ones(3, dtype=torch.float64),
        torch.arange(3),
    )
    out = stacked.run(step, x)
    assert out.shape == (6, 2, 3, 3)
    assert set(out.flatten().tolist()) == {0.0, 2.0}
    assert bool((out == out[:, :, :1, :1]).all())


# Buffers


def test_a_version_does_not_contain_constant_buffers() -> None:
    executor = make_executor(how("fedavg"), 0, named("language"))
    assert executor.versions[0].numel() == sum(p.numel() for p in Language().parameters())


def test_a_version_contains_buffers_that_training_updates() -> None:
    executor = make_executor(how("fedavg"), 0, task_of(modules.Average))
    assert executor.versions[0].numel() == 3 * ENTER + 3 + 3
    executor.apply(make_plan(how("fedavg"), 0, 1).rounds[0])
    assert bool(executor.versions[1][-3:].all())


def test_constants_are_compared() -> None:
    one, other = Language(), Language()
    assert same_constants(one, other)
    other.mask[0, 0] = 1
    assert not same_constants(one, other)
    first, second = Around(torch.abs), Around(torch.abs)
    first.table = torch.arange(3)
    assert not same_constants(first, second)
    second.table = torch.arange(3)
    assert same_constants(first, second)


# Modules that cannot be stacked


class Caching(Residual):
    """Keeps its last output."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept


def used(module: nn.Module) -> nn.Module:
    module(torch.from_numpy(X[:2]).float())
    return module


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: nn.Sequential(nn.Flatten(), nn.AlphaDropout(0.5), nn.Linear(ENTER, 2)),
            "AlphaDropout draws from the global generator; use Dropout",
        ),
        (lambda: Around(lambda x: F.dropout(x, 0.5)), "draws from the global generator"),
        (lambda: Around(lambda x: x if torch.rand(1) < 0.01 else 2 * x), "draws from the global generator"),
        (lambda: nn.Sequential(nn.Flatten(0, 2), nn.GRU(8, 3, dropout=0.5, num_layers=2)), "not a tensor"),
        (lambda: Around(lambda x: x if x.sum() > 0 else -x), "data-dependent"),
        (lambda: Around(lambda x: x.view(5, -1)), "fails on 2 samples"),
        (lambda: Around(lambda x: x / 0), "not finite"),
        (lambda: used(Caching()), "cannot be copied"),
    ],
)
def test_a_module_that_cannot_be_stacked_is_refused_with_the_reason(model: Callable[[], nn.Module], words: str) -> None:
    net = model()
    before = torch.random.get_rng_state()
    with pytest.raises(StackingError, match=words) as caught:
        stack(net, None, torch.from_numpy(X[:3]).float())
    assert "\n" not in str(caught.value)
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_samples_nothing_is_checked() -> None:
    assert form_of(Residual(), None) == "mapped"
    assert form_of(named("dropout").model(), None) == "chain"
    with pytest.raises(StackingError, match="buffers"):
        stack(Language())


def test_a_module_that_needs_its_own_precision_is_checked_in_it() -> None:
    net = Around(lambda x: x.float() / 2)
    assert form_of(net, torch.from_numpy(X[:3]).float()) == "composed"
    mixing = Around(lambda x: x.float() - x.float().mean())
    assert form_of(mixing, torch.from_numpy(X[:3]).float()) == "mapped"


def test_stacking_does_not_change_the_module() -> None:
    net = Encoder()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    kinds = [type(inner) for inner in net.modules()]
    stack(net.eval(), None, torch.from_numpy(WORDS[:3]))
    assert not net.training
    assert kinds == [type(inner) for inner in net.modules()]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
