"""Checks of a task by its names and numbers alone: nothing is read, and PyTorch is not loaded.

They let a plan, which needs no task, refuse the studies that a run refuses.
"""

from __future__ import annotations

from typing import Final

from ..errors import UserError, unknown
from .datasets.builtin_datasets import DATASETS
from .datasets.dataset import HUB_PREFIX, LEAF_PREFIX
from .partition import PARTITIONS, check_options, needs_users

BUILT_IN_MODELS: Final = (
    "cnn", "mlp", "pooled-mlp", "softmax", "resnet", "transformer", "char-mlp", "char-lstm", "char-transformer",
)  # fmt: skip
NORMALISATIONS: Final = ("standard", "unit", "symmetric")


def check_task(
    data: str, model: str, split: str, *, normalise: str, test_share: float, **split_options: int | float
) -> None:
    """Raise ``UserError`` for a name that nothing has, and for a number that no data set allows."""
    if not data.startswith((HUB_PREFIX, LEAF_PREFIX)):
        DATASETS.find(data)
    if normalise not in NORMALISATIONS:
        raise unknown("normalisation", normalise, NORMALISATIONS)
    if model not in BUILT_IN_MODELS:
        from .models import MODELS  # loads PyTorch, which a plugin with a model has loaded already

        MODELS.find(model)
    PARTITIONS.find(split)
    check_pooling(split, test_share)
    check_options(split, split_options)


def check_pooling(split: str, test_share: float) -> None:
    """Refuse a test set that is drawn from all samples where every user has one of its own."""
    if test_share and needs_users(split):
        raise UserError(f"split = {split} keeps the test set of every user, so task.test_share must be 0; remove it")
