"""A trace of your own devices: a CSV file instead of a distribution; one device leaves for a while.

python examples/own_device_trace.py
"""

import tempfile
from pathlib import Path

from defedavg.config import study as config
from defedavg.config.build import make_simulator
from defedavg.planning.plan import Plan
from defedavg.planning.plan_stats import summarise

DEVICES = """client,step_seconds,up_mbps,down_mbps,leaves_at,returns_at
0,0.002,50,200,,
1,0.003,40,150,,
2,0.004,20,100,10,25
3,0.004,20,100,,
4,0.015,5,40,,
5,0.020,2,20,,
"""

with tempfile.TemporaryDirectory() as folder:
    trace = Path(folder) / "devices.csv"
    trace.write_text(DEVICES)
    study = config.study(
        {
            "algorithms": ["fedavg", "fedbuff", "defedavg-niid"],
            "clients": {"trace": str(trace)},
            "training": {"updates_per_round": 2, "local_steps": 30},
        }
    )
    for point in study.points():
        simulator = make_simulator(point.settings, seed=0)
        plan = Plan.collect(simulator, rounds=100)
        stats = summarise(plan, simulator.fleet)
        print(
            f"{point.label:14} {stats.seconds_per_round:6.2f} s/round, staleness {stats.staleness_mean:.1f}, "
            f"fastest quarter {stats.participation[0]:.2f} and slowest {stats.participation[-1]:.2f} of an equal share"
        )
