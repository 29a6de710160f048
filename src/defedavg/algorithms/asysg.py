"""AsySG: asynchronous stochastic gradient, one mini-batch gradient per message.

Lian, Huang, Li, Liu: Asynchronous Parallel Stochastic Gradient for Nonconvex Optimization (NeurIPS 2015).

    as soon as n gradients have arrived:  w[t+1] = w[t] − η · (1/n) Σ g

Δ is the gradient itself: there is no local rate. Two machines serve the name. With concurrency = 0 every version is
broadcast and all clients work: DeFedAvg-IID with K = 1. With concurrency = c > 0 exactly c clients work, and whenever
a gradient arrives an idle client, drawn uniformly, starts from the newest version: the dispatching of FedBuff.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .base import ServerMachine
from .defedavg_iid import DeFedAvgIID
from .dispatching import ConcurrentClients
from .protocol import ClientPolicy
from .setting_checks import check_concurrency
from .setup import Setup


@dataclass(frozen=True, slots=True)
class AsySGSettings:
    """How many clients compute gradients."""

    concurrency: int = field(
        default=0, metadata={"help": "clients at work, each drawn when another has answered; 0: all, by broadcasts"}
    )

    def __post_init__(self) -> None:
        check_concurrency("asysg", self.concurrency)


class SingleGradients(ServerMachine):
    """What both machines share: jobs of one step of rate 1."""

    settings_type: ClassVar[type[Any]] = AsySGSettings
    uses_local_lr = False
    uses_local_steps = False

    @classmethod
    def steps_per_job(cls, local_steps: int) -> int:  # noqa: ARG003 (overrides a hook)
        """Return 1: a job computes one gradient."""
        return 1

    @classmethod
    def client_policy(cls, settings: Any) -> ClientPolicy:
        """Return the policy of the machine that serves these settings."""
        return (ConcurrentClients if settings.concurrency else DeFedAvgIID).policy

    @classmethod
    def overlaps_uploads(cls, settings: Any) -> bool:
        """Return whether versions are broadcast; a client that is drawn has answered before."""
        return not settings.concurrency


class AsySG(SingleGradients, DeFedAvgIID):
    """All clients at work; with a concurrency, the constructor returns the machine that dispatches clients."""

    name = "asysg"
    summary = "asynchronous SGD: single gradients, merged n at a time"
    citation = "Lian et al., NeurIPS 2015"
    equation = "w[t+1] = w[t] − η/n Σ g, one step per job"

    def __new__(cls, setup: Setup, settings: AsySGSettings | None = None) -> Any:
        """Return the machine that serves these settings."""
        if settings is not None and settings.concurrency:
            return DispatchedAsySG(setup, settings)
        return super().__new__(cls)


class DispatchedAsySG(SingleGradients, ConcurrentClients):
    """A fixed number of clients at work."""

    name, summary, citation, equation = AsySG.name, AsySG.summary, AsySG.citation, AsySG.equation
