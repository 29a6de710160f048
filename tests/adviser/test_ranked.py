"""How candidates that missed the target are shown: as bounds, never as times, and not on the Pareto front."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from defedavg.adviser.advice import advise
from defedavg.adviser.advice_files import advice_json, advice_page, facts, pareto_front
from defedavg.adviser.confidence import TimeInterval
from defedavg.adviser.ranked import MissedRun, RankedCandidate
from defedavg.adviser.recommendation import Advice
from defedavg.adviser.search import INTERRUPTED
from defedavg.config.build import make_plan, make_simulator
from defedavg.jsonio import finite
from defedavg.planning.plan_stats import summarise
from helpers.page_data import page_data

LATE = MissedRun(seed=0, seconds=0.3, bytes=3e6, metric=0.451, first_hit_seconds=None, diverged_at=None)


def candidate(label: str, times: tuple[float, ...], *missed: MissedRun, reached: bool = True) -> RankedCandidate:
    return RankedCandidate(
        label=label,
        algorithm="fedavg",
        values={"training.local_lr": 0.1},
        reached=reached and bool(times),
        time=TimeInterval.of(times) if times else None,
        missed=missed,
        metric=0.6,
        seconds=0.1,
        bytes=None if missed else 1e6,
        worst_decile=None if missed else 0.2,
        staleness=0.0,
        steps_per_second=100.0,
        reason="is slower",
    )


@cache
def real() -> Advice:
    study: dict[str, Any] = {
        "task": {"model": "softmax"},
        "clients": {"num_clients": 6},
        "training": {"updates_per_round": [2], "local_steps": [5], "local_lr": [0.0001, 0.03], "global_lr": [1.0]},
        "stop": {"target_accuracy": 0.3, "max_seconds": 0.5},
    }
    return advise(study, algorithms=["fedavg"], budget_updates=300, seeds=1)


def bytes_sent(advice: Advice, each: RankedCandidate, seconds: float) -> float:
    """Return what a run of a candidate sends, up and down, until its last merge before a time."""
    own = replace(advice, ranking=(each,)).advised_study().points()[0].settings
    rounds = sum(each.time <= seconds for each in make_plan(own, 0, 1000).rounds)
    stats = summarise(make_plan(own, 0, rounds), make_simulator(own, 0).fleet)
    return stats.uplink_bytes + stats.downlink_bytes


def with_ranking(*ranking: RankedCandidate) -> Advice:
    return replace(real(), ranking=ranking)


@pytest.mark.parametrize(
    ("run", "text", "before"),
    [
        (LATE, "not reached by 0.3 s (accuracy 45.1 %)", "the target was "),
        (replace(LATE, first_hit_seconds=0.2), "reached, but not held by 0.3 s (accuracy 45.1 %)", "the target was "),
        (replace(LATE, metric=None, diverged_at=7), "diverged in round 7", ""),
    ],
)
def test_a_missed_run_says_until_when_and_how_far_it_came(run: MissedRun, text: str, before: str) -> None:
    assert run.text("accuracy") == text
    assert run.reason("accuracy") == before + text
    assert candidate("a", (), run).time_text("accuracy") == text


def test_a_metric_of_its_own_is_named_and_is_no_percentage() -> None:
    assert LATE.text("f1") == "not reached by 0.3 s (f1 0.451)"


def test_a_candidate_that_missed_the_target_on_some_seeds_shows_both() -> None:
    found = candidate("a", (0.25,), replace(LATE, seed=4))
    assert found.seeds == 2
    assert found.time_text("accuracy") == "0.25 s on 1 of 2 seeds; on seed 4 not reached by 0.3 s (accuracy 45.1 %)"
    assert candidate("a", (0.25,)).time_text("accuracy") == "0.25 s"


def test_the_bound_is_that_of_the_longest_run_that_did_not_diverge() -> None:
    longer = replace(LATE, seconds=0.4, bytes=4e6)
    assert candidate("a", (), LATE, longer, replace(LATE, seconds=9.0, diverged_at=3)).longest_miss == longer
    assert candidate("a", (), replace(LATE, diverged_at=3)).longest_miss is None
    assert candidate("a", (0.2,)).longest_miss is None


def test_the_advice_stores_what_is_known_of_a_real_run_that_missed() -> None:
    hit, miss = real().ranking
    assert hit.missed == ()
    assert real().hits == 1
    assert not miss.reached
    assert miss.time is None
    (run,) = miss.missed
    assert (run.seed, run.seconds, run.metric) == (0, miss.seconds, miss.metric)
    assert run.bytes == pytest.approx(bytes_sent(real(), miss, run.seconds), rel=0.05)  # the run ended between merges
    assert run.bytes > (hit.bytes or 0.0)
    stored = json.loads(json.dumps(finite(advice_json(real(), {}))))["ranking"]
    assert stored[0]["missed"] == []
    assert stored[1]["missed"][0]["seconds"] == run.seconds
    assert (stored[1]["reached"], stored[1]["time"], stored[1]["bytes"]) == (False, None, None)


def test_the_traffic_is_that_of_a_run_until_the_target_from_its_start_on() -> None:
    training = {"updates_per_round": [2], "local_steps": [5], "local_lr": [0.03], "global_lr": [1.0]}
    study: dict[str, Any] = {
        "task": {"model": "softmax"},
        "clients": {"num_clients": 6},
        "training": training,
        "stop": {"target_accuracy": 0.4, "max_seconds": 0.5},
    }
    advice = advise(study, algorithms=["fedbuff", "defedavg-iid"], budget_updates=300, seeds=1)
    hits = [each for each in advice.ranking if each.time is not None]
    assert {each.algorithm for each in hits} == {"fedbuff", "defedavg-iid"}
    for each in hits:
        assert each.bytes == pytest.approx(bytes_sent(advice, each, each.seconds), rel=1e-9)


def test_a_candidate_that_missed_a_seed_is_not_on_the_pareto_front_and_beats_no_other() -> None:
    slow, lucky = candidate("slow", (0.5,)), candidate("lucky", (0.1,), LATE)
    assert pareto_front((slow, lucky)) == {"slow"}


def test_the_page_has_bounds_instead_of_times_for_what_was_missed() -> None:
    found = with_ranking(candidate("quick", (0.2,)), candidate("late", (), LATE))
    page = page_data(advice_page(found, {}))
    quick, late = page["ranking"]
    assert page["advised"] is True
    assert (quick["missed"], quick["time"], quick["bound_seconds"]) == (False, "0.2 s", None)
    assert (late["missed"], late["time"]) == (True, "not reached by 0.3 s (accuracy 45.1 %)")
    assert (late["seconds_to_target"], late["bound_seconds"], late["bound_bytes"]) == (None, 0.3, 3e6)
    assert dict(facts(found))["candidates"].endswith("raced: 2, of which 1 reached the target")


def test_without_a_hit_nothing_is_advised() -> None:
    found = with_ranking(candidate("late", (), LATE))
    page = page_data(advice_page(found, {}))
    assert page["advised"] is False
    sentence = "no candidate reached 30 %; the best so far, late: not reached by 0.3 s (accuracy 45.1 %)"
    assert page["conclusion"] == found.sentence() == sentence
    line = found.failure() or ""
    assert line.startswith("no candidate reached 30 % within 0.3 s of simulated time, the longest that any was ")
    assert "the best so far, late: not reached by 0.3 s (accuracy 45.1 %); set a lower" in line


@pytest.mark.parametrize(
    ("ended", "words", "remedy"),
    [
        ("no candidate reached the target", "", "stop.max_seconds"),
        ("the budget is spent", "; the budget is spent", "stop.max_seconds, or give a larger --budget"),
        (INTERRUPTED, f"; {INTERRUPTED}", "run the command again without interrupting it"),
    ],
)
def test_the_line_about_a_missed_target_names_a_larger_budget_only_if_it_was_spent(
    ended: str, words: str, remedy: str
) -> None:
    line = replace(with_ranking(candidate("late", (), LATE)), ended=ended).failure() or ""
    assert f"the longest that any was trained{words}; the best so far, late:" in line
    assert line.endswith(remedy)
    assert line.count("no candidate reached") == 1
    assert ("--budget" in line) == (ended == "the budget is spent")


def test_a_leader_that_missed_a_seed_says_so_in_every_text() -> None:
    partly = candidate("partly", (0.25,), replace(LATE, seed=1))
    time = "0.25 s on 1 of 2 seeds; on seed 1 not reached by 0.3 s (accuracy 45.1 %)"
    reached = with_ranking(replace(partly, algorithm=real().best.algorithm, values=real().best.values))
    assert reached.sentence() == f"partly reaches 30 % in {time}"
    text = reached.to_toml()
    assert f"# {reached.sentence()}\n" in text
    tomllib.loads(text)
    not_all = with_ranking(replace(partly, reached=False))
    assert (not_all.failure() or "").startswith("no candidate reached 30 % on all its seeds within 0.3 s of ")
    assert not_all.sentence() == f"no candidate reached 30 % on all its seeds; the best so far, partly: {time}"


def test_the_facts_and_the_page_count_in_the_singular() -> None:
    one = replace(real(), candidates=1, planned=1, updates=1, dropped=(("fedavg K=9", "merges no update within 1 s"),))
    found = dict(facts(one))
    assert found["candidates"].startswith("1, with 1 plan; ")
    assert found["training"].startswith("1 update, ")
    page = page_data(advice_page(one, {}))
    assert page["dropped_note"] == "1 setting refused by an algorithm, dropped without training, or not started."


def test_a_candidate_that_is_as_good_with_fewer_bytes_is_named_beside_the_advice() -> None:
    leader = candidate("a", (0.2, 0.21))
    cheap, dear = replace(leader, label="b", bytes=0.26e6, close=True), replace(leader, label="c", close=True)
    text = with_ranking(leader, dear, cheap).sentence()
    assert text.endswith("(2 seeds); b is not separated from it and sends 0.26 times the bytes")
    slower = replace(cheap, close=False)
    assert with_ranking(leader, dear, slower).sentence().endswith("(2 seeds)")


def test_the_file_of_a_search_without_advice_recommends_nothing() -> None:
    text = with_ranking(candidate("a", (), LATE)).to_toml()
    assert "found, which is no recommendation, for the study" in text
    assert "recommends" not in text
    assert "recommends for the study" in real().to_toml()
