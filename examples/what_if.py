"""What if? How the number of updates per round (n) changes speed and staleness, planned without training.

python examples/what_if.py
"""

from defedavg.config import study as config
from defedavg.config.build import make_simulator
from defedavg.planning.plan import Plan
from defedavg.planning.plan_stats import summarise

study = config.study(
    {
        "algorithms": ["fedavg", "fedbuff", "defedavg-iid"],
        "clients": {"num_clients": 100, "slowness": "uniform(1, 5)"},
        "training": {"updates_per_round": [5, 10, 20, 40], "local_steps": 50},
    }
)
print(f"{'setting':34} {'s/round':>8} {'updates/s':>10} {'staleness':>10} {'slowest 1/4':>12}")
for point in study.points():
    simulator = make_simulator(point.settings, seed=0)
    stats = summarise(Plan.collect(simulator, rounds=100), simulator.fleet)
    speed = stats.jobs_merged / stats.seconds
    print(
        f"{point.label:34} {stats.seconds_per_round:8.3f} {speed:10.0f} {stats.staleness_mean:10.1f} "
        f"{stats.participation[-1]:12.2f}"
    )
