"""FedAvg: synchronous rounds of sampled clients.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data (AISTATS 2017); with a global rate as in Karimireddy et al.: SCAFFOLD (ICML 2020).

    draw n clients;  each starts from w[t];  when all have answered:  w[t+1] = w[t] − η · (1/n) Σ Δ
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .base import Actions, SampledRound
from .protocol import ClientPolicy, Send, ServerAction, Update


@dataclass(frozen=True, slots=True)
class FedAvgSettings:
    """How FedAvg samples clients."""

    replacement: bool = field(default=True, metadata={"help": "draw with replacement: a client may count twice"})


class FedAvg(SampledRound):
    """All sampled clients start from the same version; the slowest one sets the duration of the round."""

    name = "fedavg"
    summary = "synchronous: n sampled clients start from one version, the round waits for the slowest"
    citation = "McMahan et al., AISTATS 2017"
    equation = "w[t+1] = w[t] − η/n Σ Δ"
    policy = ClientPolicy()
    settings_type: ClassVar[type[Any]] = FedAvgSettings

    def start(self) -> Actions:
        """Open the first round."""
        return self.open_round()

    def with_replacement(self) -> bool:
        """Return the setting."""
        return bool(self.settings.replacement)

    def invite(self, client: int) -> ServerAction:
        """Send the newest version."""
        return Send(client, self.version)

    def accepts(self, update: Update) -> bool:
        """Accept only updates that start from the newest version."""
        return update.version == self.version
