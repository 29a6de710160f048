"""Estimates of constants, the measured speedup, and the commands, compared with closed forms and real runs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn

from defedavg.cli.theory_command import _numbers
from defedavg.config.build import make_plan
from defedavg.errors import UserError
from defedavg.rng import generator, key
from defedavg.tasks import least_squares, make_task
from defedavg.theory import Constants, probable_staleness, rounds_to_apply, theorem
from defedavg.theory.estimates import (
    EstimateOptions,
    Objective,
    closed_form_estimates,
    estimate,
    exact_norms,
    full_norms,
    largest_curvature,
)
from defedavg.theory.speedup import GradientRecorder, HorizonSearch, measure
from defedavg.theory.speedup_cases import make_case
from defedavg.theory.speedup_figure import speedup_figure
from defedavg.theory.speedup_result import STUDENT, SpeedupTrial, fit
from defedavg.theory.speedup_study import SpeedupScope
from defedavg.training import LocalTraining
from helpers.command_line import call, refuse
from helpers.settings_tables import settings, small
from helpers.strategies import positive

IID, NIID = theorem("defedavg-iid"), theorem("defedavg-niid")


# Estimates.


def test_estimates_are_exact_on_least_squares() -> None:
    problem = least_squares(7, dimension=5, samples_per_client=9, noise=0.7, heterogeneity=1.3, seed=4)
    wanted = closed_form_estimates(problem, 3)
    found = estimate(problem.task, EstimateOptions(batch_size=3, points=1, hessians=7, tolerance=1e-12))
    assert found.smoothness == pytest.approx(problem.smoothness, rel=1e-9)
    for name in ("noise", "gradient", "heterogeneity"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-11)
        assert getattr(found, f"{name}_most") == pytest.approx(getattr(wanted, f"{name}_most"), rel=1e-11)
    assert wanted.noise_most == pytest.approx(problem.gradient_noise(3), rel=1e-12)
    assert wanted.heterogeneity_most == pytest.approx(problem.heterogeneity, rel=1e-12)
    initial = Objective(problem.task).initial.numpy()
    assert wanted.gap == pytest.approx(problem.value(initial) - problem.minimum, rel=1e-12)
    above = estimate(problem.task, EstimateOptions(batch_size=3, points=1, hessians=1), minimum=problem.minimum)
    assert above.gap == pytest.approx(wanted.gap, rel=1e-11)


def test_noise_and_heterogeneity_of_least_squares_do_not_depend_on_the_point() -> None:
    problem = least_squares(5, dimension=4, heterogeneity=1.0)
    one, three = (estimate(problem.task, EstimateOptions(points=points)) for points in (1, 3))
    assert (three.noise, three.heterogeneity) == pytest.approx((one.noise, one.heterogeneity), rel=1e-11)
    assert three.gradient >= one.gradient
    assert estimate(problem.task, EstimateOptions(points=3)) == three


def network(frozen: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    if frozen:
        model[0].weight.requires_grad_(False)
    return model


def small_task(frozen: bool = False) -> Any:
    random = generator(key(0, "test.task"))
    data = (random.normal(size=(24, 4)), random.integers(0, 3, 24))
    parts = [np.arange(0, 4), np.arange(4, 12), np.arange(12, 24)]  # of unequal size
    return make_task(model=network(frozen), train=data, test=data, clients=parts, keep_dtype=True)


def test_curvature_is_the_largest_eigenvalue_of_the_hessian() -> None:
    objective = Objective(small_task())
    samples = np.arange(24)
    hessian = torch.autograd.functional.hessian(lambda w: objective.losses(w, samples).mean(), objective.initial)  # type: ignore[no-untyped-call]
    wanted = float(torch.linalg.eigvalsh(hessian).abs().max())
    found = largest_curvature(objective, objective.initial, samples, tolerance=1e-10, max_iterations=5000)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert found <= wanted * (1 + 1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_full_gradient_weighs_clients_equally(frozen: bool) -> None:
    task = small_task(frozen)
    objective = Objective(task)
    versions = objective.initial + torch.arange(5.0)[:, None] / 10
    mean = [torch.stack([objective.gradient(w, part) for part in task.clients]).mean(0) for w in versions]
    wanted = torch.stack(mean).square().sum(1)
    torch.testing.assert_close(full_norms(task)(versions), wanted, rtol=1e-12, atol=0)
    if frozen:
        assert not mean[0][:12].any()


def test_closed_form_and_full_gradient_agree_on_least_squares() -> None:
    problem = least_squares(4, dimension=3, heterogeneity=1.0)
    versions = torch.linspace(-1, 2, 12, dtype=torch.float64).view(4, 3)
    torch.testing.assert_close(full_norms(problem.task)(versions), exact_norms(problem)(versions), rtol=1e-11, atol=0)


def test_estimates_note_their_samples() -> None:
    found = estimate(small_task(), EstimateOptions(batch_size=2, points=1, samples=5, hessians=2))
    assert "14 of 24 training samples of 3 clients" in found.note
    assert found.smoothness > 0
    with pytest.raises(UserError, match="above the lower bound"):
        estimate(small_task(), EstimateOptions(points=1), minimum=1e9)


# Measurement.


@pytest.mark.parametrize(("rounds", "every"), [(20, 1), (20, 3), (200, 1)])
def test_the_mean_is_over_the_versions_before_the_last(rounds: int, every: int) -> None:
    problem = least_squares(6, dimension=3)
    how = settings("defedavg-iid", **small(6, 2, steps=2))
    norms = exact_norms(problem)
    recorder = GradientRecorder(problem.task, LocalTraining(5, 10, 0.5, 0.1), norms, rounds, every)
    plan = make_plan(how, 5, rounds)
    versions = [recorder.versions[0], *(recorder.apply(record) for record in plan.rounds)]
    assert len(versions) == rounds + 1
    wanted = norms(torch.stack(versions[every // 2 : rounds : every])).mean()
    assert recorder.mean == pytest.approx(float(wanted), rel=1e-12)
    assert recorder.max_staleness == max(s for record in plan.rounds for s in record.merge.staleness)


@examples(max_examples=200)
@given(positive(1, 1e4), st.floats(0.2, 2.0), st.integers(1, 5000), st.integers(0, 60), st.floats(0.01, 0.2))
def test_a_search_brackets_the_smallest_rounds(
    scale: float, power: float, first: int, diverging: int, tolerance: float
) -> None:
    """Search on mean = scale/T^power, where runs of fewer than ``diverging`` rounds diverge."""
    epsilon = 0.5
    search = HorizonSearch(epsilon, first, tolerance, max_rounds=10**12)
    while not search.done and not search.failed:
        search.record(math.inf if search.rounds < diverging else scale / search.rounds**power)
        assert search.trials < 120
    if search.failed:
        assert scale / 10 ** (12 * power) > epsilon
        return
    assert search.success is not None
    exact = max(1, diverging, math.ceil((scale / epsilon) ** (1 / power)))
    assert exact - 1e-6 * exact <= search.success[0] <= exact * (1 + tolerance) + 1


def test_a_search_gives_up() -> None:
    search = HorizonSearch(0.5, 10, max_rounds=100)
    while not search.done and not search.failed:
        search.record(1.0)
    assert search.failed


def test_the_fit_of_a_power_law() -> None:
    exact = fit({0: [(n, 1000 / n) for n in (1, 4, 16)]})
    assert (exact.slope, exact.low, exact.high) == pytest.approx((-1, -1, -1))
    assert math.exp(exact.level) == pytest.approx(1000)
    seeds = {i: [(n, 1000 * n**slope) for n in (1, 2, 8)] for i, slope in enumerate((-1.1, -0.9, -1.0))}
    found = fit(seeds)
    assert found.slope == pytest.approx(-1.0)
    assert found.high - found.slope == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert fit({0: [(1, 8.0), (2, 3.0)]}).high == math.inf
    with pytest.raises(UserError, match="nothing to fit"):
        fit({})
    with pytest.raises(UserError, match="two different"):
        fit({0: [(2, 8.0), (2, 3.0)]})


def test_the_interval_covers_the_slope_with_95_percent_probability() -> None:
    random = generator(key(0, "test.fit"))
    x = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    for seeds in (1, 4):
        covered = 0
        for _ in range(2000):
            y = 500 / x * np.exp(0.1 * random.normal(size=(seeds, 5)))
            found = fit({i: list(zip(x, seed, strict=True)) for i, seed in enumerate(y)})
            covered += found.low <= -1 <= found.high
        assert covered / 2000 == pytest.approx(0.95, abs=0.02)


def test_students_quantiles() -> None:
    """The area beyond each entry is 2.5 %, computed with the trapezoid rule."""
    for free, quantile in enumerate(STUDENT, start=1):
        angle = np.linspace(math.atan(quantile / math.sqrt(free)), math.pi / 2, 20001)
        whole = math.sqrt(math.pi) * math.exp(math.lgamma(free / 2) - math.lgamma((free + 1) / 2))
        assert float(np.trapezoid(np.cos(angle) ** (free - 1), angle)) / whole == pytest.approx(0.025, rel=2e-3)


@pytest.mark.no_cover
@pytest.mark.parametrize("algorithm", ["defedavg-iid", "defedavg-niid"])
def test_speedup_is_linear_on_least_squares(algorithm: str) -> None:
    """Use a sixteenfold range of n at the theorems' rates, under their conditions; the command measures more."""
    trials: list[SpeedupTrial] = []
    found = measure(make_case("least-squares", algorithm), [4, 64], [0, 1], on_trial=trials.append, tolerance=0.05)
    assert -1.15 <= found.fit.slope <= -0.85
    for point in found.points:
        assert point.conditions_hold
        assert point.first_share > 0.95
        assert max(point.rounds) < point.promised_rounds
        for seed, rounds in enumerate(point.rounds):
            means = {t.rounds: t.mean for t in trials if (t.n, t.seed) == (point.n, seed)}
            assert means[rounds] <= found.case.epsilon
            assert max(t for t, mean in means.items() if mean > found.case.epsilon) < rounds
    figure = speedup_figure([found.json()])
    (ax,) = figure.axes
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert "n" in ax.get_xlabel()
    assert "rounds" in ax.get_ylabel()


# Commands.

GIVEN = ("--smoothness", "1", "--noise", "10", "--gradient", "5", "--heterogeneity", "1", "--gap", "2")


def test_the_command_with_given_constants(tmp_path: Path) -> None:
    result = call("theory", *GIVEN, "--set", "training.updates_per_round=[5, 20]", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    made = json.loads(result.stdout)
    assert [(m["algorithm"], m["constants"]["updates_per_round"]) for m in made] == [
        ("defedavg-iid", 5), ("defedavg-iid", 20), ("defedavg-niid", 5), ("defedavg-niid", 20)
    ]  # fmt: skip
    first = made[2]
    c = Constants(**first["constants"])
    assert c.max_staleness == probable_staleness(100, 5, 400, 0.01)
    assert first["bound"]["total"] == NIID.bound(c).total
    assert first["rates"]["local_lr"] == NIID.rates(c).local_lr
    assert first["rounds"]["to_apply"] == rounds_to_apply(NIID, c)
    table = call("theory", *GIVEN, "--max-staleness", "3", cwd=tmp_path)
    for word in ("Theorem 1", "Theorem 2", "ok:", "fails:", "as printed", "T for both", "All constants are given"):
        assert word in table.stdout


def test_the_command_estimates_missing_constants(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'algorithms = ["defedavg-niid", "fedavg"]\n[task]\nmodel = "softmax"\nsplit = "classes"\n'
        "[clients]\nnum_clients = 20\n[training]\nupdates_per_round = 4\n"
    )
    words = ("--config", "a.toml", "--points", "1", "--samples", "10", "--gap", "2.5", "--json")
    result = call("theory", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(result.stdout)
    assert found["constants"]["gap"] == 2.5
    assert found["constants"]["heterogeneity"] > 0
    assert "200 of 4000 training samples of 20 clients" in found["note"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("theory", *GIVEN, "--noise", "-1"), "noise is -1"),
        (("theory", *GIVEN, "--epsilon", "0"), "epsilon is 0"),
        (("theory", *GIVEN, "--delta", "2"), "delta is 2"),
        (("theory", *GIVEN, "--set", "training.updates_per_round=200"), "200"),
        (("theory", *GIVEN, "--set", "algorithms=['fedavg']"), "no theorem applies"),
        (("theory", "speedup", "--n", ""), "empty"),
        (("theory", "speedup", "--task", "cubes"), "cubes"),
    ],
)
def test_the_command_refuses_in_one_line(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    refuse(call(*words, cwd=tmp_path), said)


def test_an_invalid_scope_is_refused() -> None:
    good: dict[str, Any] = {
        "tasks": ["least-squares"], "algorithms": ["defedavg-iid"], "ns": [1, 2], "seeds": 1, "epsilon": None,
        "tolerance": 0.1,
    }  # fmt: skip
    SpeedupScope(**good)
    for wrong, words in (
        ({"ns": [1, 500]}, "128 clients"),
        ({"ns": [0, 1]}, "n is 0"),
        ({"epsilon": -1.0}, "epsilon is -1"),
        ({"algorithms": ["fedavg"]}, "fedavg"),
        ({"seeds": 0}, "seeds is empty"),
        ({"tolerance": 0.0}, "tolerance"),
    ):
        with pytest.raises(UserError, match=words):
            SpeedupScope(**{**good, **wrong})
    with pytest.raises(UserError, match="not a comma-separated list"):
        _numbers("1,x")


SHORT = ("theory", "speedup", "--task", "least-squares", "--algorithm", "defedavg-iid", "--seeds", "1", "--n", "32,64")


def test_a_speedup_study_writes_trials_a_summary_and_a_figure(tmp_path: Path) -> None:
    result = call(*SHORT, "--tolerance", "0.2", "--epsilon", "0.3", "--out", "s", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(result.stdout)
    assert json.loads((tmp_path / "s/speedup.json").read_text()) == [found]
    assert found["algorithm"] == "defedavg-iid"
    assert [point["n"] for point in found["points"]] == [32, 64]
    assert found["slope_low"] is None  # two points of one seed have no interval
    lines = [json.loads(line) for line in (tmp_path / "s/trials.jsonl").read_text().splitlines()]
    assert {line["n"] for line in lines} == {32, 64}
    assert (tmp_path / "s/speedup.png").stat().st_size > 5000
    assert (tmp_path / "s/speedup.pdf").stat().st_size > 5000
    refuse(call(*SHORT, "--out", "s", cwd=tmp_path), "--force")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_every_finished_trial(tmp_path: Path, number: signal.Signals) -> None:
    """The signal reaches the processes that measure, too, as from a terminal or from ``timeout``."""
    words = ("theory", "speedup", "--task", "least-squares", "--n", "1,64", "--out", "s")
    process = subprocess.Popen(
        [sys.executable, "-m", "defedavg", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    lines = tmp_path / "s/trials.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (lines.exists() and lines.read_text().count("\n")):
        time.sleep(0.1)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert b"trials.jsonl" in said
    kept = [json.loads(line) for line in lines.read_text().splitlines()]
    assert kept
    assert {"n", "seed", "rounds", "mean"} <= kept[0].keys()
