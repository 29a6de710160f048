"""Tasks: the model, the loss, the data, and how the data are partitioned among clients.

Make your own with ``make_task``; name a registered data set, model and split with ``classification_task``; use
``least_squares`` where the solution must be known exactly. ``register_model``, ``register_partition`` and
``register_dataset`` add names.

Names are imported when they are first used, so that planning, which needs names of partitions, does not load PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..compat import renamed_names

if TYPE_CHECKING:
    from .client_tests import hold_out
    from .custom_task import make_task
    from .datasets.builtin_datasets import DATASETS, register_dataset
    from .datasets.catalog import classification_task, load, load_users
    from .datasets.dataset import DataSet, Download, PublishedFile
    from .datasets.dataset_files import data_dir, set_data_dir
    from .lazy_partition import Clients, LazyPartition, sampled, sampled_classes
    from .least_squares_task import LeastSquares, Scale, least_squares
    from .losses import cross_entropy, squared_error, token_accuracy, token_cross_entropy
    from .model_calls import build_model
    from .models import MODELS, build, register_model, seeded
    from .partition import (
        PARTITIONS,
        by_classes,
        by_shards,
        class_counts,
        dirichlet,
        grouped_classes,
        iid,
        random_classes,
        register_partition,
        split,
    )
    from .samples import Data, Inputs
    from .task import ClientTests, Task
    from .users import Users, natural

__all__ = [
    "DATASETS", "MODELS", "PARTITIONS", "ClientTests", "Clients", "Data", "DataSet", "Download", "Inputs",
    "LazyPartition", "LeastSquares", "PublishedFile", "Scale", "Task", "Users", "build", "build_model",
    "by_classes", "by_shards", "class_counts", "classification_task", "cross_entropy", "data_dir", "dirichlet",
    "grouped_classes", "hold_out", "iid", "least_squares", "load", "load_users", "make_task", "natural",
    "random_classes", "register_dataset", "register_model", "register_partition", "sampled", "sampled_classes",
    "seeded", "set_data_dir", "split", "squared_error", "token_accuracy", "token_cross_entropy",
]  # fmt: skip

_MODULES: dict[str, tuple[str, ...]] = {
    "client_tests": ("hold_out",),
    "custom_task": ("make_task",),
    "datasets.builtin_datasets": ("DATASETS", "register_dataset"),
    "datasets.catalog": ("classification_task", "load", "load_users"),
    "datasets.dataset": ("DataSet", "Download", "PublishedFile"),
    "datasets.dataset_files": ("data_dir", "set_data_dir"),
    "lazy_partition": ("Clients", "LazyPartition", "sampled", "sampled_classes"),
    "least_squares_task": ("LeastSquares", "Scale", "least_squares"),
    "losses": ("cross_entropy", "squared_error", "token_accuracy", "token_cross_entropy"),
    "model_calls": ("build_model",),
    "models": ("MODELS", "build", "register_model", "seeded"),
    "partition": (
        "PARTITIONS", "by_classes", "by_shards", "class_counts", "dirichlet", "grouped_classes", "iid",
        "random_classes", "register_partition", "split",
    ),
    "samples": ("Data", "Inputs"),
    "task": ("ClientTests", "Task"),
    "users": ("Users", "natural"),
}  # fmt: skip
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_renamed = renamed_names(__name__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return _renamed(name)
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
