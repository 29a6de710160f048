"""Ranges of the options of partitions that hold whatever the data are; limits that depend on the data are elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..errors import UserError


def check_classes_per_client(number: int) -> None:
    """Refuse clients without a class."""
    if number < 1:
        raise UserError(f"classes_per_client is {number}; give every client at least 1 class")


def check_alpha(alpha: float) -> None:
    """Refuse a parameter with which no Dirichlet distribution exists."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise UserError(f"alpha is {alpha}; give a number above 0 (small: few classes per client, large: nearly iid)")


def check_shards_per_client(number: int) -> None:
    """Refuse clients without a shard."""
    if number < 1:
        raise UserError(f"shards_per_client is {number}; give every client at least 1 shard")


def check_samples_per_client(number: int) -> None:
    """Refuse clients without a sample."""
    if number < 1:
        raise UserError(f"samples_per_client is {number}; give every client at least 1 sample")


def check_min_samples_per_client(number: int) -> None:
    """Refuse a least number of samples that allows users without any."""
    if number < 1:
        raise UserError(f"min_samples_per_client is {number}; it must be at least 1")


OPTION_CHECKS: Final[Mapping[str, Callable[[Any], None]]] = {
    "classes_per_client": check_classes_per_client,
    "alpha": check_alpha,
    "shards_per_client": check_shards_per_client,
    "samples_per_client": check_samples_per_client,
    "min_samples_per_client": check_min_samples_per_client,
}
"""By option of a partition that comes with the package; a partition of a plugin has ranges of its own."""
