"""Text as character numbers: one fixed alphabet for all data sets, so that a model fits every one of them."""

from __future__ import annotations

import string
from typing import Final

import numpy as np
from numpy.typing import NDArray

ALPHABET: Final = (
    "\n !\"$&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
)
"""The characters with the numbers 1, 2, …; number 0 is any other character."""
CLASSES: Final = len(ALPHABET) + 1
LENGTH: Final = 80
"""Characters of a sample."""

_NUMBERS: Final = np.zeros(128, np.int64)
_NUMBERS[[ord(sign) for sign in ALPHABET]] = np.arange(1, CLASSES)


def encode(text: str) -> NDArray[np.int64]:
    """Return the number of every character of a text."""
    points = np.frombuffer(text.encode("utf-32-le", "replace"), "<u4")
    return np.where(points < len(_NUMBERS), _NUMBERS[np.minimum(points, len(_NUMBERS) - 1)], 0)


def windows(text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return successive windows of a text, and for each the characters that follow its own; drop an incomplete one."""
    numbers = encode(text)
    count = max(0, (len(numbers) - 1) // LENGTH)
    inputs, targets = (numbers[start : start + count * LENGTH].reshape(count, LENGTH) for start in (0, 1))
    return inputs, targets
