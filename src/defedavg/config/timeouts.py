"""How long a server waits for a client before it draws another: the setting, or a time that suits the fleet."""

from __future__ import annotations

import numpy as np

from ..algorithms import algorithm
from ..errors import UserError
from ..planning.devices import TIMEOUT_FACTOR, TIMEOUT_SHARE, Fleet
from .settings import Settings

AUTOMATIC = f"{TIMEOUT_FACTOR:g} times what {100 * TIMEOUT_SHARE:g} % of the clients need"


def answer_timeout(settings: Settings, fleet: Fleet) -> float | None:
    """Return how long the server of a run waits for a client before it draws another; None: without limit.

    It may be shorter than the slowest client needs, which is then replaced.
    """
    kind = algorithm(settings.algorithm)
    steps, given = kind.steps_per_job(settings.training.local_steps), settings.training.timeout_seconds
    if not given:
        return fleet.automatic_timeout(steps)
    held = kind.client_policy(settings.algorithm_settings).hold_until_requested  # the update may be finished already
    least = float(np.min(fleet.up_times if held else fleet.answer_times(steps)))
    if given < least:
        raise UserError(
            f"training.timeout_seconds is {given:g}, but the fastest client needs {least:.4g} s to answer; give more"
        )
    return given
