"""Checks of everything that a client sends, before the server uses it. A bad reply raises ``BadReplyError``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from ..engine.event_log import read_count, read_number, read_reports
from ..engine.events import Report, UpdateInfo
from ..transport import Reply, Vector

MAX_REPORTS = 10_000
Number = TypeVar("Number", int, float)


class BadReplyError(Exception):
    """A client sent an invalid reply; the message says why it is invalid."""


def checked(fields: dict[str, Any], name: str, read: Callable[[Any], Number]) -> Number:
    """Return a number from a reply, read with ``read_count`` or ``read_number``."""
    try:
        return read(fields.get(name))
    except TypeError as error:
        raise BadReplyError(f"{name} is {error}") from None


def update_info(fields: dict[str, Any]) -> UpdateInfo:
    """Return which update a reply delivers."""
    return UpdateInfo(*(checked(fields, name, read_count) for name in ("index", "version", "steps")))


def reports(fields: dict[str, Any]) -> tuple[tuple[Report, ...], float]:
    """Return the events of a background client's machine, and the client's clock when it replied."""
    text = fields.get("reports")
    if not isinstance(text, str) or len(text) > 64 * MAX_REPORTS:
        raise BadReplyError("its reports are missing or too long")
    try:
        found = read_reports(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise BadReplyError("its reports cannot be read") from None
    clock = checked(fields, "clock", read_number)
    if any(report.at > clock for report in found):
        raise BadReplyError("it reports an event in the future")
    return found, clock


def update_values(reply: Reply, weights: Vector, norm_bound: float, variances: Mapping[str, slice]) -> Vector:
    """Return the update of a reply if it has the shape and type of the model, finite values and a bounded norm.

    ``variances`` are the positions of values that must not be negative.
    """
    update = reply.update
    if update is None:
        raise BadReplyError("it contains no update")
    if update.shape != weights.shape:
        raise BadReplyError(f"the update has shape {update.shape}, but the model has {weights.shape}")
    if update.dtype != weights.dtype:
        raise BadReplyError(f"the update is {update.dtype}, but the model is {weights.dtype}")
    norm = _norm(update)
    # A finite norm proves that all values are finite, and costs less than a look at each.
    if not math.isfinite(norm) and not bool(np.isfinite(update).all()):
        raise BadReplyError("the update contains values that are not finite")
    for name, part in variances.items():
        if bool((update[part] < 0).any()):
            raise BadReplyError(f"the update contains a negative variance in {name}")
    limit = norm_bound * max(1.0, _norm(weights))
    if norm > limit:
        raise BadReplyError(f"the update has norm {norm:.4g}, above the bound of {limit:.4g}")
    return update


def _norm(values: Vector) -> float:
    with np.errstate(over="ignore", invalid="ignore"):  # the caller finds the values that are not finite
        # The sum in the model's own number type is several times faster; it may overflow, above all in float16.
        squares = float(np.dot(values, values)) if values.dtype.itemsize >= 4 else math.inf
        if not math.isfinite(squares):
            squares = float(np.einsum("i,i->", values, values, dtype=np.float64))
    return math.sqrt(squares)
