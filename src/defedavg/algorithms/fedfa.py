"""FedFa: the model is the mean of the latest client models, a sliding window that every arrival moves by one.

Xu, Zhang, Di, Liu, Alharthi, Cao: FedFa: A Fully Asynchronous Training Paradigm for Federated Learning (IJCAI 2024,
arXiv 2404.11015).

    clients start as in FedBuff;  every arrival replaces the oldest entry of the window:
    w[t+1] = (1/W) Σ_{latest W arrivals} (w[v_i] − Δ_i)

Built from descriptions of the paper, in the form in which clients send models. There is no global rate. The sources
do not agree on a window that is not full; here its missing entries are w[0]. Left out: the form with differences, which
adds the mean of the window's last Δ to the model, and secure aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from .dispatching import ConcurrentClients
from .protocol import Assignment, Merge, StateSpec, StateVector, Update
from .setting_checks import check_concurrency
from .setup import Setup

MAX_WINDOW = 10_000


@dataclass(frozen=True, slots=True)
class FedFaSettings:
    """The length of the window, and how many clients train concurrently."""

    window: int = field(default=5, metadata={"help": "client models whose mean is the server's model"})
    concurrency: int = field(default=0, metadata={"help": "clients that train concurrently; 0: all"})

    def __post_init__(self) -> None:
        check_concurrency("fedfa", self.concurrency)
        if not 1 <= self.window <= MAX_WINDOW:
            raise UserError(f"fedfa: window is {self.window}; give a number of models from 1 to {MAX_WINDOW:,}")


class FedFa(ConcurrentClients):
    """Replace the oldest model of the window by the one that arrived."""

    name = "fedfa"
    summary = "asynchronous: every arrival replaces the oldest of the W latest client models, whose mean is the model"
    citation = "Xu et al., IJCAI 2024"
    equation = "w[t+1] = 1/W Σ_{latest W} (w[v_i] − Δ_i)"
    settings_type = FedFaSettings
    uses_updates_per_round = False
    uses_global_lr = False
    weightings = ("uniform",)

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:  # noqa: ARG003 (overrides a hook)
        """Return the models of the window."""
        return (StateSpec("window", settings.window, "model"),)

    def combine(self, buffer: list[Update]) -> Merge:
        """Replace the oldest model of the window, and return its mean."""
        (update,) = buffer
        share = 1.0 / self.settings.window
        oldest = StateVector("window", self.version % self.settings.window)
        kept = Assignment(oldest, ((update.version, 1.0),), ((update, -1.0),))
        past = ((self.version, 1.0), (update.version, share))
        return self.merge([(update, -share)], past, states=((oldest, -share),), after=(kept,))
