"""What if: the clients that a log measured, planned anew with other settings, on the virtual clock."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from ..algorithms import ALGORITHMS, Setup, algorithm
from ..config.study import Settings, single
from ..errors import UserError, unknown
from ..planning.devices import Fleet
from ..planning.plan import Plan
from ..planning.simulator import Simulator
from .replay import Replay

KEYS: dict[str, type[Any]] = {"algorithm": str, "updates_per_round": int, "local_steps": int}


def choices(given: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every combination of ``key=value,value``."""
    swept: dict[str, list[Any]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise UserError(f"--what-if {text!r} cannot be read; write it as updates_per_round=5,10,20")
        if name not in KEYS:
            raise unknown("key of --what-if", name, KEYS)
        swept[name] = [_read(name, value) for value in values.split(",")]
    return [dict(zip(swept, choice, strict=True)) for choice in itertools.product(*swept.values())] if swept else []


def _read(name: str, text: str) -> Any:
    if KEYS[name] is str:
        if text not in ALGORITHMS:
            raise unknown("algorithm", text, ALGORITHMS)
        return text
    try:
        return single(name, int(text), int)
    except ValueError:
        raise UserError(f"--what-if: {name} is {text!r}; it must be a whole number") from None


def plans_of(found: Replay, given: tuple[str, ...], rounds: int) -> tuple[list[tuple[str, Plan]], list[str]]:
    """A plan for every choice, with a label; and why there is none for some: a fleet may be too small for an n."""
    plans: list[tuple[str, Plan]] = []
    refused: list[str] = []
    for choice in choices(given):
        label = ", ".join(f"{name}={value}" for name, value in choice.items())
        try:
            plans.append((label, plan_for(found, choice, rounds)))
        except UserError as error:
            refused.append(f"no plan for {label}: {error}")
    if refused and not plans:
        raise UserError(refused[0])
    return plans, refused


def plan_for(found: Replay, choice: dict[str, Any], rounds: int) -> Plan:
    """So many rounds with other settings, of clients as fast as they were measured."""
    settings: Settings = found.orders.settings
    name = choice.get("algorithm", settings.algorithm)
    training = dataclasses.replace(
        settings.training, **{word: value for word, value in choice.items() if word != "algorithm"}
    )
    total = found.plan.header.num_clients
    setup = Setup(total, training.updates_per_round, training.local_steps, found.orders.seed)
    own = settings.algorithm_settings if name == settings.algorithm else None
    fleet = Fleet(total, found.orders.seed, model_megabytes=found.model_bytes * 1e-6, trace=found.trace)
    plan = Plan.collect(Simulator(algorithm(name)(setup, own), fleet), rounds)
    plan.check()
    return plan
