"""The registry: one file per algorithm, one line here."""

from __future__ import annotations

from ..errors import UserError, unknown
from .asysg import AsySG
from .defedavg_iid import DeFedAvgIID
from .defedavg_niid import DeFedAvgNIID
from .favano import Favano
from .fedavg import FedAvg
from .fedbuff import FedBuff
from .server import Server, Setup

ALGORITHMS: dict[str, type[Server]] = {
    cls.name: cls for cls in (FedAvg, FedBuff, Favano, AsySG, DeFedAvgIID, DeFedAvgNIID)
}


def algorithm(name: str) -> type[Server]:
    """The server machine of that name."""
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]


def register(kind: type[Server]) -> type[Server]:
    """Make an algorithm of your own known by its name, in this process; also a decorator of its class."""
    if ALGORITHMS.get(kind.name, kind) is not kind:
        raise UserError(f"there is an algorithm {kind.name!r} already; give yours another name")
    ALGORITHMS[kind.name] = kind
    return kind


__all__ = ["ALGORITHMS", "Server", "Setup", "algorithm", "register"]
