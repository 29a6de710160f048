"""A model and data of your own: a small network learns two spirals, partitioned among 40 clients.

python examples/own_model_and_data.py
"""

import numpy as np
from torch import nn

from defedavg import make_task, simulate
from defedavg.tasks import dirichlet

rng = np.random.Generator(np.random.Philox(key=0))
angle = np.sqrt(rng.random(3000)) * 2 * np.pi
label = rng.integers(0, 2, 3000)
rotated = angle + np.pi * label
x = np.stack([angle * np.cos(rotated), angle * np.sin(rotated)], axis=1) / 3 + rng.normal(0, 0.05, (3000, 2))
x = x.astype("float32")

task = make_task(
    name="spirals",
    model=lambda: nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)),
    train=(x[:2500], label[:2500]),
    test=(x[2500:], label[2500:]),
    clients=dirichlet(label[:2500], num_clients=40, alpha=1.0, seed=0),
)
settings = {
    "training.updates_per_round": 8,
    "training.local_steps": 20,
    "training.local_lr": 0.3,
    "stop.max_rounds": 80,
    "stop.eval_every_rounds": 10,
}
for algorithm in ("fedavg", "defedavg-niid"):
    result = simulate(algorithm, task=task, settings=settings)
    print(f"{algorithm:14} {result.rounds} rounds, {result.seconds:5.1f} simulated s, best {result.best_accuracy:.1%}")
