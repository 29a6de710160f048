"""What a plan counts: every trained update was merged, every merged update was started, at any moment of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import BUILT_IN
from defedavg.planning.plan_stats import PlanStatsCollector
from defedavg.planning.records import Job, Round
from helpers.command_line import call
from helpers.strategies import Case, bounded, cases

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
