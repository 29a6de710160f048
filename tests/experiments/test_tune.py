"""The search for rates: what is dropped when, what is best, and what is kept."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from defedavg.config import study as config
from defedavg.config.unused_settings import unused_settings
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import RunEvaluated, RunFinished
from defedavg.experiments.tune import PairOutcome, Tuning, pairs_of, score
from defedavg.experiments.tuned_study import Decision
from defedavg.experiments.tuning_folder import TuningFolder
from defedavg.report.seed_figures import outcomes, over_seeds, record_of
from defedavg.report.tables import grouped
from defedavg.runstore.reader import read_entry
from helpers.command_line import call, refuse
from helpers.rate_searches import BASE, study

BLOCKING = {**BASE["clients"], "upload": "blocking"}


def tuned(chosen: config.Study, wide: tuple[float, ...], near: tuple[float, ...], *rungs: float) -> Tuning:
    found = Tuning(pairs_of(chosen.points(), wide, near), chosen.seeds, ComputeConfig(), rungs)
    assert found.run(lambda event: None) is True
    return found


def test_the_grid_has_the_rates_that_an_algorithm_has() -> None:
    chosen = study(algorithms=["defedavg-iid", "favano", "asysg"])
    pairs = [
        (p.point.settings.algorithm, p.global_lr, p.local_lr)
        for p in pairs_of(chosen.points(), (0.1, 1.0), (0.01, 0.1))
    ]
    assert pairs == [
        ("defedavg-iid", 0.1, 0.01), ("defedavg-iid", 0.1, 0.1),
        ("defedavg-iid", 1.0, 0.01), ("defedavg-iid", 1.0, 0.1),
        ("favano", None, 0.01), ("favano", None, 0.1), ("asysg", 0.1, None), ("asysg", 1.0, None),
    ]  # fmt: skip


def test_without_halving_every_pair_is_run_to_its_end() -> None:
    whole = tuned(study(), (0.1, 1.0), (0.001, 0.05))
    assert {r["status"] for r in whole.records()} <= {"target", "max_rounds"}
    (best,) = whole.best()
    assert score(whole.outcomes[best].values()) == min(score(own.values()) for own in whole.outcomes.values())


def test_halving_finds_a_good_pair_with_less_work() -> None:
    grid = (0.1, 1.0), (0.0001, 0.001, 0.05, 0.1)
    chosen = study(clients=BLOCKING)
    whole, halved = tuned(chosen, *grid), tuned(chosen, *grid, 0.125, 0.25, 0.5)
    ranked = sorted(whole.pairs, key=lambda pair: score(whole.outcomes[pair].values()))
    assert halved.best()[0] in ranked[:2]
    assert sum(r["rounds"] for r in halved.records()) < sum(r["rounds"] for r in whole.records())
    dropped = [r for r in halved.records() if r["status"] == "dropped"]
    assert len({r["label"] for r in dropped}) >= 4
    assert all(r["rounds"] < 40 for r in dropped)
    # What both ran to the end is the same.
    ends = {(r["label"], r["seed"]): r for r in whole.records()}
    for record in halved.records():
        if record["status"] != "dropped":
            assert record == ends[record["label"], record["seed"]]


def test_seeds_of_a_pair_are_dropped_together_and_settings_compete_apart() -> None:
    chosen = study(training={**BASE["training"], "updates_per_round": [4, 8]}, clients=BLOCKING)
    found = tuned(chosen, (1.0,), (0.0001, 0.01, 0.05, 0.1), 0.2)
    for pair in found.pairs:
        states = [o.status == "dropped" for o in found.outcomes[pair].values()]
        assert all(states) or not any(states)
    for n in (4, 8):
        own = [p for p in found.pairs if dict(p.point.swept)["training.updates_per_round"] == n]
        assert sum(any(o.status == "dropped" for o in found.outcomes[p].values()) for p in own) == 2
    assert len(found.best()) == 2


def test_a_pair_that_diverges_does_not_hold_up_the_others() -> None:
    found = tuned(study(task={"model": "mlp"}), (1.0,), (0.05, 1e30), 0.25, 0.5)
    status = {p.local_lr: {o.status for o in found.outcomes[p].values()} for p in found.pairs}
    assert status[1e30] == {"diverged"}
    assert status[0.05] <= {"target", "max_rounds"}
    assert found.best()[0].local_lr == 0.05


def test_a_grid_with_no_finite_result_is_one_line(tmp_path: Path) -> None:
    found = tuned(study(task={"model": "mlp"}), (1.0,), (1e29, 1e30))
    with pytest.raises(UserError, match="every pair of rates diverged"):
        found.best()


def test_scores_put_reached_before_soon_before_accurate() -> None:
    soon, late = PairOutcome(hit_seconds=1.0, best_accuracy=0.8), PairOutcome(hit_seconds=2.0, best_accuracy=0.9)
    close, far = PairOutcome(best_accuracy=0.7), PairOutcome(best_accuracy=0.2)
    wild = PairOutcome(best_accuracy=0.79, diverged_at=3)
    order = [[soon, soon], [soon, late], [late, late], [soon, close], [close, close], [close, far], [wild, wild]]
    assert [score(own) for own in order] == sorted(score(own) for own in order)


def test_ctrl_c_keeps_what_is_known() -> None:
    found = Tuning(pairs_of(study().points(), (1.0,), (0.01, 0.05)), (0, 1), ComputeConfig())
    seen = []

    def watch(event: RunEvaluated | RunFinished) -> None:
        seen.append(event)
        if len(seen) == 9:
            raise KeyboardInterrupt

    assert found.run(watch) is False
    assert "interrupted" in {r["status"] for r in found.records()}
    assert max(r["rounds"] for r in found.records()) > 0
    assert found.best(compared_only=True) == []


def test_a_search_that_is_stopped_at_once_runs_nothing_and_marks_no_rates() -> None:
    """Runs that have not started are interrupted, too; no pair of their setting is the best."""
    pairs = pairs_of(study(algorithms=["fedavg", "fedbuff"]).points(), (1.0,), (0.01, 0.05))
    found = Tuning(pairs, (0,), ComputeConfig(max_batch_jobs=1))

    def stop(_event: RunEvaluated | RunFinished) -> None:
        raise KeyboardInterrupt

    assert found.run(stop) is False
    assert {r["status"] for r in found.records()} == {"interrupted"}
    assert 0 in {r["rounds"] for r in found.records()}
    assert len(found.best()) == 2
    assert found.best(compared_only=True) == []


@pytest.mark.parametrize(
    ("wide", "near", "words"),
    [
        ((), (0.1,), "global"),
        ((1.0,), (0.0,), "local"),
        ((1.0, 1.0), (0.1,), "twice"),
        ((float("inf"),), (0.1,), "global"),
    ],
)
def test_grids_that_make_no_sense(wide: tuple[float, ...], near: tuple[float, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        pairs_of(study().points(), wide, near)


def test_a_target_is_needed() -> None:
    chosen = study(stop={"max_rounds": 3})
    with pytest.raises(UserError, match="target_accuracy"):
        Tuning(pairs_of(chosen.points(), (1.0,), (0.1,)), [0], ComputeConfig())


def test_the_command_leaves_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(study(seeds=[0]).to_toml(), encoding="utf-8")
    words = ("tune", file, "--global-rates", "1", "--local-rates", "0.001,0.05", "--device", "cpu")
    result = call(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "←" in result.stdout
    folder = tmp_path / "runs" / "study-tune"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"] is True
    assert summary["best"] == [{"label": "defedavg-iid", "global_lr": 1.0, "local_lr": 0.05}]
    assert len((folder / "points.jsonl").read_text().splitlines()) == 2
    refuse(call(*words, cwd=tmp_path), "already exists", "--force")
    again = call(*words, "--force", "--json", cwd=tmp_path)
    assert [r["seed"] for r in json.loads(again.stdout)] == [0, 0]
    refuse(call("tune", file, "--local-rates", "fast", "--force", cwd=tmp_path), "--local-rates", "0.01,0.1")


def test_whoever_can_no_longer_be_the_soonest_is_dropped_before_halving() -> None:
    chosen = study(seeds=[0], stop={**BASE["stop"], "max_rounds": 4000})
    grid = (1.0,), (0.0001, 0.001, 0.05, 0.1)
    found = tuned(chosen, *grid, 1 / 64, 1 / 32)  # both before any half is dropped
    hits = {pair.local_lr: own[0].hit_seconds for pair, own in found.outcomes.items()}
    best = found.best()[0]
    assert hits[best.local_lr] == min(hit for hit in hits.values() if hit is not None)
    dropped = [own[0] for own in found.outcomes.values() if own[0].status == "dropped"]
    assert dropped
    for one in dropped:
        assert one.seconds >= (hits[best.local_lr] or 0.0)
    whole = tuned(chosen, *grid)
    assert whole.best() == [best]


def test_what_is_known_is_not_run_again_and_each_race_is_told_of_once() -> None:
    chosen = study(training={**BASE["training"], "updates_per_round": [4, 8]})
    pairs = pairs_of(chosen.points(), (1.0,), (0.001, 0.05))
    first = Tuning(pairs, chosen.seeds, ComputeConfig(), ())
    first.run(lambda event: None)
    known = {pair: first.outcomes[pair] for pair in pairs if pair.local_lr == 0.05}
    told: list[list[float | None]] = []
    seen: set[Any] = set()
    again = Tuning(
        pairs,
        chosen.seeds,
        ComputeConfig(),
        (),
        known=known,
        decided=lambda rivals: told.append([p.local_lr for p in rivals]),
    )
    again.run(lambda event: seen.add(event.spec.name))
    assert told == [[0.001, 0.05], [0.001, 0.05]]
    assert {pair.local_lr for pair in seen} == {0.001}
    assert again.outcomes == first.outcomes


def test_where_a_target_is_to_be_held_a_lucky_measurement_does_not_count() -> None:
    chosen = study(seeds=[0], stop={**BASE["stop"], "consecutive_hits": 5, "eval_every_rounds": 1, "max_rounds": 60})
    found = tuned(chosen, (1.0,), (0.05, 0.1))
    for own in found.outcomes.values():
        outcome = own[0]
        assert outcome.first_hit_seconds is not None
        assert outcome.hit_seconds == (outcome.sustained_seconds if outcome.status == "target" else None)


# The decision.


def test_the_winner_and_the_runner_up_are_printed_and_the_tuned_study_runs(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    stop = {**BASE["stop"], "target_accuracy": 0.6}
    chosen = study(algorithms=["fedavg", "asysg", "favano", "defedavg-iid"], stop=stop, fedavg={"replacement": False})
    file.write_text(chosen.to_toml(), encoding="utf-8")
    grid = ("--global-rates", "0.05,1", "--local-rates", "0.001,0.05")
    result = call("tune", file, *grid, "--device", "cpu", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    *_, winner, second, advice = result.stdout.strip().splitlines()
    records = [json.loads(line) for line in (tmp_path / "runs/study-tune/points.jsonl").read_text().splitlines()]
    times: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record["hit_seconds"] is not None:
            times.setdefault((record["algorithm"], record["label"]), []).append(record["hit_seconds"])
    best: dict[str, tuple[float, str]] = {}
    for (algorithm, label), hits in times.items():
        if len(hits) == 2:
            best[algorithm] = min(best.get(algorithm, (math.inf, "")), (fmean(hits), label))
    (_, label), (_, other), *_ = sorted(best.values())
    time = over_seeds([{"hit": hit} for hit in times[label.split()[0], label]], "hit").text()
    assert winner.startswith(f"winner: {label} (time to 60 %: {time} s; best accuracy: ")
    assert second.startswith(f"runner-up: {other} (time to 60 %: ")
    path = tmp_path / "runs" / "study-tune" / "tuned.toml"
    assert advice == f"run it: defedavg run {path.relative_to(tmp_path)}"
    text = path.read_text(encoding="utf-8")
    assert f"# {winner.removeprefix('winner: ')}" in text
    assert "# Seeds of the search: 0, 1." in text
    found = config.load(path)
    assert (found.name, found.seeds, found.algorithms) == ("study-tuned", (0, 1), chosen.algorithms)
    summary = json.loads((path.parent / "summary.json").read_text())
    assert [f"{each['label']}" for each in summary["ranking"]] == [label.split()[0], other.split()[0]]
    for point in found.points():
        algorithm = point.settings.algorithm
        (pair,) = [each for each in summary["best"] if each["label"] == algorithm]
        own = found.tables[algorithm]
        assert {key: own.get(key) for key in ("global_lr", "local_lr")} == {
            key: pair[key] for key in ("global_lr", "local_lr")
        }
        before = next(each for each in chosen.points() if each.settings.algorithm == algorithm)
        assert replace(point.settings, training=before.settings.training) == before.settings
    assert call("run", path, "--device", "cpu", cwd=tmp_path).returncode == 0
    again = json.loads((tmp_path / "runs" / "study-tuned" / "summary.json").read_text())["runs"]
    hits = [entry["first_hit_seconds"] for entry in again if entry["algorithm"] == label.split()[0]]
    assert hits == times[label.split()[0], label]  # the same run as in the search
    assert call("runs", "remove", "study-tune", "--yes", cwd=tmp_path).returncode == 0
    assert not path.parent.exists()


def test_swept_settings_of_a_tuned_study_are_those_of_the_winner() -> None:
    chosen = study(
        algorithms=["fedavg", "fedbuff"], seeds=[0], training={"updates_per_round": [2, 8], "local_steps": [2, 5]},
        fedbuff={"concurrency": [4, 20], "local_steps": [1, 6]},
    )  # fmt: skip
    pairs = pairs_of(chosen.points(), (1.0,), (0.01, 0.05))
    times = {("fedavg", 2, 5): 1.0, ("fedavg", 8, 2): 3.0, ("fedbuff", 8, 6): 2.0, ("fedbuff", 2, 1): 4.0}
    search = Tuning(pairs, (0,), ComputeConfig(), ())
    for pair in pairs:
        training = pair.point.settings.training
        key = (pair.point.settings.algorithm, training.updates_per_round, training.local_steps)
        hit = times.get(key, 9.0) + (0.5 if pair.local_lr == 0.01 else 0.0)
        if pair.point.settings.algorithm == "fedbuff":
            hit += 0.1 * (pair.point.settings.algorithm_settings.concurrency == 4)
        search.outcomes[pair] = {0: PairOutcome("target", hit, hit, None, 0.81)}
    decision = Decision(search)
    assert decision.winner.label == "fedavg updates_per_round=2 local_steps=5 η=1 η̄=0.05"
    assert decision.runner_up is not None
    assert decision.runner_up.label == "fedbuff updates_per_round=8 local_steps=6 concurrency=20 η=1 η̄=0.05"
    found = decision.study(chosen)
    assert found == config.study(tomllib.loads(decision.to_toml(chosen)))
    assert (found.tables["training"]["updates_per_round"], found.tables["training"]["local_steps"]) == (2, 5)
    fedavg, fedbuff = found.points()
    assert fedavg.settings.training.local_lr == fedbuff.settings.training.local_lr == 0.05
    assert found.tables["fedbuff"] == {"concurrency": 20, "local_steps": 1, "global_lr": 1.0, "local_lr": 0.05}
    assert "training.updates_per_round = 2, training.local_steps = 5" in decision.to_toml(chosen)


def test_a_tuned_study_has_no_setting_without_effect() -> None:
    chosen = study(
        algorithms=["fedavg", "favano"], seeds=[0], training={"global_lr": 0.3, "local_lr": 0.2},
        asysg={"global_lr": 0.01},
    )  # fmt: skip
    search = Tuning(pairs_of(chosen.points(), (0.5,), (0.01,)), (0,), ComputeConfig(), ())
    for pair in search.pairs:
        search.outcomes[pair] = {0: PairOutcome("target", 1.0, 1.0, None, 0.81)}
    found = config.study(tomllib.loads(Decision(search).to_toml(chosen)))
    assert unused_settings(found) == []
    assert [point.settings.training.local_lr for point in found.points()] == [0.01, 0.01]


def test_with_one_setting_the_runner_up_is_its_second_pair() -> None:
    search = Tuning(pairs_of(study(seeds=[0]).points(), (1.0,), (0.01, 0.05)), (0,), ComputeConfig(), ())
    for pair, hit in zip(search.pairs, (None, 2.0), strict=True):
        search.outcomes[pair] = {0: PairOutcome("max_rounds" if hit is None else "target", hit, hit, None, 0.7)}
    assert Decision(search).lines() == [
        "winner: defedavg-iid η=1 η̄=0.05 (time to 80 %: 2 s; best accuracy: 70.0 %)",
        "runner-up: defedavg-iid η=1 η̄=0.01 (time to 80 %: 0 of 1 seed; best accuracy: 70.0 %)",
    ]


def test_a_search_that_ctrl_c_stops_decides_nothing(tmp_path: Path) -> None:
    chosen = study(seeds=[0])
    search = Tuning(pairs_of(chosen.points(), (1.0,), (0.01, 0.05)), (0,), ComputeConfig())
    session = TuningFolder(search, chosen, tmp_path / "search", force=False)

    def watch(event: RunEvaluated | RunFinished) -> None:
        raise KeyboardInterrupt

    assert session.run(watch) is False
    assert session.decisions == []
    assert not (tmp_path / "search" / "tuned.toml").exists()


def test_every_seed_of_a_search_is_in_one_category() -> None:
    """A pair that touches the target, does not hold it and is dropped has no hit."""
    stop = {**BASE["stop"], "consecutive_hits": 5, "eval_every_rounds": 1, "max_rounds": 200, "target_accuracy": 0.7}
    chosen = study(seeds=[0, 1], stop=stop)
    found = tuned(chosen, (1.0,), (0.01, 0.05, 0.1, 0.2), 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
    records = found.records()
    assert any(r["status"] == "dropped" and r["first_hit_seconds"] is not None for r in records)  # the case in question
    for label, entries in grouped(filter(None, map(read_entry, records)), lambda entry: entry.label).items():
        counts = outcomes(map(record_of, entries))
        own = [r for r in records if r["label"] == label]
        assert sum(counts.values()) == len(own) == 2
        assert counts.get("dropped", 0) == sum(r["status"] == "dropped" for r in own)
        assert counts.get("reached", 0) == sum(r["status"] == "target" for r in own)


def test_runs_of_a_search_end_at_the_target() -> None:
    chosen = study(seeds=[0], stop={**BASE["stop"], "stop_at_target": False, "target_accuracy": 0.3})
    found = tuned(chosen, (1.0,), (0.05,))
    assert [r["status"] for r in found.records()] == ["target"]


def test_a_setting_is_decided_after_the_end_of_its_last_run() -> None:
    """Whoever stores the winner needs its end, even where the winner is the last run that ends."""
    pairs = pairs_of(study(seeds=[0]).points(), (1.0,), (0.001, 0.05))
    ended: list[Any] = []
    told: list[Any] = []
    search = Tuning(pairs, (0,), ComputeConfig(), (), decided=lambda rivals: told.append((list(rivals), set(ended))))
    assert search.run(lambda event: ended.append(event.spec.name) if isinstance(event, RunFinished) else None)
    assert told == [(pairs, set(pairs))]
