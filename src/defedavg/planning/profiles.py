"""Profiles of clients: defaults of several settings of [clients] under one name."""

from __future__ import annotations

from .devices import PAPER, PHONES

PROFILES: dict[str, dict[str, float | str]] = {
    **{name: dict(values) for name, values in PAPER.items()},
    "phones": {
        # The median of the measured latencies is 172; their unit is not stated, and is probably ms per batch.
        "step_seconds": 0.172,
        "model_megabytes": 2.2,
        "slowness": PHONES,
        "links": PHONES,
        "availability": PHONES,
    },
}
BY_PROFILE = frozenset(name for profile in PROFILES.values() for name in profile)
"""The settings that some profile sets."""
