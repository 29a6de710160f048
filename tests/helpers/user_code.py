"""A study with an algorithm and a task in Python files of their own."""

from __future__ import annotations

from pathlib import Path

ALGORITHM = '''
from defedavg.algorithms import BufferedRound, register
from defedavg.algorithms.protocol import ClientPolicy, Send


@register
class Mine(BufferedRound):
    """Any n updates are merged; their clients receive the new version."""

    name = "mine"
    summary = "merges any n updates"
    citation = "none"
    equation = "w[t+1] = w[t] - lr/n sum(updates)"
    policy = ClientPolicy()
    state_attributes = ("senders",)

    def __init__(self, setup, settings=None):
        super().__init__(setup, settings)
        self.senders = []

    def start(self):
        return [Send(client, self.version) for client in range(self.setup.num_clients)]

    def returned(self, client):
        super().returned(client)
        return [Send(client, self.version)]

    def on_update(self, update):
        self.senders.append(update.client)
        return super().on_update(update)

    def after_merge(self):
        senders, self.senders = self.senders, []
        return [Send(client, self.version) for client in senders]
'''

TASK = """
import numpy as np
from torch import nn
from defedavg import make_task


def make(config, client):
    rng = np.random.Generator(np.random.Philox(key=int(config["seed"])))
    x = rng.normal(size=(90, 4)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    return make_task(
        model=lambda: nn.Linear(4, 2), train=(x[:60], y[:60]), test=(x[60:], y[60:]), clients=np.split(np.arange(60), 6)
    )
"""

STUDY = """
name = "user-code"
algorithms = ["fedavg", "mine"]
seeds = [0, 1]
plugins = ["algorithm.py"]
[task]
module = "task.py:make"
[training]
updates_per_round = 2
local_steps = 2
[stop]
max_rounds = 10
eval_every_rounds = 2
"""


def write_user_code(folder: Path, plugin: Path | None = None) -> Path:
    """Write the files and return the path of the study; a process can load the algorithm from one file only."""
    if plugin is None:
        (folder / "algorithm.py").write_text(ALGORITHM)
    (folder / "task.py").write_text(TASK)
    (folder / "study.toml").write_text(STUDY.replace("algorithm.py", str(plugin or "algorithm.py")))
    return folder / "study.toml"
