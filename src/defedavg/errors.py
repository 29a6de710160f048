"""The exception and the warnings that are shown to users as a single line, and text for a terminal."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can correct; the message says in one line what is wrong and what to do."""


class CastWarning(UserWarning):
    """Data are converted to another number type; the message says to which, and how to keep theirs."""


class FallbackWarning(UserWarning):
    """A slower way to compute the same is used; the message says why."""


class IgnoredWarning(UserWarning):
    """A part of an input has no meaning here; the message says which part."""


FEW_NAMES = 8
"""With this many known names at most, an error lists them unless one is nearly the unknown name."""


def unknown(kind: str, name: str, known: Iterable[str], listed_by: str = "") -> UserError:
    """Return the error for an unknown name; it suggests the nearest known one.

    If none is near, it lists the known names, or says which command lists them (``listed_by``).
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7 if len(names) <= FEW_NAMES else 0.66)
    if near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"`{listed_by}` lists them" if listed_by else "known: " + ", ".join(names)
    return UserError(f"unknown {kind} {name!r}; {hint}")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular or the plural."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# Control characters (ESC starts commands to a terminal), marks that change the direction of text, separators of lines,
# and surrogates, which stand for bytes of file names that are not UTF-8.
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    """Return text for a terminal: characters that are commands to it, except those to keep, are shown as escapes."""
    return UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(sign: str) -> str:
    if "\udc80" <= sign <= "\udcff":  # a byte that Python could not decode
        return f"\\x{ord(sign) - 0xDC00:02x}"
    return sign.encode("unicode_escape").decode()
