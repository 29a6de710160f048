"""The number of jobs that can be trained at once is that of an executor which trains all ready jobs at each step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from defedavg.planning.plan import Plan
from defedavg.planning.plan_stats import summarise
from defedavg.planning.ready_jobs import ReadyJobs
from helpers.strategies import Case, bounded, case, cases


def batches(plan: Plan) -> list[int]:
    """Return the sizes of the batches of an executor that trains everything it can, merges, and repeats."""
    newest = 0
    sizes: list[int] = []
    waiting = [(round_, update) for round_ in plan.rounds for update, _ in round_.merge.updates if update.steps]
    while True:
        untrained = {round_.merge.version for round_, _ in waiting}
        while newest < len(plan.rounds) and newest + 1 not in untrained:
            newest += 1
        if not waiting:
            return sizes
        sizes.append(sum(update.version <= newest for _, update in waiting))
        waiting = [pair for pair in waiting if pair[1].version > newest]


@bounded(100)
@given(cases(), st.integers(0, 12))
def test_the_limit_is_that_of_the_definition(found: Case, rounds: int) -> None:
    plan = found.plan(rounds)
    ready = ReadyJobs()
    for record in plan.rounds:
        ready.add(record)
    sizes = batches(plan)
    assert (ready.jobs, ready.batches, ready.most) == (sum(sizes), len(sizes), max(sizes, default=0))


def test_fedavg_trains_one_round_at_a_time() -> None:
    found = case("fedavg", 12, 4, seed=3)
    stats = summarise(found.plan(100), found.fleet)  # more batches than the collector keeps sizes of
    assert stats.batches_least == 100
    assert stats.ready_jobs_mean == stats.jobs_trained / 100
    assert stats.ready_jobs_most == 4
