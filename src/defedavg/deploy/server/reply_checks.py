"""What a client sends is checked before it touches anything. A bad reply is ``BadReply``, which says why."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from ..engine.event_log import reports_of
from ..engine.events import Report, UpdateInfo
from ..transport import Reply, Vector

MOST_REPORTS = 10_000


class BadReply(Exception):
    """What a client sent is not what it should be."""


def whole(fields: dict[str, Any], name: str) -> int:
    """A whole number from zero up, from a reply."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadReply(f"{name} is {repr(value)[:40]}, not a whole number from zero up")
    return value


def number(fields: dict[str, Any], name: str) -> float:
    """A finite number from zero up, from a reply."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise BadReply(f"{name} is {repr(value)[:40]}, not a number from zero up")
    return float(value)


def handed(fields: dict[str, Any]) -> UpdateInfo:
    """Which update a reply brings."""
    return UpdateInfo(whole(fields, "index"), whole(fields, "version"), whole(fields, "steps"))


def reports(fields: dict[str, Any]) -> tuple[tuple[Report, ...], float]:
    """What a background client's machine saw, and the client's clock at its reply."""
    text = fields.get("reports")
    if not isinstance(text, str) or len(text) > 64 * MOST_REPORTS:
        raise BadReply("its reports are missing or too long")
    try:
        found = reports_of(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise BadReply("its reports cannot be read") from None
    clock = number(fields, "clock")
    if any(report.at > clock for report in found):
        raise BadReply("it reports what has not happened yet")
    return found, clock


def update(reply: Reply, weights: Vector, norm_bound: float) -> Vector:
    """The update of a reply, if it fits the version it started from: shape, number type, finite, not too long."""
    found = reply.update
    if found is None:
        raise BadReply("it brings no update")
    if found.shape != weights.shape:
        raise BadReply(f"the update has shape {found.shape}, but the model has {weights.shape}")
    if found.dtype != weights.dtype:
        raise BadReply(f"the update is {found.dtype}, but the model is {weights.dtype}")
    if not bool(np.isfinite(found).all()):
        raise BadReply("the update holds values that are no finite numbers")
    length = float(np.linalg.norm(found.astype(np.float64)))
    limit = norm_bound * max(1.0, float(np.linalg.norm(weights.astype(np.float64))))
    if length > limit:
        raise BadReply(f"the update has norm {length:.4g}, above the bound of {limit:.4g}")
    return found
