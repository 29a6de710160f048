"""The state of a server machine as a JSON record.

Values that JSON does not have are tagged: {"dict": [[key, value], …]}, {"set": […]}, and so on. The order of
dictionaries is kept, because later decisions may depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from .client_pool import ClientPool
from .protocol import Update


def encode(value: Any) -> Any:
    """Return a value as JSON values, or raise ``TypeError``."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, set):
        return {"set": sorted(value)}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encode(name), encode(item)] for name, item in value.items()]}
    if isinstance(value, Update):
        return {"update": [value.client, value.index, value.version, value.steps]}
    if isinstance(value, ClientPool):
        return {"pool": value.state()}
    raise TypeError(f"a value of type {type(value).__name__} cannot be saved")


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(map(decode, items)),
    "set": set,
    "dict": lambda items: {decode(name): decode(item) for name, item in items},
    "counter": lambda items: Counter({decode(name): decode(item) for name, item in items}),
    "update": lambda numbers: Update(*numbers),
    "pool": ClientPool.restored,
}


def decode(found: Any) -> Any:
    """Return the value that ``encode`` was given."""
    if isinstance(found, list):
        return [decode(item) for item in found]
    if isinstance(found, dict):
        ((kind, inner),) = found.items()
        return _DECODERS[kind](inner)
    return found
