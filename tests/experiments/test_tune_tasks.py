"""The search for rates of a study that sweeps tasks or fleets: each has a decision and a study of its own."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from defedavg.config import study as config
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.tune import PairOutcome, Tuning, pairs_of
from defedavg.experiments.tuned_study import decisions_of
from defedavg.experiments.tuning_folder import TuningFolder
from defedavg.runstore.layout import RunFiles
from helpers.rate_searches import BASE, study


def test_every_swept_task_and_fleet_has_a_decision_of_its_own() -> None:
    chosen = study(
        algorithms=["fedavg", "fedbuff"], seeds=[0], task={"split": "dirichlet", "alpha": [0.1, 10.0]},
        clients={"num_clients": 20, "slowness": ["equal", "uniform(1, 5)"]}, training={"local_steps": [2, 5]},
    )  # fmt: skip
    search = Tuning(pairs_of(chosen.points(), (1.0,), (0.01, 0.05)), (0,), ComputeConfig(), ())
    for pair in search.pairs:
        settings = pair.point.settings
        slow = settings.task.alpha == 0.1
        hit = 9.0 if slow else 1.0
        hit += (settings.algorithm == ("fedavg" if slow else "fedbuff")) + (settings.training.local_steps == 2)
        hit += 0.5 * (pair.local_lr == (0.01 if slow else 0.05))
        search.outcomes[pair] = {0: PairOutcome("target", hit, hit, None, 0.81)}
    decisions = decisions_of(search)
    assert [each.winner.point.settings.algorithm for each in decisions] == ["fedbuff"] * 2 + ["fedavg"] * 2
    assert [each.label for each in decisions] == [
        "alpha-0.1-slowness-equal", "alpha-0.1-slowness-uniform-1-5",
        "alpha-10.0-slowness-equal", "alpha-10.0-slowness-uniform-1-5",
    ]  # fmt: skip
    for decision in decisions:
        assert decision.runner_up is not None
        found = config.study(tomllib.loads(decision.to_toml(chosen)))
        alpha, slowness = (value for _, value in decision.given)
        assert {(p.settings.task.alpha, p.settings.clients.slowness) for p in found.points()} == {(alpha, slowness)}
        assert [p.settings.training.local_steps for p in found.points()] == [5, 5]
        assert {p.settings.training.local_lr for p in found.points()} == {0.05 if alpha == 0.1 else 0.01}
        assert found.name == f"study-{decision.label}-tuned"
        assert f"This study is for task.alpha = {alpha}, clients.slowness = {slowness};" in decision.to_toml(chosen)


def test_a_search_over_tasks_writes_a_study_for_each(tmp_path: Path) -> None:
    chosen = study(seeds=[0], task={"split": "dirichlet", "alpha": [0.1, 10.0]}, stop={**BASE["stop"], "max_rounds": 2})
    search = Tuning(pairs_of(chosen.points(), (1.0,), (0.01, 0.05)), (0,), ComputeConfig())
    session = TuningFolder(search, chosen, tmp_path / "search", force=False)
    assert session.run(lambda _: None)
    files = sorted((tmp_path / "search" / "tuned").iterdir())
    assert [each.name for each in files] == ["alpha-0.1.toml", "alpha-10.0.toml"]
    assert files == [session.tuned_study(each) for each in session.decisions]
    assert [config.load(each).tables["task"]["alpha"] for each in files] == [0.1, 10.0]
    assert not (tmp_path / "search" / "tuned.toml").exists()
    rankings = json.loads((tmp_path / "search" / "summary.json").read_text())["rankings"]
    assert [each["swept"] for each in rankings] == [{"task.alpha": 0.1}, {"task.alpha": 10.0}]
    assert RunFiles(tmp_path / "search").foreign() == []
