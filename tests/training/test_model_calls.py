"""Models and data with the interface of the PyTorch and Hugging Face libraries, computed by both executors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from defedavg import simulate, squared_error
from defedavg.config.build import make_executor
from defedavg.config.unused_settings import NoEffectWarning
from defedavg.errors import FallbackWarning
from defedavg.tasks import Task, make_task, token_accuracy, token_cross_entropy
from defedavg.training import StackingError, Trainer
from helpers.small_runs import batched_run, final_versions, how, reference
from helpers.small_runs import task_of as image_task
from helpers.text_models import (
    CLIENTS,
    IDS,
    LABELS,
    MASK,
    OUTPUTS,
    SAMPLES,
    TEXTS,
    TOKEN_LABELS,
    Tagger,
    TextClassifier,
    text_task,
)
from helpers.user_errors import line_of


def assert_executors_agree(task: Task) -> Tensor:
    chosen = how("defedavg-niid")
    expected = reference(chosen, task, 4)
    (found,) = final_versions([batched_run(chosen, task, 4)], task, 64)
    assert bool(expected.isfinite().all())
    assert float((found - expected).norm() / expected.norm()) < 1e-10
    return expected


def run(task: Task, settings: dict[str, Any] | None = None, executor: str = "batched") -> Any:
    given = {"training.updates_per_round": 3, "training.local_steps": 4, "stop.max_rounds": 4, **(settings or {})}
    return simulate("defedavg-niid", task=task, settings=given, executor=executor)


# Outputs


@pytest.mark.parametrize("output", list(OUTPUTS))
def test_every_output_trains_like_its_logits(output: str) -> None:
    form, options = OUTPUTS[output]
    task = text_task(lambda: TextClassifier(form), **options)
    assert torch.equal(assert_executors_agree(task), reference(how("defedavg-niid"), text_task(TextClassifier), 4))
    executor = make_executor(how("fedavg"), 0, task)
    assert list(executor.named(executor.versions[0])) == list(TextClassifier().state_dict())


@pytest.mark.parametrize(
    ("output", "options", "words"),
    [
        (lambda z: {"scores": z}, {}, ("dict with 'scores'", "no 'logits'", "make_task(logits=…)")),
        (lambda z: (z, z), {}, ("tuple of Tensor, Tensor", "make_task(logits=…)")),
        (lambda z: {"scores": z}, {"logits": "score"}, ("dict with 'scores'", "no 'score'")),
        (lambda z: (z,), {"logits": 1}, ("tuple of Tensor", "no 1")),
        (lambda _: None, {}, ("NoneType", "make_task(logits=…)")),
        (lambda z: {"logits": [z]}, {}, ("list", "no tensor")),
        (lambda z: z, {"logits": lambda _: 3}, ("int", "no tensor")),
    ],
)
def test_an_output_without_logits_is_one_line(
    output: Callable[[Tensor], Any], options: dict[str, Any], words: tuple[str, ...]
) -> None:
    line = line_of(lambda: run(text_task(lambda: TextClassifier(output), **options)))
    for word in words:
        assert word in line


def test_an_output_that_differs_between_training_and_evaluation() -> None:
    """A name picks the logits in training, and the tensor of the evaluation is not changed."""

    class Auxiliary(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return (out, 2 * out) if self.training else out

    x, y = np.zeros((12, 4), "float32"), np.arange(12) % 3
    data = {"train": (x, y), "test": (x, y)}
    given: dict[str, Any] = {"model": lambda: Auxiliary(4, 3), "clients": [np.arange(12)], **data}
    assert run(make_task(**given, logits=0), {"training.updates_per_round": 1}).status == "max_rounds"
    assert "the model returns tuple; pick the logits" in line_of(lambda: run(make_task(**given), executor="reference"))


# Inputs


def test_named_inputs_are_keyword_arguments_in_both_executors() -> None:
    task = text_task(TextClassifier)
    assert len(task.train) == SAMPLES
    assert_executors_agree(task)
    found = [run(task, executor=executor).best_accuracy for executor in ("batched", "reference")]
    assert found[0] == found[1] > 0.3


def test_a_model_with_named_inputs_is_stacked() -> None:
    task = text_task(TextClassifier)
    assert Trainer(task, make_executor(how("fedavg"), 0, task).module).max_batch_jobs > 1


def test_a_model_with_named_inputs_that_cannot_be_stacked_says_why() -> None:
    class Branching(TextClassifier):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
            torch.rand(1)
            return super().forward(input_ids, attention_mask, labels)

    task = text_task(Branching)
    with pytest.raises(StackingError, match="global generator"):
        Trainer(task, make_executor(how("fedavg"), 0, task).module)
    with pytest.warns(FallbackWarning, match="global generator"):
        assert run(task).status == "max_rounds"


def test_texts_of_other_lengths_can_be_tested_and_evaluated_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    test = {name: np.concatenate([part, 0 * part], axis=1) for name, part in TEXTS.items()}
    whole = run(text_task(TextClassifier), executor="reference")
    monkeypatch.setattr("defedavg.training.reference.CHUNK", 7)
    padded = run(text_task(TextClassifier, test=(test, LABELS)), executor="reference")
    assert padded.best_accuracy == whole.best_accuracy
    assert padded.evaluations[-1].loss == pytest.approx(whole.evaluations[-1].loss)


def test_tokens_with_ignored_targets() -> None:
    task = text_task(
        Tagger, train=(TEXTS, TOKEN_LABELS), test=(TEXTS, TOKEN_LABELS), loss=token_cross_entropy, metric=token_accuracy
    )
    assert task.classes is None
    assert_executors_agree(task)
    found = run(task, {"training.local_lr": 0.5, "stop.max_rounds": 20})
    assert found.evaluations[0].accuracy < found.best_accuracy
    changed = {"input_ids": np.where(MASK == 1, IDS, 7), "attention_mask": MASK}
    other = text_task(Tagger, train=task.train, test=(changed, TOKEN_LABELS), loss=task.loss, metric=task.metric)
    assert run(other).evaluations[-1].loss == run(task).evaluations[-1].loss


def test_token_losses_are_means_over_the_tokens_that_count() -> None:
    outputs = torch.tensor([[[0.0, 0.0], [0.0, 3.0]], [[1.0, 0.0], [5.0, 5.0]]])
    targets = torch.tensor([[0, 1], [0, -100]])
    expected = torch.tensor([(np.log(2) + np.log1p(np.exp(-3))) / 2, np.log1p(np.exp(-1))], dtype=torch.float32)
    torch.testing.assert_close(token_cross_entropy(outputs, targets), expected)
    assert float(token_accuracy(outputs, targets)) == 1.0
    assert "targets (samples, tokens)" in line_of(lambda: token_cross_entropy(outputs[0], targets))


def test_an_argument_that_the_model_does_not_have_is_one_line() -> None:
    named = {**TEXTS, "token_type_ids": IDS}
    line = line_of(lambda: run(text_task(TextClassifier, train=(named, LABELS), test=(named, LABELS))))
    assert "unexpected keyword argument 'token_type_ids'" in line


# Metrics


def misses(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(outputs.argmax(1) != targets).float()


def test_a_metric_replaces_the_accuracy() -> None:
    accuracy = run(text_task(TextClassifier)).evaluations
    for executor in ("batched", "reference"):
        found = run(text_task(TextClassifier, metric=misses), executor=executor).evaluations
        assert [e.accuracy for e in found] == pytest.approx([e.accuracy - 1 for e in accuracy])


def test_a_metric_sees_the_whole_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("defedavg.training.reference.CHUNK", 7)

    def count(outputs: Tensor, targets: Tensor) -> float:
        assert outputs.shape == (SAMPLES, 3)
        return float(len(targets))

    assert run(text_task(TextClassifier, metric=count)).best_accuracy == SAMPLES


@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("inf"))])
def test_a_metric_that_is_not_a_number_is_not_recorded(value: Any) -> None:
    found = run(text_task(TextClassifier, metric=lambda *_: value))
    assert found.best_accuracy is None
    assert found.status == "max_rounds"


def test_a_metric_counts_for_the_target() -> None:
    task = text_task(TextClassifier, metric=lambda outputs, _: float(outputs.abs().max()) * 0 + 0.75)
    assert run(task, {"stop.target_accuracy": 0.7}).status == "target"
    assert run(task, {"stop.target_accuracy": 0.8}).status == "max_rounds"


@pytest.mark.parametrize(
    ("metric", "line"),
    [
        (lambda o, _: o, f"the metric lambda has shape ({SAMPLES}, 3); it must return one number or one per sample"),
        (lambda o, _: o.nope, "the metric lambda fails: AttributeError: 'Tensor' object has no attribute 'nope'"),
        (lambda _: 1, "the metric lambda fails: <lambda>() takes 1 positional argument but 2 were given"),
        (lambda *_: "high", "the metric lambda fails: "),
    ],
)
def test_a_bad_metric_is_one_line(metric: Any, line: str) -> None:
    assert line_of(lambda: run(text_task(TextClassifier, metric=metric))).startswith(line)


# Lazy layers


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(2, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(3))


@pytest.mark.parametrize("model", [lazy, lazy()], ids=["function", "module"])
def test_lazy_layers_are_initialised_from_the_seed(model: Any) -> None:
    images = image_task("cnn").train
    data = (images.inputs.float(), images.targets)
    parts = [np.arange(i, SAMPLES, CLIENTS) for i in range(CLIENTS)]
    task = make_task(model=model, train=data, test=data, clients=parts)
    state = torch.get_rng_state()
    first, again, other = (make_executor(how("fedavg"), seed, task).versions[0] for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    chosen = how("defedavg-niid")
    expected = reference(chosen, task, 4)
    (found,) = final_versions([batched_run(chosen, task, 4)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_a_lazy_layer_with_named_inputs() -> None:
    class Lazy(TextClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LazyLinear(6)

    data = (TEXTS, LABELS)
    task = make_task(model=Lazy, train=data, test=data, clients=[np.arange(SAMPLES)])
    assert run(task, {"training.updates_per_round": 1}).status == "max_rounds"


def test_a_metric_keeps_the_digits_of_a_number() -> None:
    for executor in ("batched", "reference"):
        found = run(text_task(TextClassifier, metric=lambda *_: 0.7), {"stop.target_accuracy": 0.7}, executor)
        assert (found.best_accuracy, found.status) == (0.7, "target")


# Outputs that are NaN, and statistics of the batch


def test_outputs_that_are_nan_name_no_class() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 2), nn.Threshold(1e9, float("nan")))

    x, y = np.ones((8, 4), "float32"), np.zeros(8, "int64")
    task = make_task(model=model, train=(x, y), test=(x, y), clients=[[0, 1], [2, 3]], classes=2)
    found = simulate("fedavg", task=task, settings={"training.updates_per_round": 1}, executor="reference")
    assert (found.status, found.best_accuracy) == ("diverged", 0.0)


def test_a_last_test_sample_is_not_evaluated_alone() -> None:
    layers = nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2)
    random = np.random.Generator(np.random.Philox(key=3))
    x = random.normal(size=(1001, 4)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    task = make_task(model=nn.Sequential(*layers), train=(x, y), test=(x, y), clients=[[0, 1, 2], [3, 4, 5]])
    settings = {"training.updates_per_round": 1, "stop.max_rounds": 1}
    assert simulate("fedavg", task=task, settings=settings).rounds == 1
    assert [len(part) for part in task.test.chunks(500)] == [500, 501]
    assert [len(part) for part in task.test[:3].chunks(1)] == [1, 1, 1]


# What has no effect


def test_a_model_that_cannot_be_stacked_is_named_with_the_reason() -> None:
    x, y = np.ones((8, 4), "float32"), np.zeros(8, "int64")
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 2))
    task = make_task(model=model, train=(x, y), test=(x, y), clients=[[0, 1], [2, 3]], classes=2)
    settings = {"training.updates_per_round": 1, "stop.max_rounds": 1}
    with pytest.warns(FallbackWarning, match="the model is trained one client at a time: BatchNorm1d with momentum"):
        simulate("fedavg", task=task, settings=settings)
    simulate("fedavg", task=task, settings=settings, executor="reference")


def test_a_target_without_accuracy_is_named() -> None:
    x, y = np.ones((8, 4), "float32"), np.zeros((8, 1), "float32")
    task = make_task(model=nn.Linear(4, 1), train=(x, y), test=(x, y), clients=[[0, 1], [2, 3]], loss=squared_error)
    settings = {"training.updates_per_round": 1, "stop.max_rounds": 1, "stop.target_accuracy": 0.5}
    with pytest.warns(NoEffectWarning, match="stop.target_accuracy has no effect: the task has no classes"):
        simulate("fedavg", task=task, settings=settings)


# Padding


class PaddedTexts(nn.Module):
    """The mean of all words, where word 0 is the padding, which is not trained; `torch.func` maps the convolution."""

    def __init__(self, convolution: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, padding_idx=0)
        self.convolution = nn.Conv1d(6, 6, 3) if convolution else None
        self.head = nn.Linear(6, 2)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.words(ids)
        if self.convolution is not None:
            vectors = self.convolution(vectors.transpose(1, 2)).transpose(1, 2)
        return self.head(vectors.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("convolution", [False, True], ids=["stacked", "mapped"])
def test_the_vector_of_the_padding_keeps_its_value_for_every_client(convolution: bool) -> None:
    ids = np.random.Generator(np.random.Philox(key=5)).integers(1, 20, (90, 5))
    labels = ids[:, 0] % 2
    ids[3:, 3:] = 0  # the samples of the check that compares a stacked model with its module have no padding
    clients = np.array_split(np.arange(60), 6)
    task = make_task(
        model=lambda: PaddedTexts(convolution),
        train=(ids[:60], labels[:60]),
        test=(ids[60:], labels[60:]),
        clients=clients,
    )
    expected = assert_executors_agree(task)
    executor = make_executor(how("defedavg-niid"), 0, task)
    Trainer(task, executor.module)  # it is stacked, and not trained one client at a time
    assert not executor.named(expected)["words.weight"][0].any()
