"""Algorithms that keep client models, and FADAS, against independent oracles: plain NumPy, from their definitions.

A plan says which updates are merged when; every version is computed here from the definition of the algorithm.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from defedavg.config.build import make_executor, make_plan
from defedavg.planning.plan import Plan
from helpers.command_line import call, refuse
from helpers.oracle_runs import CLIENTS, GLOBAL_LR, PROBLEM, START, Vector, assert_versions, delta, product_run
from helpers.settings_tables import settings, small

SHARES = np.full(CLIENTS, 1 / CLIENTS)


def residuals(name: str, n: int, shares: Vector, run: tuple[Plan, list[Vector]] | None = None) -> None:
    """Compare with w ← w + Σ p_i·(x_i⁺ − y_i) over the messages of a merge, in order of arrival; y_i ← x_i⁺."""
    plan, found = product_run(name, n=n) if run is None else run
    y = np.tile(START, (CLIENTS, 1))
    w: list[Vector] = [START]
    for record in plan.rounds:
        total = np.zeros_like(START)
        for update, _ in record.merge.updates:  # in order of client and job
            x = w[update.version] - delta(w[update.version], update.client)
            total += shares[update.client] * (x - y[update.client])
            y[update.client] = x
        w.append(w[-1] + total)
    assert_versions(found, w)


@pytest.mark.parametrize("n", [1, 3, CLIENTS])
def test_area_adds_the_changes_of_the_models_that_arrived(n: int) -> None:
    residuals("area", n, SHARES)


def test_a_round_of_area_can_have_two_messages_of_one_client() -> None:
    plan, found = product_run("area", n=6)
    clients = [[update.client for update, _ in record.merge.updates] for record in plan.rounds]
    assert any(len(set(of_round)) < len(of_round) for of_round in clients)
    residuals("area", 6, SHARES, (plan, found))


def test_the_model_of_area_is_the_mean_of_the_last_models_of_all_clients() -> None:
    plan, found = product_run("area", n=3)
    y = np.tile(START, (CLIENTS, 1))
    for record in plan.rounds:
        for update, _ in record.merge.updates:
            y[update.client] = found[update.version] - delta(found[update.version], update.client)
    np.testing.assert_allclose(found[-1], y.mean(axis=0), rtol=1e-10)


def test_asofed_replaces_one_model_per_arrival() -> None:
    plan, found = product_run("asofed")
    assert all(len(record.merge.updates) == 1 for record in plan.rounds)
    residuals("asofed", 3, SHARES, (plan, found))


def test_asofed_with_equal_weights_is_area_with_one_update_per_merge() -> None:
    _, asofed = product_run("asofed")
    _, area = product_run("area", n=1)
    assert_versions(asofed, area)


@pytest.mark.parametrize("window", [1, 2, 5, 11])
def test_fedfa_is_the_mean_of_the_latest_models(window: int) -> None:
    plan, found = product_run("fedfa", own={"window": window})
    latest: list[Vector] = [START] * window
    w: list[Vector] = [START]
    for record in plan.rounds:
        ((update, _),) = record.merge.updates
        latest = [*latest[1:], w[update.version] - delta(w[update.version], update.client)]
        w.append(np.mean(latest, axis=0))
    assert_versions(found, w)


@pytest.mark.parametrize("threshold", [0, 1, 2])
def test_fadas_is_amsgrad_on_the_mean_update(threshold: int) -> None:
    plan, found = product_run("fadas", own={"delay_threshold": threshold}, global_lr=0.05, server_beta2=0.9)
    m, v, largest_v = (np.zeros_like(START) for _ in range(3))
    w: list[Vector] = [START]
    divided = decreased = 0
    for record in plan.rounds:
        merged = [update for update, _ in record.merge.updates]
        g = np.mean([delta(w[update.version], update.client) for update in merged], axis=0)
        tau = max(len(w) - 1 - update.version for update in merged)
        m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g**2
        largest_v = np.maximum(largest_v, v)
        decreased += bool(np.any(v < largest_v))  # otherwise √v would give the same
        late = threshold > 0 and tau > threshold
        divided += late
        w.append(w[-1] - (0.05 / tau if late else 0.05) * m / (np.sqrt(largest_v) + 1e-3))
    assert_versions(found, w)
    assert decreased > 10
    assert (threshold > 0) == (divided > 0)
    assert divided < len(plan.rounds)


def quafl_oracle(plan: Plan) -> list[Vector]:
    """Return the versions of QuAFL without quantisation."""
    x = np.tile(START, (CLIENTS, 1))
    w: list[Vector] = [START]
    for record in plan.rounds:
        drawn = record.merge.updates
        s = len(drawn)
        for update, _ in drawn:
            x[update.client] -= delta(x[update.client], update.client, update.steps)
        w.append((w[-1] + sum(x[update.client] for update, _ in drawn)) / (s + 1))
        for update, _ in drawn:
            x[update.client] = (w[-2] + s * x[update.client]) / (s + 1)
    return w


@pytest.mark.parametrize("n", [1, 3, CLIENTS])
def test_quafl_mixes_the_models_of_the_server_and_of_drawn_clients(n: int) -> None:
    plan, found = product_run("quafl", n=n, own={"bits": 32, "wait_seconds": 0.05})
    steps = {update.steps for record in plan.rounds for update, _ in record.merge.updates}
    assert len(steps) > 1  # some jobs are interrupted
    assert_versions(found, quafl_oracle(plan))


def test_quafl_with_very_fine_quantisation_is_the_rule_without() -> None:
    plan, found = product_run("quafl", own={"bits": 52, "wait_seconds": 0.05})
    assert all("quantise(52)" in {a.transform for a in record.merge.assignments} for record in plan.rounds)
    assert_versions(found, quafl_oracle(plan))


def test_quantisation_of_quafl_is_visible_and_small() -> None:
    plan, found = product_run("quafl", own={"bits": 8, "wait_seconds": 0.05})
    difference = np.abs(found[-1] - quafl_oracle(plan)[-1]).max()
    assert 1e-6 < difference < 0.02


def test_fewer_bits_make_the_messages_of_quafl_shorter() -> None:
    tables = small(CLIENTS, 3) | {"clients": {"num_clients": CLIENTS, "model_megabytes": 40.0}}
    ends = [
        make_plan(settings("quafl", **tables, quafl={"bits": bits, "wait_seconds": 5.0}), 0, 10).uploads
        for bits in (8, 32)
    ]
    short, long = (uploads[0].end - uploads[0].start for uploads in ends)
    assert short == pytest.approx(long / 4)


def test_quafl_starts_jobs_from_the_clients_own_models() -> None:
    how = settings("quafl", **small(CLIENTS, 3, global_lr=GLOBAL_LR))
    executor = make_executor(how, 0, PROBLEM.task)
    plan = make_plan(how, 0, 60)
    for record in plan.rounds[:-1]:
        executor.apply(record)
    starts = {executor.start_of(update).numpy().tobytes() for update, _ in plan.rounds[-1].merge.updates}
    assert len(starts) == 3
    assert executor.local_training.global_lr == 1.0  # it has no global rate


@pytest.mark.parametrize(
    ("name", "setting", "words"),
    [
        ("area", "concurrency=-1", ("area: concurrency is -1", "0 for all")),
        ("area", "concurrency=9", ("area: concurrency is 9 but there are 7 clients",)),
        ("asofed", "concurrency=-2", ("asofed: concurrency is -2", "0 for all")),
        ("quafl", "bits=1", ("quafl: bits is 1", "2 to 52")),
        ("quafl", "bits=53", ("quafl: bits is 53", "2 to 52")),
        ("quafl", "wait_seconds=0.0", ("quafl: wait_seconds is 0.0", "above zero")),
        ("quafl", "updates_per_round=8", ("quafl: updates_per_round is 8 but there are 7 clients",)),
        ("fadas", "delay_threshold=-1", ("fadas: delay_threshold is -1", "0 for none")),
        ("fedfa", "window=0", ("fedfa: window is 0", "1 to 10,000")),
        ("fedfa", "window=2.5", ("fedfa.window", "2.5")),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    tmp_path: Path, name: str, setting: str, words: tuple[str, ...]
) -> None:
    text = f'algorithms = ["{name}"]\n[task]\nmodel = "softmax"\n[clients]\nnum_clients = {CLIENTS}\n'
    unused = name in ("asofed", "fedfa") or "updates_per_round" in setting
    rounds = "" if unused else "[training]\nupdates_per_round = 3\n"
    (tmp_path / "study.toml").write_text(text + rounds, encoding="utf-8")
    refuse(call("run", "study.toml", "--set", f"{name}.{setting}", cwd=tmp_path), *words)
