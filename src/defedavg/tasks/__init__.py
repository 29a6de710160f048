"""Tasks: the model, the loss, the data, and how the data are partitioned among clients.

Make your own with ``make_task``; name a registered data set, model and split with ``classification_task``; use
``least_squares`` where the solution must be known exactly. ``register_model``, ``register_partition`` and
``register_dataset`` add names.
"""

from __future__ import annotations

from ..compat import renamed_names
from .client_tests import hold_out
from .custom_task import make_task
from .datasets.catalog import classification_task, load, load_users
from .datasets.dataset import DATASETS, DataSet, Download, PublishedFile, register_dataset
from .datasets.dataset_files import data_dir, set_data_dir
from .lazy_partition import LazyPartition, sampled, sampled_classes
from .least_squares import LeastSquares, Scale, least_squares
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
from .task import Clients, ClientTests, Task
from .users import Users, natural

__all__ = [
    "DATASETS", "MODELS", "PARTITIONS", "ClientTests", "Clients", "Data", "DataSet", "Download", "Inputs",
    "LazyPartition", "LeastSquares", "PublishedFile", "Scale", "Task", "Users", "build", "build_model",
    "by_classes", "by_shards", "class_counts", "classification_task", "cross_entropy", "data_dir", "dirichlet",
    "grouped_classes", "hold_out", "iid", "least_squares", "load", "load_users", "make_task", "natural",
    "random_classes", "register_dataset", "register_model", "register_partition", "sampled", "sampled_classes",
    "seeded", "set_data_dir", "split", "squared_error", "token_accuracy", "token_cross_entropy",
]  # fmt: skip

__getattr__ = renamed_names(__name__)
