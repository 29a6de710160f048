"""The exception and the warning that are shown to users as a single line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can correct; the message says in one line what is wrong and what to do."""


class CastWarning(UserWarning):
    """Data are converted to another number type; the message says to which, and how to keep theirs."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown name; it suggests the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(names)
    return UserError(f"unknown {kind} {name!r}; {hint}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
