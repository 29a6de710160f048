"""Tasks: what is learned, on which data, and how the data are spread over clients.

Bring your own with ``make_task``; name a built-in one with ``classification_task``; use ``least_squares`` where the
answer must be known exactly.
"""

from __future__ import annotations

from .datasets.catalog import DATASETS, classification_task, load
from .datasets.locations import data_dir, set_data_dir
from .lazy_partition import Drawn, sampled, sampled_classes
from .least_squares import LeastSquares, Scale, least_squares
from .models import MODELS, build, seeded
from .partition import SPLITS, by_classes, by_shards, class_counts, dirichlet, iid, split
from .task import Clients, Data, Loss, Task, cross_entropy, make_task, squared_error

__all__ = [
    "DATASETS",
    "MODELS",
    "SPLITS",
    "Clients",
    "Data",
    "Drawn",
    "LeastSquares",
    "Loss",
    "Scale",
    "Task",
    "build",
    "by_classes",
    "by_shards",
    "class_counts",
    "classification_task",
    "cross_entropy",
    "data_dir",
    "dirichlet",
    "iid",
    "least_squares",
    "load",
    "make_task",
    "sampled",
    "sampled_classes",
    "seeded",
    "set_data_dir",
    "split",
    "squared_error",
]
