"""Errors for settings that cannot be read: a forgotten table, and names without quotes in a list."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable

from ..errors import UserError, unknown
from .settings import setting_names


def unknown_key(name: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown key outside of all tables; it suggests the tables that have such a key."""
    within = sorted(each for each in setting_names() if each.partition(".")[2] == name)
    if not within:
        return unknown("key", name, known)
    if len(within) == 1:
        return UserError(f"unknown key {name!r}; did you mean {within[0]!r}?")
    tables = ", ".join(each.partition(".")[0] for each in within)
    return UserError(f"unknown key {name!r}; write it as TABLE.{name}, with one of the tables {tables}")


def plain_text(name: str, text: str) -> str:
    """Return a value that is not TOML as plain text; refuse a list, which would become one name."""
    if not (text.startswith("[") and text.endswith("]")):
        return text
    items = [item.strip() for item in text[1:-1].split(",") if item.strip()]
    right = "[" + ", ".join(item if _is_toml(item) else f"'{item}'" for item in items) + "]"
    if not _is_toml(right):
        raise UserError(f"{name} is {text!r}, which is not a list of TOML")
    raise UserError(f'{name} is {text!r}; names in a list need quotes: --set "{name}={right}"')


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return False
    return True
