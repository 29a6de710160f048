"""The transforms that an assignment may name: executors apply them to every value of a vector.

``quantise(bits)``: unbiased stochastic rounding to 2^(bits − 1) − 1 levels of each sign, relative to the largest
absolute value. The draws depend on the seed, the merge and the target alone.
"""

from __future__ import annotations

import re

from ..errors import UserError

MAX_BITS = 52
"""More than this, and float64 could not represent the levels."""


def parse_transform(text: str) -> int | None:
    """Return the bits of ``quantise(bits)``, None for no transform, or raise ``UserError``."""
    if not text:
        return None
    found = re.fullmatch(r"quantise\((\d{1,2})\)", text)
    if found is None or not 2 <= int(found[1]) <= MAX_BITS:
        raise UserError(f"the transform is {text[:40]!r}; write quantise(bits) with 2 to {MAX_BITS} bits")
    return int(found[1])
