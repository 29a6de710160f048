"""Settings that are valid but unlikely to learn, one line each: rates that suit other algorithms."""

from __future__ import annotations

from ..algorithms import algorithm
from .settings import SERVER_CONSTANTS, Settings
from .study import Study

ADAPTIVE_RATE = 0.3
"""From this global rate on, an adaptive server optimiser moves every weight too far."""
ARRIVAL_RATE = 4.0
"""From this multiple of 1/N on, merging every arrival of N clients usually diverges (measured)."""


def doubtful_settings(study: Study) -> list[str]:
    """Return one line for every algorithm whose global rate is unlikely to learn, whatever else is swept."""
    lines: dict[str, str | None] = {}
    for point in study.points():
        name, line = point.settings.algorithm, _doubt(point.settings)
        lines[name] = line if lines.get(name, line) is not None else None
    return [line for line in lines.values() if line is not None]


def _doubt(settings: Settings) -> str | None:
    kind, rate, clients = algorithm(settings.algorithm), settings.training.global_lr, settings.clients.num_clients
    optimizer = settings.training.server_optimizer or kind.server_optimizer
    if optimizer in SERVER_CONSTANTS["server_epsilon"] and rate >= ADAPTIVE_RATE:
        return (
            f"{kind.name}: the server optimiser {optimizer} changes every weight by about global_lr = {rate:g}; try "
            f"0.001 to 0.03, in [{kind.name}] or [training]"
        )
    if kind.uses_global_lr and not kind.uses_updates_per_round and rate * clients >= ARRIVAL_RATE and clients > 1:
        return (
            f"{kind.name} takes a step for every arrival of {clients} clients with global_lr = {rate:g}; try about "
            f"{1.0 / clients:.2g}, in [{kind.name}] or [training]"
        )
    return None
