"""What every server machine needs to know, and the settings of an algorithm that has none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setup:
    """What every server machine needs to know. Without ``timeout_seconds`` it waits for clients without limit.

    ``shares`` has the share of every client in all training samples, by which updates are weighted; without it all
    clients have the same weight.
    """

    num_clients: int
    updates_per_round: int
    local_steps: int
    seed: int = 0
    timeout_seconds: float | None = None
    shares: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class NoSettings:
    """The settings of an algorithm that has none."""
