"""An algorithm of your own: asynchronous mixing, which merges every update when it arrives.

After Xie, Koyejo, Gupta: Asynchronous Federated Optimization (2019); the built-in ``fedasync`` has more settings.

    w[t+1] = (1 − a)·w[t] + a·(w[τ] − Δ),   a = mixing / sqrt(1 + staleness)

python examples/own_algorithm.py compares it with FedAvg; own_task.toml uses it as a plugin.
"""

from dataclasses import dataclass, field

from defedavg import UserError, simulate
from defedavg.algorithms import ServerMachine, register
from defedavg.algorithms.base import Actions
from defedavg.algorithms.protocol import ClientPolicy, Send, Update


@dataclass(frozen=True, slots=True)
class AsyncMixingSettings:
    """The share of the server's model that an update replaces."""

    mixing: float = field(default=0.5, metadata={"help": "share of an update without staleness, above 0 and at most 1"})


@register
class AsyncMixing(ServerMachine):
    """Every update is a round; only its sender receives the new version."""

    name = "async-mixing"
    summary = "asynchronous: every update is merged when it arrives, with a weight that decreases with its staleness"
    citation = "after Xie, Koyejo, Gupta, 2019"
    equation = "w[t+1] = (1 − a)·w[t] + a·(w[τ] − Δ)"
    policy = ClientPolicy()
    settings_type = AsyncMixingSettings
    uses_global_lr = False

    def check_setup(self) -> None:
        super().check_setup()
        if self.setup.updates_per_round != 1:
            raise UserError("async-mixing merges one update at a time; set training.updates_per_round to 1")

    def start(self) -> Actions:
        return [Send(client, self.version) for client in range(self.setup.num_clients)]

    def returned(self, client: int) -> Actions:
        super().returned(client)
        return [Send(client, self.version)]

    def on_update(self, update: Update) -> Actions:
        a = self.settings.mixing / (1 + self.version - update.version) ** 0.5
        merge = self.merge([(update, -a)], past=[(self.version, 1 - a), (update.version, a)])
        return [merge, Send(update.client, self.version)]


if __name__ == "__main__":
    common = {"task.model": "softmax", "clients.num_clients": 20, "training.local_steps": 10, "stop.max_seconds": 4.0}
    for algorithm, n in (("fedavg", 10), ("async-mixing", 1)):
        result = simulate(algorithm, settings={**common, "training.updates_per_round": n, "stop.eval_every_rounds": 20})
        print(f"{algorithm:13} {result.rounds} rounds in {result.seconds:.2f} s, best {result.best_accuracy:.1%}")
