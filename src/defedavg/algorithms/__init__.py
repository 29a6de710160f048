"""The registry: one file per algorithm, one line here."""

from __future__ import annotations

from ..errors import UserError, unknown
from .asysg import AsySG
from .base import ServerMachine, Setup
from .defedavg_iid import DeFedAvgIID
from .defedavg_niid import DeFedAvgNIID
from .favano import Favano
from .fedavg import FedAvg
from .fedbuff import FedBuff

ALGORITHMS: dict[str, type[ServerMachine]] = {
    cls.name: cls for cls in (FedAvg, FedBuff, Favano, AsySG, DeFedAvgIID, DeFedAvgNIID)
}


def algorithm(name: str) -> type[ServerMachine]:
    """The server machine of that name."""
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]


def register(kind: type[ServerMachine]) -> type[ServerMachine]:
    """Make an algorithm of your own known by its name, in this process; also a decorator of its class."""
    if ALGORITHMS.get(kind.name, kind) is not kind:
        raise UserError(f"there is an algorithm {kind.name!r} already; give yours another name")
    ALGORITHMS[kind.name] = kind
    return kind


__all__ = ["ALGORITHMS", "ServerMachine", "Setup", "algorithm", "register"]
