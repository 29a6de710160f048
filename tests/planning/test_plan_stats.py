"""What a plan counts: every trained update was merged, every merged update was started, at any moment of a plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import BUILT_IN
from defedavg.planning.plan import Plan
from defedavg.planning.plan_stats import PlanStatsCollector, summarise
from defedavg.planning.records import Job, Round
from defedavg.planning.sparse_simulator import make_simulator_for
from helpers.command_line import call
from helpers.strategies import Case, bounded, case, cases

STUDY = """
name = "counts"
algorithms = {algorithms}
[task]
model = "softmax"
[clients]
num_clients = 20
failure_rate = {failure_rate}
[training]
updates_per_round = 3
local_steps = 2
[stop]
max_rounds = 100
target_accuracy = 0.2
eval_every_rounds = 10
"""


@bounded(150)
@given(st.booleans().flatmap(lambda lossy: cases(lossy=lossy)), st.integers(1, 12))
def test_trained_is_at_most_merged_is_at_most_started(found: Case, rounds: int) -> None:
    plan = found.plan(rounds)
    collector = PlanStatsCollector(plan.header, found.fleet)
    started = merged = trained = 0
    for record in plan.records:
        collector.add(record)
        started += isinstance(record, Job)
        if isinstance(record, Round):
            merged += len(record.merge.updates)
            trained += sum(update.steps >= 1 for update, _ in record.merge.updates)
            stats = collector.stats()
            assert (stats.jobs_started, stats.jobs_merged, stats.jobs_trained) == (started, merged, trained)
            assert trained <= merged <= started


@pytest.mark.parametrize("failure_rate", [0.0, 0.2])
def test_a_run_that_stops_in_the_middle_counts_only_its_own_rounds(failure_rate: float, tmp_path: Path) -> None:
    """The batched executor trains ahead of the stop; the reference executor does not."""
    text = STUDY.format(algorithms=json.dumps(BUILT_IN), failure_rate=failure_rate)
    (tmp_path / "study.toml").write_text(text)
    counts = {}
    for executor in ("batched", "reference"):
        done = call("run", "study.toml", "--json", "--executor", executor, "--out", executor, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        entries = json.loads(done.stdout)
        assert [entry["algorithm"] for entry in entries] == list(BUILT_IN)
        for entry in entries:
            assert entry["status"] == "target", "the test needs runs that stop before their limit"
            assert 0 < entry["updates_trained"] <= entry["updates_started"], entry["label"]
        counts[executor] = [(entry["rounds"], entry["updates_trained"], entry["updates_started"]) for entry in entries]
    assert counts["batched"] == counts["reference"]


@pytest.mark.parametrize("name", ["fedavg", "fedbuff", "defedavg-iid", "defedavg-niid", "favano"])
@pytest.mark.parametrize("detail", ["all", "used"])
def test_models_sent_at_the_start_count_if_the_horizon_is_before_the_first_event(name: str, detail: str) -> None:
    """A message counts in full when it is sent; the first ones arrive after 44 ms."""
    found = case(name, 10, 3)
    sent = []
    for seconds in (0.01, 0.0439):
        simulator = make_simulator_for(found.server(), found.fleet, detail)
        plan = Plan.collect(simulator, 10, seconds)
        plan.check()
        sent.append(summarise(plan, found.fleet).downlink_bytes)
    assert sent == [2.2e6 * (3 if name == "fedavg" else 10)] * 2


@pytest.mark.parametrize("name", ["fedasync", "ringmaster", "ace"])
def test_the_idle_share_is_never_below_zero(name: str) -> None:
    """With infinite links clients always train; sums of their times are rounded."""
    for seed in range(6):
        found = case(name, 10, 3, steps=50, seed=seed, uplink_mbps=math.inf, downlink_mbps=math.inf, model_megabytes=0)
        idle = summarise(found.plan(10), found.fleet).idle_share
        assert idle is not None
        assert math.copysign(1.0, idle) == 1.0
        assert idle < 1e-9
