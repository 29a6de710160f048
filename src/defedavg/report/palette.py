"""The look of an algorithm: one colour, line and marker, keyed by its name, in figures, pages, live view and terminal.

A further setting of the same algorithm is a shade of its colour; after all shades, another marker and line.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeAlias

Look: TypeAlias = dict[str, Any]

_BLACK = "#000000"
_DARK_THEME_BLACK = "#e6e6e6"

# Okabe and Ito's colours without yellow, which is too light for a line.
_LOOKS: dict[str, tuple[str, Any, str]] = {
    "fedavg": (_BLACK, (0, (5, 1.6)), "s"),
    "fedbuff": ("#009E73", (0, (5, 1.4, 1.2, 1.4)), "^"),
    "favano": ("#CC79A7", (0, (3, 1.2)), "v"),
    "asysg": ("#E69F00", (0, (1.4, 1.1)), "D"),
    "defedavg-iid": ("#0072B2", "-", "o"),
    "defedavg-niid": ("#D55E00", "-", "X"),
    # Paul Tol's muted colours; lines and markers tell apart what is close in colour.
    "fedasync": ("#332288", "-", "P"),
    "delay-adaptive-sgd": ("#999933", (0, (5, 1.6)), "<"),
    "ringmaster": ("#661100", (0, (3, 1.2)), ">"),
    "mifa": ("#44AA99", (0, (5, 1.6)), "p"),
    "ca2fl": ("#117733", "-", "h"),
    "ace": ("#AA4499", "-", "*"),
    "area": ("#6699CC", (0, (5, 1.4, 1.2, 1.4)), "d"),
    "quafl": ("#CC6677", (0, (1.4, 1.1)), "s"),
    "asofed": ("#7A6C5D", "-", "^"),
    "fadas": ("#888888", (0, (3, 1.2)), "o"),
    "fedfa": ("#B58900", (0, (5, 1.4, 1.2, 1.4)), "D"),
}
_OTHER_COLOURS = ("#56B4E9", "#8C6D31", "#882255")
_OTHER_MARKERS = ("P", "<", ">", "p", "h", "*", "d")
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.1)), (0, (5, 1.4, 1.2, 1.4)))

# Plotly's names of matplotlib's markers.
_SYMBOLS = {
    "s": "square", "^": "triangle-up", "v": "triangle-down", "D": "diamond", "o": "circle", "X": "x", "P": "cross",
    "<": "triangle-left", ">": "triangle-right", "p": "pentagon", "h": "hexagon", "*": "star", "d": "diamond-tall",
}  # fmt: skip
_MARKERS = tuple(_SYMBOLS)
SHADES = 5  # of one colour that a reader can tell apart


def tint(colour: str, share: float) -> str:
    """Mix a colour with white (``share`` above zero) or with black (below)."""
    other = 255.0 if share > 0 else 0.0
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (other - part) * abs(share)):02x}" for part in parts)


def look(algorithm: str, variant: int = 0) -> Look:
    """Return the line style of an algorithm, for matplotlib; every ``variant`` of its settings differs."""
    code = zlib.crc32(algorithm.encode("utf-8", "replace"))
    other = (_OTHER_COLOURS[code % len(_OTHER_COLOURS)], "-", _OTHER_MARKERS[code // 7 % len(_OTHER_MARKERS)])
    colour, line, marker = _LOOKS.get(algorithm, other)
    turn, shade = divmod(variant, SHADES)
    if shade and colour == _BLACK:  # black has only lighter shades
        colour = tint(colour, 1 - 0.6**shade)
    elif shade:
        step = (shade + 1) // 2
        colour = tint(colour, 1 - 0.55**step if shade % 2 else 0.6**step - 1)
    if turn:
        marker = _MARKERS[(_MARKERS.index(marker) + turn) % len(_MARKERS)]
        line = _LINES[turn % len(_LINES)]
    return {"color": colour, "linestyle": line, "marker": marker, "markerfacecolor": "white" if shade % 2 else colour}


def looks(names: Iterable[tuple[str, str]]) -> dict[str, Look]:
    """Return the look of every label, given as (algorithm, label): its variants are counted in this order."""
    styles: dict[str, Look] = {}
    variants: Counter[tuple[str, str]] = Counter()
    for algorithm, label in names:
        if label not in styles:
            first = look(algorithm)
            key = first["color"], first["marker"]  # two algorithms of plugins may have the same look
            styles[label] = look(algorithm, variants[key])
            variants[key] += 1
    return styles


def page_look(style: Look) -> dict[str, str]:
    """Return a look for a page: the colours of the light and the dark theme, and Plotly's dash and symbol."""
    dash = style["linestyle"]
    pixels = "solid" if dash == "-" else ",".join(f"{2.2 * part:.3g}px" for part in dash[1])
    symbol = _SYMBOLS[style["marker"]] + ("-open" if style["markerfacecolor"] == "white" else "")
    colour = style["color"]
    dark = _DARK_THEME_BLACK if colour == _BLACK else tint(colour, 0.3)
    return {"light": colour, "dark": dark, "dash": pixels, "symbol": symbol}


def terminal_style(algorithm: str) -> str:
    """Return the colour of an algorithm for a terminal, whose background is unknown: black is its own text colour."""
    colour = str(look(algorithm)["color"])
    return "default" if colour == _BLACK else colour
