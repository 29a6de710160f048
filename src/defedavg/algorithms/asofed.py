"""ASO-Fed: the server replaces the copy of a client's model in its weighted mean whenever that client answers.

Chen, Ning, Slawski, Rangwala: Asynchronous Online Federated Learning for Edge Devices with Non-IID Data (IEEE Big Data
2020), core rule of the server.

    all clients train;  when client k answers:  w[t+1] = w[t] − (m_k/m)·(w_k − (w[v] − Δ_k)),  w_k ← w[v] − Δ_k

w_k is the last model of client k, w[0] before its first answer, and m_k/m its share of all samples with
training.weighting = "samples", 1/N otherwise. There is no global rate. Left out: the feature step of the server, an
attention over the weights of the first layer that is not linear; the local gradient mixed with the last one; samples
that arrive during training. The proximal term of the clients is a setting of [training] and is not set here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .area import Area
from .setting_checks import check_concurrency


@dataclass(frozen=True, slots=True)
class AsoFedSettings:
    """How many clients train concurrently."""

    concurrency: int = field(default=0, metadata={"help": "clients that train concurrently; 0: all"})

    def __post_init__(self) -> None:
        check_concurrency("asofed", self.concurrency)


class AsoFed(Area):
    """AREA with one update per merge, and with clients that may be weighted by their samples."""

    name = "asofed"
    summary = "asynchronous: every arrival replaces that client's model in the weighted mean of all clients' models"
    citation = "Chen et al., IEEE Big Data 2020"
    equation = "w[t+1] = w[t] − m_k/m (w_k − (w[v] − Δ_k)), w_k = last w[v] − Δ_k"
    settings_type = AsoFedSettings
    uses_updates_per_round = False
    weightings = ("uniform", "samples")
