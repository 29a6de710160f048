"""The adviser on a task whose answer is known, and its lines for input that cannot be advised."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import defedavg
from defedavg.adviser.advice import advise
from defedavg.adviser.advice_files import advice_json, advice_page, check_advice_folder, pareto_front, write_advice
from defedavg.adviser.racing import EVALUATIONS
from defedavg.adviser.recommendation import Advice
from defedavg.adviser.search import INTERRUPTED
from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.tasks import Task
from defedavg.tasks.least_squares_task import least_squares
from helpers.command_line import call, refuse

CLIENTS = 6
STUDY: dict[str, Any] = {
    "name": "small",
    "clients": {"num_clients": CLIENTS},
    "training": {
        "updates_per_round": [1, 3],
        "local_steps": [2, 5],
        "local_lr": [0.001, 0.3],
        "global_lr": [1.0],
    },
    "stop": {"target_accuracy": 0.9, "max_seconds": 2.0},
    "fedbuff": {"concurrency": [0]},
}
ALGORITHMS = ("fedavg", "fedbuff", "defedavg-niid")


@cache
def task() -> Task:
    problem = least_squares(CLIENTS, dimension=4, noise=0.1, start=4.0)
    start, least = problem.value(np.full(4, 4.0)), problem.minimum

    def excess_gone(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = 0.5 * (outputs - targets).square().sum(1).mean()
        return ((start - loss) / (start - least)).clamp(0.0, 1.0)

    return replace(problem.task, metric=excess_gone)


def advised(updates: float = 2000, **stop: Any) -> Advice:
    study = {**STUDY, "stop": {**STUDY["stop"], **stop}}
    return advise(study, algorithms=ALGORITHMS, budget_updates=updates, task=task())


@cache
def usual() -> Advice:
    return advised()


def test_the_advice_has_the_useful_rate_and_its_interval() -> None:
    advice = usual()
    assert advice.best.reached
    assert advice.best.time is not None
    assert advice.best.values["training.local_lr"] == 0.3  # with the other one, 2 s are far too short
    assert advice.best.time.seeds >= 2
    assert advice.best.time.low is not None
    assert advice.best.time.low <= advice.best.time.mean
    assert advice.best.reason == ""
    assert all(each.reason for each in advice.ranking[1:])
    reached = [each.time.mean for each in advice.ranking if each.time is not None and each.time.seeds == 1]
    assert reached == sorted(reached)
    assert math.isfinite(advice.steps / advice.grid_steps)


def test_others_reach_the_target_too_so_that_the_page_can_show_a_front() -> None:
    advice = usual()
    others = [each for each in advice.ranking[1:] if each.reached]
    assert others
    assert advice.best.time is not None
    assert all(each.time is not None and each.time.seeds <= advice.best.time.seeds for each in others)
    assert pareto_front(advice.ranking)


def test_a_candidate_whose_first_round_is_too_late_is_not_raced_and_the_page_says_why() -> None:
    study = {**STUDY, "training": {**STUDY["training"], "local_steps": [2, 150]}}
    advice = advise(study, algorithms=ALGORITHMS, budget_updates=2000, task=task())
    late = {label: reason for label, reason in advice.dropped if "first round is planned at" in reason}
    assert late
    assert all("K=150" in label and "the target was reached at" in reason for label, reason in late.items())
    assert not late.keys() & {each.label for each in advice.ranking}


def test_the_advised_setting_reaches_the_target_when_it_is_run() -> None:
    advice = usual()
    (point,) = advice.advised_study().points()
    assert point.settings.algorithm == advice.best.algorithm
    values = {name: value for name, value in point.settings.flat().items() if name in advice.best.values}
    assert values == advice.best.values
    result = defedavg.simulate(
        advice.best.algorithm,
        task=task(),
        seed=7,
        settings={**values, "stop.target_accuracy": 0.9, "stop.max_seconds": 2.0},
    )
    assert result.first_hit_seconds is not None


def test_the_advised_study_repeats_the_race_on_its_seeds() -> None:
    advice = usual()
    study = config.study(tomllib.loads(advice.to_toml()))
    settings = study.points()[0].settings
    assert settings.stop.eval_every_seconds == STUDY["stop"]["max_seconds"] / EVALUATIONS
    results = [
        defedavg.simulate(advice.best.algorithm, task=task(), seed=seed, settings=settings.flat())
        for seed in advice.seeds[: advice.best.seeds]
    ]
    times = [result.first_hit_seconds for result in results]
    assert None not in times
    assert advice.best.time is not None
    assert math.exp(fmean(math.log(each) for each in times if each)) == pytest.approx(advice.best.time.mean, rel=1e-12)


def test_the_advised_study_reaches_the_target_where_most_clients_come_late(tmp_path: Path) -> None:
    trace = tmp_path / "late.csv"
    rows = "".join(f"{i},0.01,100,100,{0 if i < 2 else 40},500,\n" for i in range(40))
    trace.write_text("client,step_seconds,up_mbps,down_mbps,available_from,available_to,repeat_every\n" + rows)
    study = {
        "task": {"model": "softmax", "split": "iid"},
        "clients": {"trace": str(trace)},
        "training": {"updates_per_round": [1], "local_steps": [2], "local_lr": [2e-5], "global_lr": [1.0]},
        "stop": {"target_accuracy": 0.35, "max_seconds": 50.0},
        "fedbuff": {"concurrency": [0]},
    }
    advice = advise(study, algorithms=["fedbuff"], budget_updates=100_000, seeds=1)
    assert advice.best.time is not None
    assert advice.best.time.mean > 40.0
    settings = config.study(tomllib.loads(advice.to_toml())).points()[0].settings
    result = defedavg.simulate("fedbuff", seed=advice.seeds[0], settings=settings.flat())
    assert result.first_hit_seconds == pytest.approx(advice.best.time.mean, rel=1e-12)


def classes_of_own() -> Task:
    inputs = np.random.default_rng(0).normal(size=(400, 5)).astype("float32")
    targets = (inputs.sum(axis=1) > 0).astype("int64")
    return defedavg.make_task(
        model=lambda: nn.Linear(5, 2),
        train=(inputs[:300], targets[:300]),
        test=(inputs[300:], targets[300:]),
        clients=np.array_split(np.arange(300), CLIENTS),
    )


def test_clients_of_a_task_of_your_own_hold_out_the_share_that_the_study_names() -> None:
    own = classes_of_own()
    stop = {"target_accuracy": 0.9, "max_seconds": 2.0}
    study = {"training": STUDY["training"], "task": {"client_test_share": 0.2}, "stop": stop}
    advice = advise(study, algorithms=["fedavg"], budget_updates=300, seeds=2, task=own)
    assert advice.best.worst_decile is not None
    settings = advice.advised_study().points()[0].settings.flat()
    runs = [
        defedavg.simulate("fedavg", task=own, seed=seed, settings=settings)
        for seed in advice.seeds[: advice.best.seeds]
    ]
    assert advice.best.time is not None
    assert math.prod(each.seconds for each in runs) == pytest.approx(advice.best.time.mean ** len(runs), rel=1e-9)
    assert runs[0].client_scores is not None


def test_a_distant_limit_of_simulated_time_has_advice_that_can_be_loaded() -> None:
    advice = advised(1e15, max_seconds=1e12, eval_every_seconds=0.05)
    assert advice.best.reached
    stop = config.study(tomllib.loads(advice.to_toml())).points()[0].settings.stop
    assert (stop.max_seconds, stop.target_accuracy) == (1e12, 0.9)


def test_only_a_folder_with_advice_to_run_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    write_advice(usual(), folder, {})
    with pytest.raises(UserError, match="already holds an advice; use --force"):
        check_advice_folder(folder, force=False)
    check_advice_folder(folder, force=True)
    missed = advised(target_accuracy=0.99999999)
    write_advice(missed, folder, {})
    check_advice_folder(folder, force=False)
    assert (folder / "advice.json").exists()


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    texts = []
    for advice in (usual(), advised()):
        (tmp_path / "x").mkdir(exist_ok=True)
        write_advice(advice, tmp_path / "x", {})
        found = json.loads((tmp_path / "x" / "advice.json").read_text())
        del found["provenance"]
        texts.append((json.dumps(found), (tmp_path / "x" / "advised.toml").read_bytes(), advice_page(advice, {})))
    assert texts[0] == texts[1]
    config.study(tomllib.loads(texts[0][1].decode()))


def test_a_larger_budget_trains_more_and_stays_within_it() -> None:
    small = advised(300)
    assert small.steps < usual().steps < 2000 * 2 + 5  # less than one update beyond it


def test_a_target_that_no_candidate_reaches_is_one_line_with_the_best_so_far() -> None:
    advice = advised(target_accuracy=0.99999999)
    line = advice.failure()
    assert line is not None
    assert advice.best.label in line
    assert f"not reached by {advice.best.seconds:.3g} s ({advice.metric_name} {advice.best.metric:.4g})" in line
    assert advice.sentence().startswith(f"no candidate reached 1; the best so far, {advice.best.label}: not reached by")
    assert "\n" not in line
    assert advice_json(advice, {})["advice"] is None
    assert pareto_front(advice.ranking) == set()


def test_ctrl_c_returns_the_best_so_far() -> None:
    calls = 0

    def interrupt(text: str, share: float, left: float | None) -> None:
        nonlocal calls
        calls += text.startswith("exploring")
        if calls == 40:
            calls += 1
            raise KeyboardInterrupt

    advice = advise(STUDY, algorithms=ALGORITHMS, budget_updates=2000, task=task(), progress=interrupt)
    assert advice.ended == INTERRUPTED
    assert advice.interrupted
    assert advice.ranking


def test_a_budget_below_one_run_says_what_a_run_needs() -> None:
    line = r"below one run: the cheapest of 12 settings .*fedavg n=1 K=.* the budget has 3; give more"
    with pytest.raises(UserError, match=line):
        advised(3)


def test_a_fleet_that_is_never_available_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "away.csv"
    rows = "".join(f"{i},0.01,100,100,1000,2000,\n" for i in range(CLIENTS))
    trace.write_text("client,step_seconds,up_mbps,down_mbps,available_from,available_to,repeat_every\n" + rows)
    study = {**STUDY, "clients": {"trace": str(trace)}}
    with pytest.raises(
        UserError, match=r"no planned setting .* of \d+ settings: merges no update within 2 s; check when"
    ):
        advise(study, algorithms=ALGORITHMS, budget_updates=2000, task=task())


@pytest.mark.parametrize(
    ("study", "words"),
    [
        ({**STUDY, "stop": {}}, "set stop.target_accuracy"),
        ({**STUDY, "clients": {"num_clients": CLIENTS, "jitter": [0.0, 0.1]}}, "clients.jitter is swept"),
    ],
)
def test_what_advice_is_for_must_be_stated_once(study: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        advise(study, algorithms=ALGORITHMS, budget_updates=2000, task=task())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"study": {**STUDY, "clients": {"num_clients": 3}}, "task": classes_of_own()},
            "the task has 6 clients but clients.num_clients is 3; remove that setting",
        ),
        ({"task": 5}, "task is int; pass what make_task returns"),
        ({"algorithms": "fedavg"}, "algorithms is 'fedavg'; pass a list of names"),
    ],
    ids=["clients", "task", "algorithms"],
)
def test_arguments_from_python_that_do_not_fit_are_one_line(changes: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"study": STUDY, "algorithms": ALGORITHMS, "task": task(), **changes}
    with pytest.raises(UserError, match=words):
        advise(arguments.pop("study"), budget_updates=300, **arguments)


def test_the_command_writes_a_study_that_runs(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        'name = "my"\n[task]\nmodel = "softmax"\n[clients]\nnum_clients = 6\n[training]\nupdates_per_round = [2]\n'
        "local_steps = [5]\nlocal_lr = [0.01, 0.03]\nglobal_lr = [1.0]\n"
        "[stop]\ntarget_accuracy = 0.3\nmax_seconds = 0.5\n"
    )
    words = ("advise", "my.toml", "--algorithms", "fedavg,defedavg-iid", "--seeds", "2", "--budget", "600")
    done = call(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "← advised" in done.stdout
    assert "run it: defedavg run runs/my-advice/advised.toml" in done.stdout
    page = (tmp_path / "runs" / "my-advice" / "advice.html").read_text()
    assert "Plotly" in page
    assert "{{" not in page.split("<script>")[0]
    config.load(tmp_path / "runs" / "my-advice" / "advised.toml")
    refuse(call(*words, cwd=tmp_path), "already holds an advice", "--force")
    refuse(call("advise", "my.toml", "--budget", "-3", cwd=tmp_path), "--budget")
