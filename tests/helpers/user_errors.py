"""The one line of a ``UserError``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from defedavg.errors import UserError


def line_of(act: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)
