"""FADAS: FedBuff with AMSGrad at the server, and a smaller step after a round with a large delay.

Wang, Wang, Li, Zhang, Lin, Chen: FADAS: Towards Federated Adaptive Asynchronous Optimization (ICML 2024).

    clients start as in FedBuff;  after n arrivals:  g = (1/n) Σ Δ,
    m ← β₁·m + (1 − β₁)·g,  v ← β₂·v + (1 − β₂)·g²,  v̂ ← max(v̂, v),  w[t+1] = w[t] − η_t · m / (√v̂ + ε)

η_t = η / τ_max if τ_max, the largest staleness of the round, exceeds τ_c, and η otherwise. This is the form of the
authors' code; their text has min(η, 1/τ_max), which depends on the value of η. β₁, β₂ and ε are server_momentum,
server_beta2 and server_epsilon of [training]. A step changes every weight by about η: set global_lr to about 0.001.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..errors import UserError
from .dispatching import ConcurrentClients
from .protocol import Merge, Update
from .setting_checks import check_concurrency


@dataclass(frozen=True, slots=True)
class FadasSettings:
    """How many clients train concurrently, and which rounds have a smaller step."""

    concurrency: int = field(default=0, metadata={"help": "clients that train concurrently; 0: all"})
    delay_threshold: int = field(
        default=0, metadata={"help": "τ_c: the step is divided by a largest staleness above it; 0: never"}
    )

    def __post_init__(self) -> None:
        check_concurrency("fadas", self.concurrency)
        if self.delay_threshold < 0:
            raise UserError(f"fadas: delay_threshold is {self.delay_threshold}; give a staleness, or 0 for none")


class Fadas(ConcurrentClients):
    """FedBuff whose mean update is the gradient of AMSGrad."""

    name = "fadas"
    summary = "buffered asynchronous: AMSGrad on the mean of n updates, with a smaller step after large delays"
    citation = "Wang et al., ICML 2024"
    equation = "w[t+1] = w[t] − η_t·m/(√v̂ + ε), AMSGrad on 1/n Σ Δ"
    settings_type = FadasSettings
    server_optimizer = "amsgrad"

    def combine(self, buffer: list[Update]) -> Merge:
        """Merge the mean, and divide the step by the largest staleness if that exceeds the threshold."""
        largest = max(self.version - update.version for update in buffer)
        merge = super().combine(buffer)
        late = 0 < self.settings.delay_threshold < largest
        return replace(merge, rate_scale=1.0 / largest) if late else merge
