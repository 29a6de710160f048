"""From settings to machines, and from orders to notes: what a run, its resumption and its replay have in common."""

from __future__ import annotations

from typing import Any

from ...algorithms import Setup, algorithm
from ...errors import UserError
from ..deploy_config import DeployConfig, read_orders
from .engine import Engine
from .event_log import Log, Note
from .events import Combine, DiscardUpdate, Order, Quarantined, Replaced


def make_engine(orders: DeployConfig) -> Engine:
    """The machines of a run, at rest."""
    settings = orders.settings
    training = settings.training
    setup = Setup(
        num_clients=settings.clients.num_clients,
        updates_per_round=training.updates_per_round,
        local_steps=training.local_steps,
        seed=orders.seed,
        timeout_seconds=training.timeout_seconds or orders.deploy.job_seconds,
    )
    return Engine(algorithm(settings.algorithm)(setup, settings.algorithm_settings), settings.stop.max_rounds)


def orders_of(log: Log) -> DeployConfig:
    """What the run of a log was told."""
    found = log.head.get("settings")
    if not isinstance(found, dict):
        raise UserError("the log does not say with which settings it was made; it cannot be used")
    return read_orders(found)


def notes_of(t: float, orders: list[Order]) -> list[Note]:
    """What the log says of orders."""
    notes = []
    for order in orders:
        if isinstance(order, Combine):
            merge = order.merge
            updates = [[u.client, u.index, u.version, u.steps, b] for u, b in merge.updates]
            fields: dict[str, Any] = {"version": merge.version, "past": [list(pair) for pair in merge.past]}
            notes.append(Note("merge", t, {**fields, "updates": updates, "freed": list(order.freed)}))
        elif isinstance(order, DiscardUpdate):
            notes.append(Note("dropped", t, {"client": order.update.client, "index": order.update.index}))
        elif isinstance(order, Replaced):
            notes.append(Note("redrawn", t, {"missing": list(order.missing), "drawn": list(order.drawn)}))
        elif isinstance(order, Quarantined):
            notes.append(Note("quarantined", t, {"client": order.client}))
    return notes
