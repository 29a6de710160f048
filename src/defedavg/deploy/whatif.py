"""What-if plans: simulate the clients that a log measured, with other settings."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from ..algorithms import ALGORITHMS, algorithm
from ..config.build import make_setup
from ..config.study import single
from ..errors import UserError, unknown
from ..planning.plan import Plan
from ..planning.simulator import Simulator
from .replay import Replay

KEYS: dict[str, type[Any]] = {"algorithm": str, "updates_per_round": int, "local_steps": int}


def parse_choices(given: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return every combination of the values in ``key=value,value``."""
    swept: dict[str, list[Any]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise UserError(f"--what-if {text!r} cannot be read; write it as updates_per_round=5,10,20")
        if name not in KEYS:
            raise unknown("key of --what-if", name, KEYS)
        swept[name] = [_parse_value(name, value) for value in values.split(",")]
    return [dict(zip(swept, choice, strict=True)) for choice in itertools.product(*swept.values())] if swept else []


def _parse_value(name: str, text: str) -> Any:
    if KEYS[name] is str:
        if text not in ALGORITHMS:
            raise unknown("algorithm", text, ALGORITHMS)
        return text
    try:
        return single(name, int(text), int)
    except ValueError:
        raise UserError(f"--what-if: {name} is {text!r}; it must be a whole number") from None


def whatif_plans(replay: Replay, given: tuple[str, ...], rounds: int) -> tuple[list[tuple[str, Plan]], list[str]]:
    """Return a labelled plan for every choice, and one line for each choice that the clients cannot run."""
    plans: list[tuple[str, Plan]] = []
    impossible: list[str] = []
    for choice in parse_choices(given):
        label = ", ".join(f"{name}={value}" for name, value in choice.items())
        try:
            plans.append((label, _plan_for(replay, choice, rounds)))
        except UserError as error:
            impossible.append(f"no plan for {label}: {error}")
    if impossible and not plans:
        raise UserError(impossible[0])
    return plans, impossible


def model_error(replay: Replay) -> tuple[float, float] | None:
    """Return the seconds per round that a simulation with the logged setting predicts, and those measured.

    None: the run has no two merges, or the clients that were measured cannot run its setting without the others.
    """
    rounds = replay.plan.rounds
    if len(rounds) < 2:
        return None
    try:
        predicted = _plan_for(replay, {}, len(rounds)).rounds
    except UserError:
        return None
    return (predicted[-1].time / len(predicted), rounds[-1].time / len(rounds)) if predicted else None


def _plan_for(replay: Replay, choice: dict[str, Any], rounds: int) -> Plan:
    settings = replay.config.settings
    name = choice.get("algorithm", settings.algorithm)
    training = dataclasses.replace(settings.training, **{k: v for k, v in choice.items() if k != "algorithm"})
    own = settings.algorithm_settings if name == settings.algorithm else None
    chosen = dataclasses.replace(settings, algorithm=name, training=training, algorithm_settings=own)
    kind = algorithm(name)
    server = kind(make_setup(chosen, replay.config.seed, shares=replay.shares), chosen.algorithm_settings)
    megabytes = replay.fleet.model_megabytes * kind.message_bits(chosen.algorithm_settings) / 32
    plan = Plan.collect(Simulator(server, dataclasses.replace(replay.fleet, model_megabytes=megabytes)), rounds)
    plan.check()
    return plan
