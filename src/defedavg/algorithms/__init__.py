"""DECIDE: one file per algorithm. Each is a state machine without clock, socket, tensor or global randomness.

An algorithm from outside the package is registered by an entry point of the group ``defedavg.algorithms``, by a plugin
file (``plugins = ["my_algorithm.py"]`` in a study, or ``--plugin``), or by calling ``register``. Its class attributes
are checked here; ``planning.rehearsal`` checks its decisions when a run starts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from ..compat import renamed_names
from ..errors import UserError
from ..registry import Registry
from .ace import Ace
from .area import Area
from .asofed import AsoFed
from .asysg import AsySG
from .base import BufferedRound, SampledRound, ServerMachine
from .ca2fl import CA2FL
from .defedavg_iid import DeFedAvgIID
from .defedavg_niid import DeFedAvgNIID
from .delay_adaptive import DelayAdaptiveSGD
from .fadas import Fadas
from .favano import Favano
from .fedasync import FedAsync
from .fedavg import FedAvg
from .fedbuff import FedBuff
from .fedfa import FedFa
from .mifa import Mifa
from .protocol import SERVER_OPTIMIZERS, WEIGHTINGS, ClientPolicy
from .quafl import Quafl
from .ringmaster import Ringmaster
from .setup import Setup

__all__ = ["ALGORITHMS", "BufferedRound", "SampledRound", "ServerMachine", "Setup", "algorithm", "register"]
__getattr__ = renamed_names(__name__)

RESERVED = frozenset({"task", "clients", "training", "stop", "deploy", "name", "algorithms", "seeds", "plugins"})
"""Keys of a study: an algorithm's settings are a table of its own name beside them."""


def _check(name: str, kind: type[ServerMachine]) -> None:
    if not (isinstance(kind, type) and issubclass(kind, ServerMachine)):
        raise UserError(f"algorithm {name!r} is {kind!r}; register a subclass of defedavg.algorithms.ServerMachine")
    where = f"algorithm {name!r} ({kind.__qualname__})"
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]{0,49}", name) or name in RESERVED:
        raise UserError(f"{where}: the name must be lower-case letters, digits, '-' and '_', and not a key of a study")
    for word in ("name", "summary", "citation", "equation"):
        if not isinstance(getattr(kind, word, None), str):
            raise UserError(f"{where} has no class attribute {word!r}; set it to a string")
    if kind.name != name:
        raise UserError(f"{where} calls itself {kind.name!r}; register it under that name")
    if not isinstance(getattr(kind, "policy", None), ClientPolicy):
        raise UserError(f"{where} has no class attribute 'policy'; set it to a ClientPolicy")
    if type(kind.past_versions) is not int or kind.past_versions < 0:
        raise UserError(f"{where}: past_versions is {kind.past_versions!r}; set it to a whole number of zero or more")
    _check_state(where, kind)
    _check_settings(where, kind.settings_type)


def _check_state(where: str, kind: type[ServerMachine]) -> None:
    for word in ("job_start", "correction"):
        terms = getattr(kind, word)
        if not isinstance(terms, tuple) or not all(map(_is_term, terms)) or (word == "job_start" and not terms):
            example = '(("model", 1.0),)'
            raise UserError(f"{where}: {word} is {terms!r:.60}; set it to pairs of a name and a number: {example}")
    for word, value, known, how in (
        ("server_optimizer", (kind.server_optimizer,), tuple(SERVER_OPTIMIZERS), "one of"),
        ("weightings", kind.weightings, WEIGHTINGS, "a tuple of"),
    ):
        if not (isinstance(value, tuple) and value and all(name in known for name in value)):
            shown = ", ".join(map(repr, known))
            raise UserError(f"{where}: {word} is {getattr(kind, word)!r:.60}; set it to {how} {shown}")


def _is_term(term: object) -> bool:
    if not (isinstance(term, tuple) and len(term) == 2 and isinstance(term[0], str)):
        return False
    return type(term[1]) in (int, float) and -math.inf < term[1] < math.inf


def _check_settings(where: str, settings: type[Any]) -> None:
    if not (dataclasses.is_dataclass(settings) and isinstance(settings, type)):
        raise UserError(f"{where}: settings_type must be a frozen dataclass")
    for item in dataclasses.fields(settings):
        if type(item.default) not in (int, float, str, bool):
            raise UserError(f"{where}: setting {item.name!r} needs a default that is a number, a string or a bool")


ALGORITHMS: Registry[type[ServerMachine]] = Registry("algorithm", "defedavg.algorithms", _check)

BUILT_IN = tuple(
    ALGORITHMS.register(kind.name, kind).name
    for kind in (
        *(FedAvg, FedBuff, Favano, AsySG, DeFedAvgIID, DeFedAvgNIID),
        *(FedAsync, DelayAdaptiveSGD, Ringmaster, Mifa, CA2FL, Ace),
        *(Area, Quafl, AsoFed, Fadas, FedFa),
    )
)


def algorithm(name: str) -> type[ServerMachine]:
    """Return the server machine of that name."""
    return ALGORITHMS.find(name)


def register(kind: type[ServerMachine]) -> type[ServerMachine]:
    """Register an algorithm under its ``name`` in this process; use it as a decorator of the class."""
    return ALGORITHMS.register(getattr(kind, "name", getattr(kind, "__name__", repr(kind))), kind)
