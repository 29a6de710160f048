"""What if? How the number of updates in a round (n) changes speed and staleness, planned without training anything.

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
    timeline = make_simulator(point.settings, seed=0)
    found = summarise(Plan.collect(timeline, rounds=100), timeline.fleet)
    speed = found.jobs_merged / found.seconds
    print(
        f"{point.label:34} {found.seconds_per_round:8.3f} {speed:10.0f} {found.staleness_mean:10.1f} "
        f"{found.participation[-1]:12.2f}"
    )
