"""The one line of a ``UserError``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from defedavg.errors import UserError


def line_of(act: Callable[[], object]) -> str:
    """Return the message of the ``UserError`` that a call raises; it must be one line."""
    with pytest.raises(UserError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)
