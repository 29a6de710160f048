"""Hypothesis strategies for damaged input: values of the wrong kind, JSON with replaced parts, and changed bytes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

NUMBERS = (0, -1, 1, 2, 3, 2**31, 2**63, -(2**63), 10**20, 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, math.inf, math.nan)
TEXTS = ("", " ", "0", "../..", "/dev/null", "a\x1b[31mb", "\u202ename", "x" * 300, "é\n", "nan", "[", "null", "%s {0}")


def scalars() -> st.SearchStrategy[Any]:
    """Return values that a file can contain: absurd numbers, hostile texts, flags."""
    return st.sampled_from([*NUMBERS, *TEXTS, True, False]) | st.integers() | st.floats() | st.text(max_size=8)


def values() -> st.SearchStrategy[Any]:
    """Return ``scalars``, null, and short lists and objects of them."""
    leaf = scalars() | st.none()
    return leaf | st.lists(leaf, max_size=3) | st.dictionaries(st.text(max_size=5), leaf, max_size=2)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, item in items for place in _places(item, (*path, name)))]


@st.composite
def changed_json(draw: st.DrawFn, found: Any) -> Any:
    """Return a JSON value in which one to three parts, at any depth, were replaced, removed or repeated."""
    value = copy.deepcopy(found)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(_places({"": value})[1:]))
        whole = holder = {"": value}
        for name in parents:
            holder = holder[name]
        match draw(st.sampled_from(["replace", "remove", "repeat"])):
            case "remove" if parents:
                del holder[last]
            case "repeat" if isinstance(holder, list):
                holder.insert(last, copy.deepcopy(holder[last]))
            case _:
                holder[last] = draw(values())
        value = whole[""]
    return value


@st.composite
def changed_json_lines(draw: st.DrawFn, lines: Sequence[str]) -> bytes:
    """Return lines of JSON of which some were changed, removed, repeated or moved."""
    kept = list(lines)
    for _ in range(draw(st.integers(1, 3))):
        if not kept:
            break
        place = draw(st.integers(0, len(kept) - 1))
        match draw(st.sampled_from(["change", "remove", "repeat", "move", "cut"])):
            case "change":
                kept[place] = json.dumps(draw(changed_json(json.loads(lines[min(place, len(lines) - 1)]))))
            case "remove":
                del kept[place]
            case "repeat":
                kept.insert(place, kept[place])
            case "move":
                kept.insert(draw(st.integers(0, len(kept) - 1)), kept.pop(place))
            case "cut":
                kept = [*kept[:place], kept[place][: len(kept[place]) // 2]]
    return "".join(line + "\n" for line in kept).encode("utf-8", "surrogatepass")


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Return bytes of which one to four ranges were overwritten, inserted or removed; sometimes any bytes at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 1, 1, 2, 30, len(data)]))
        new = draw(st.binary(max_size=6) | st.sampled_from([b"\0", b"\xff", b"-", b"e999", b'"', b"\n", b",", b"inf"]))
        data = data[:start] + new + data[start + length :]
    return data
