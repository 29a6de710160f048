"""The registry: one file per algorithm, one line here."""

from __future__ import annotations

from ..errors import unknown
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


__all__ = ["ALGORITHMS", "Server", "Setup", "algorithm"]
