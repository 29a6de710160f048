"""``make_task``: user ids as clients, dict inputs, scalars of NumPy, and one clear line for what a new user may try."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from defedavg import UserError, simulate, squared_error
from defedavg.errors import CastWarning
from defedavg.tasks import Task, make_task
from helpers.user_errors import line_of

RANDOM = np.random.Generator(np.random.Philox(key=0))
X = RANDOM.normal(size=(60, 5)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")
TEST = (X[50:], Y[50:])


def linear() -> nn.Module:
    return nn.Linear(5, 2)


def custom(**changes: Any) -> Task:
    parts = np.array_split(np.arange(50), 5)
    return make_task(**{"model": linear, "train": (X[:50], Y[:50]), "test": TEST, "clients": parts, **changes})


def run(task: Any = None, settings: Any = None, **options: Any) -> Any:
    given = {"training.updates_per_round": 2, "training.local_steps": 2, "stop.max_rounds": 2, **(settings or {})}
    return simulate("fedavg", task=custom() if task is None else task, settings=given, **options)


# Clients


NAMES = np.array(["eve", "bob", "carl", "anna", "dora"] * 10)


@pytest.mark.parametrize(
    "ids",
    [NAMES, NAMES.tolist(), NAMES.astype(object), NAMES.astype("S"), np.array([4, 1, 2, 0, 3] * 10),
     torch.tensor([40, 10, 20, -5, 30] * 10), [4, 1, 2, 0, 3] * 10, np.array([4, 1, 2, 0, 3] * 10, "uint8")],
    ids=["text", "list of text", "objects", "bytes", "numbers", "tensor", "list of numbers", "uint8"],
)  # fmt: skip
def test_an_id_per_sample_groups_the_samples_in_sorted_order(ids: Any) -> None:
    expected = [np.arange(position, 50, 5).tolist() for position in (3, 1, 2, 4, 0)]
    found = custom(clients=ids).clients
    assert [part.tolist() for part in found] == expected
    assert all(part.dtype == np.int64 for part in found)


def test_ids_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    assert custom(clients=pandas.Series(NAMES)).num_clients == 5
    assert custom(clients=pandas.Series(NAMES, dtype="category")).num_clients == 5


def test_indices_of_different_lengths_are_not_ids() -> None:
    ragged = np.array([np.arange(20), np.arange(20, 50)], dtype=object)
    for clients in (ragged, [range(20), range(20, 50)], [torch.arange(20), torch.arange(20, 50)], [np.arange(50)]):
        assert sum(map(len, custom(clients=clients).clients)) == 50
    assert custom(clients=np.arange(50).reshape(5, 10)).num_clients == 5


# Inputs


class Pairs(Dataset[Any]):
    """A map-style data set of what a function returns."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __getitem__(self, index: int) -> Any:
        return self.item(index)

    def __len__(self) -> int:
        return 50


def test_a_dataset_of_named_inputs_equals_named_arrays() -> None:
    named = {"a": X[:50], "b": X[:50, 0]}
    test = ({"a": X[50:], "b": X[50:, 0]}, Y[50:])
    for train in ((named, Y[:50]), Pairs(lambda i: ({name: part[i] for name, part in named.items()}, Y[i]))):
        inputs = custom(train=train, test=test).train.inputs
        assert list(inputs) == ["a", "b"]
        assert inputs["a"].tolist() == X[:50].tolist()
        assert inputs["b"].shape == (50,)


def test_scalars_of_numpy_and_torch_are_settings_and_seeds() -> None:
    plain = {"training.local_lr": 0.125, "training.sampling": "shuffle"}
    plain |= {"stop.target_accuracy": 0.9, "stop.stop_at_target": False}
    scalars = {
        "training.local_lr": np.float32(0.125),
        "training.sampling": np.str_("shuffle"),
        "stop.stop_at_target": np.bool_(False),
        "stop.target_accuracy": np.float64(0.9),
        "training.local_steps": np.int64(2),
    }
    expected = run(settings=plain, seed=3)
    for seed in (np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)):
        found = run(custom(classes=np.int64(2)), settings=scalars, seed=seed)
        assert torch.equal(found.weights, expected.weights)
    zero_dimensional = run(settings={**plain, "training.local_lr": torch.tensor(0.125)}, seed=3)
    assert torch.equal(zero_dimensional.weights, expected.weights)


def test_float64_is_kept_with_a_model_in_float64() -> None:
    double = {"train": (X[:50].astype("float64"), Y[:50]), "test": (X[50:].astype("float64"), Y[50:])}
    assert run(custom(model=lambda: linear().double(), **double, keep_dtype=True)).weights.dtype == torch.float64
    with pytest.warns(CastWarning, match="float64 data become float32"):
        task = custom(**double)
    assert run(task).weights.dtype == torch.float32


def test_a_function_that_returns_the_same_module_starts_every_run_from_it() -> None:
    module = linear()
    before = module.get_parameter("weight").detach().clone()
    first, again = (run(custom(model=lambda: module)).weights for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(module.get_parameter("weight"), before)


# What a new user may try


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


MISFIT = "the model cannot be trained on these data with this loss"
MASKS = [np.arange(50) < 25, np.arange(50) >= 25]
DOUBLE = {"train": (X[:50].astype("float64"), Y[:50]), "test": (X[50:].astype("float64"), Y[50:]), "keep_dtype": True}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        # Clients
        ({"clients": 10}, "clients is int; pass the sample indices of every client, or an array with the client id"),
        ({"clients": None}, "clients is NoneType; pass"),
        ({"clients": "iid"}, "clients is str; pass"),
        ({"clients": {"a": np.arange(25)}}, "clients is dict; pass"),
        ({"clients": NAMES[:40]}, "clients has 40 ids for 50 training samples; pass the client id of every training"),
        ({"clients": np.arange(50) / 5}, "the client ids are of type float; pass whole numbers or text"),
        ({"clients": [0, "a"] * 25}, "the client ids are of type int, str; pass whole numbers or text, all of one"),
        ({"clients": [None] * 50}, "the client ids are of type NoneType; pass"),
        ({"clients": MASKS}, "the indices of client 0 are bool; pass whole sample numbers"),
        ({"clients": MASKS[0]}, "the client ids are of type bool; pass"),
        ({"clients": [0, [1, 2]]}, "the indices of client 0 are not a 1-d int64 array; pass a list"),
        ({"clients": [[[0], [1, 2]]]}, "the indices of client 0 are not an array; pass whole sample numbers"),
        ({"clients": [np.arange(50), []]}, "client 1 has no samples"),
        # Data
        ({"train": ({}, Y[:50])}, "the inputs are an empty dict; give it at least one array"),
        ({"train": ({"a": X[:50], "b": X[:49]}, Y[:50])}, "the inputs differ in their number of samples: 'a' has 50"),
        ({"train": ({3: X[:50]}, Y[:50])}, "the train inputs have the key 3; keys are names of the model's arguments"),
        ({"train": ({"a": X[:50]}, Y[:50])}, "the training and test inputs differ in kind: (50, 5) float32 and"),
        ({"test": (X[50:, None], Y[50:])}, "the training and test inputs differ in kind: (50, 5) float32 and"),
        ({"test": (X[50:].astype("int64"), Y[50:])}, "the training and test inputs differ in kind"),
        ({"train": (X[:50], np.eye(2, dtype="float32")[Y[:50]])}, "the targets differ in kind: (50, 2) float32"),
        ({"train": (np.where(X[:50] > 1, np.nan, X[:50]), Y[:50])}, "the train inputs have NaN, first in sample"),
        ({"test": (np.full((10, 5), np.nan, "float32"), Y[50:])}, "the test inputs have NaN, first in sample 0"),
        ({"train": (X[:50], np.full(50, np.nan))}, "the train targets have NaN, first in sample 0"),
        ({"test": (np.where(X[50:] > 1, np.inf, X[50:]), Y[50:])}, "the test inputs have infinity, first in sample"),
        ({"train": (X[:50], np.full(50, -np.inf))}, "the train targets have infinity, first in sample 0"),
        ({"train": (X[:0], Y[:0]), "clients": [[]]}, "the training set is empty; give it at least one sample"),
        ({"train": (torch.tensor(X[:50]).to_sparse(), Y[:50])}, "train has a sparse, nested or meta tensor"),
        ({"train": (torch.empty(50, 5, device="meta"), Y[:50])}, "train has a sparse, nested or meta tensor"),
        ({"train": DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)))}, "train is DataLoader; pass a pair"),
        ({"train": Pairs(raising(KeyError("x")))}, "the train Dataset cannot be read: KeyError: 'x'; correct its"),
        ({"train": Pairs(lambda i: {"x": X[i], "label": Y[i]})}, "cannot stack the train Dataset; every item"),
        ({"train": Pairs(lambda i: ({"x": X[i], f"{i}": X[i]}, Y[i]))}, "cannot stack the train Dataset; every item"),
        # Numbers and functions
        ({"classes": 2.5}, "classes is 2.5; pass a number, None, or 'auto'"),
        ({"classes": True}, "classes is True; pass a number"),
        ({"classes": 0}, "classes is 0; pass a number"),
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss; pass an object of it, or a function"),
        ({"loss": "cross_entropy"}, "loss is 'cross_entropy'; pass a function of (outputs, targets)"),
        ({"loss": None}, "loss is None; pass a function"),
        ({"metric": "f1"}, "metric is 'f1'; pass a function of (outputs, targets)"),
        ({"metric": nn.Linear}, "metric is the class Linear; pass an object"),
        ({"logits": 1.5}, "logits is 1.5; pass a name, a position, or a function"),
        ({"logits": True}, "logits is True; pass a name"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_one_line(changes: dict[str, Any], line: str) -> None:
    assert line_of(lambda: custom(**changes)).startswith(line)


def test_the_mask_of_a_dict_may_have_infinity_but_no_nan() -> None:
    def masked(value: float) -> Task:
        parts = [({"x": part, "mask": np.full(len(part), value, "float32")}) for part in (X[:50], X[50:])]
        return custom(train=(parts[0], Y[:50]), test=(parts[1], Y[50:]))

    assert len(masked(-np.inf).train) == 50
    assert line_of(lambda: masked(np.nan)).startswith("the train inputs have NaN, first in sample 0")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("local_steps", "setting 'local_steps' cannot be read; write it as 'training.local_steps'"),
        ("nonsense", "setting 'nonsense' cannot be read; write it as 'table.key'"),
        ("seeds", "'seeds' is not a setting of simulate, which runs one seed; pass the argument seed=…"),
    ],
)
def test_a_setting_without_its_table_is_one_line_with_the_right_name(name: str, line: str) -> None:
    assert line_of(lambda: simulate("fedavg", task=custom(), settings={name: 1})) == line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        # Models
        ({"model": nn.Linear}, "the model cannot be built: Linear.__init__() missing 2 required positional arguments"),
        ({"model": lambda _: linear()}, "the model cannot be built: "),
        ({"model": raising(ZeroDivisionError())}, "the model cannot be built: ZeroDivisionError"),
        ({"model": lambda: nn.Linear}, "the model function returned type; make it return a torch module"),
        ({"model": lambda: nn.Linear(5, 2, device="meta")}, "the model cannot be built: Cannot copy out of"),
        ({"model": lambda: nn.Linear(6, 2)}, f"{MISFIT} (inputs (10, 5) float32)"),
        ({"model": lambda: nn.Linear(5, 1)}, "accuracy needs outputs of shape (samples, 2) and one target per sample"),
        ({"model": lambda: linear().double()}, f"{MISFIT} (inputs (10, 5) float32)"),
        ({"model": lambda: nn.Sequential(nn.LazyLinear(2), nn.Linear(3, 2))}, "the model cannot be built: mat1"),
        (DOUBLE, f"{MISFIT} (inputs (10, 5) float64)"),
        # Data
        ({"train": ((10 * X[:50]).astype("int64"), Y[:50]), "test": ((10 * X[50:]).astype("int64"), Y[50:])},
         f"{MISFIT} (inputs (10, 5) int64): "),
        ({"test": (X[50:, :4], Y[50:])}, "the model cannot be evaluated on the test data (inputs (2, 4) float32): "),
        ({"train": (X[:50], Y[:50] + 5)}, "accuracy needs outputs of shape (samples, 7)"),
        ({"test": (X[50:], Y[50:] + 5)}, "accuracy needs outputs of shape (samples, 7)"),
        # Losses
        ({"loss": F.cross_entropy}, "the loss has shape () for 10 samples; it must return one value per sample"),
        ({"loss": nn.CrossEntropyLoss()}, "the loss has shape () for 10 samples"),
        ({"loss": lambda o, _: o}, "the loss has shape (10, 2) for 10 samples"),
        ({"loss": lambda *_: 0.5}, "the loss returns float; it must return a tensor with one value per sample"),
        ({"loss": raising(KeyError("x"))}, f"{MISFIT} (inputs (10, 5) float32)"),
        ({"loss": raising(AssertionError())}, MISFIT),
        ({"loss": lambda o, t: F.cross_entropy(o, t, reduction="none").detach()}, "the model cannot be trained"),
        ({"loss": squared_error}, "squared_error needs equal shapes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_one_line_before_training(changes: dict[str, Any], line: str) -> None:
    assert line_of(lambda: run(custom(**changes))).startswith(line)


def test_a_loss_module_with_one_value_per_sample_trains() -> None:
    expected = run().weights
    assert torch.equal(run(custom(loss=nn.CrossEntropyLoss(reduction="none"))).weights, expected)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"task": "mnist"}, "task is str; pass what make_task returns"),
        ({"task": (X, Y)}, "task is tuple; pass what make_task returns"),
        ({"settings": [("training.local_lr", 0.1)]}, "settings is list; pass a dict"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"seed": -1}, "seed is -1; a seed must be from 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed is 18446744073709551616; a seed must be from 0"),
        ({"seed": "1"}, "seed is '1'; it must be a whole number"),
        ({"seed": None}, "seed is None; it must be a whole number"),
        ({"seed": np.array([1, 2])}, "seed is array([1, 2]); it must be a whole number"),
        ({"settings": {"training.local_lr": np.array([0.1, 0.2])}}, "training.local_lr is array([0.1, 0.2]); it must"),
        ({"settings": {"training.local_lr": np.float64("nan")}}, "training.local_lr is nan; it must be a number"),
        ({"settings": {"training.local_steps": np.float64(2.5)}}, "training.local_steps is 2.5; it must be a whole"),
    ],
)
def test_bad_arguments_of_simulate_are_one_line(arguments: dict[str, Any], line: str) -> None:
    given = {"task": custom(), **arguments}
    assert line_of(lambda: simulate("fedavg", **given)).startswith(line)


def test_the_name_of_a_metric_is_that_of_its_function() -> None:
    class Score:
        def __call__(self, outputs: Tensor, targets: Tensor) -> float:
            return float(len(outputs) + len(targets))

    assert custom().metric_name == "accuracy"
    assert custom(metric=squared_error).metric_name == "squared_error"
    assert custom(metric=Score()).metric_name == "Score"
    assert custom(metric=lambda *_: 1.0).metric_name == "lambda"


def test_ids_that_differ_in_a_final_nul_are_different_clients() -> None:
    for ids in (["a\0", "a", "b"], [b"a\0", b"a", b"b"]):
        task = make_task(model=nn.Linear(2, 2), train=(X3, Y3), test=(X3, Y3), clients=ids)
        assert [part.tolist() for part in task.clients] == [[1], [0], [2]]


def test_ids_of_another_type_are_named() -> None:
    for ids, kind in (([UUID(int=i) for i in range(3)], "UUID"), ([date(2020, 1, i) for i in (1, 2, 3)], "date")):
        with pytest.raises(UserError, match=f"the client ids are of type {kind}; pass whole numbers or text"):
            make_task(model=nn.Linear(2, 2), train=(X3, Y3), test=(X3, Y3), clients=ids)


X3, Y3 = np.ones((3, 2), "float32"), np.zeros(3, "int64")
