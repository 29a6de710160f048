"""``training.weighting = "samples"``: updates count in proportion to the samples of their clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from defedavg.algorithms import ALGORITHMS
from defedavg.algorithms.protocol import Merge
from defedavg.config.build import build_task, make_executor, make_plan
from defedavg.planning.plan import Plan
from helpers.command_line import call, refuse
from helpers.oracle_runs import CLIENTS, GLOBAL_LR, LOCAL_LR, START, STEPS, Vector, assert_versions, delta
from helpers.settings_tables import settings, small

COUNTS = np.array([1, 2, 3, 4, 1, 2, 3])
UNEQUAL_TASK = """
from dataclasses import replace
from defedavg.tasks import least_squares

def make(config, client):
    task = least_squares(7, noise=0.0, heterogeneity=1.0, samples_per_client=4).task
    return replace(task, clients=[samples[: 1 + i % 4] for i, samples in enumerate(task.clients)])
"""
WEIGHTED = [name for name, kind in ALGORITHMS.items() if "samples" in kind.weightings]
REFUSING = [name for name in ALGORITHMS if name not in WEIGHTED]
STUDY = """
algorithms = [{names}]
[task]
module = "unequal.py:make"
[training]
updates_per_round = 3
local_steps = 3
weighting = "samples"
[stop]
max_rounds = 4
"""


@pytest.fixture(name="module")
def unequal_module(tmp_path: Path) -> str:
    """Write a task whose clients have COUNTS samples."""
    (tmp_path / "unequal.py").write_text(UNEQUAL_TASK, encoding="utf-8")
    return f"{tmp_path / 'unequal.py'}:make"


def weighted_run(
    module: str, name: str, own: dict[str, Any] | None = None, **training: Any
) -> tuple[Plan, list[Vector]]:
    """Return 60 rounds of an algorithm that weights updates by samples."""
    rates = {"local_lr": LOCAL_LR, "global_lr": GLOBAL_LR, "weighting": "samples"}
    tables = small(CLIENTS, 3, STEPS, **{**rates, **training})
    how = settings(name, task={"module": module}, **tables, **({name: own} if own else {}))
    plan, executor = make_plan(how, 0, 60), make_executor(how, 0, build_task(how, 0))
    plan.check()
    return plan, [START, *(executor.apply(record).numpy().copy() for record in plan.rounds)]


def weighted_mean(merge: Merge, w: list[Vector], factors: Vector) -> Vector:
    weights = factors * COUNTS[[update.client for update, _ in merge.updates]]
    deltas = [delta(w[update.version], update.client) for update, _ in merge.updates]
    return np.asarray(np.average(deltas, axis=0, weights=weights))


@pytest.mark.parametrize(
    ("name", "own"), [("fedavg", {"replacement": False}), ("fedbuff", {}), ("defedavg-iid", {}), ("fadas", {})]
)
def test_a_round_is_the_mean_weighted_by_samples(module: str, name: str, own: dict[str, Any]) -> None:
    plan, found = weighted_run(module, name, own, server_optimizer="sgd")
    w = [START]
    for record in plan.rounds:
        w.append(w[-1] - GLOBAL_LR * weighted_mean(record.merge, w, np.ones(len(record.merge.updates))))
    assert_versions(found, w)


@pytest.mark.parametrize("name", ["fedavg", "defedavg-niid"])
def test_a_client_drawn_twice_counts_twice(module: str, name: str) -> None:
    """The unweighted plan says how often each client was drawn: it draws the same clients."""
    plan, found = weighted_run(module, name)
    uniform, _ = weighted_run(module, name, weighting="uniform")
    w, twice = [START], False
    for record, plain in zip(plan.rounds, uniform.rounds, strict=True):
        assert [u for u, _ in record.merge.updates] == [u for u, _ in plain.merge.updates]
        drawn = np.array([round(-3 * b) for _, b in plain.merge.updates])
        twice |= bool((drawn > 1).any())
        w.append(w[-1] - GLOBAL_LR * weighted_mean(record.merge, w, drawn))
    assert twice
    assert_versions(found, w)


def test_staleness_and_samples_multiply_in_fedbuff(module: str) -> None:
    """Weights of samples sum to one; a stale update then loses a part of its weight."""
    plan, found = weighted_run(module, "fedbuff", {"staleness": "sqrt"})
    w = [START]
    for record in plan.rounds:
        updates = [update for update, _ in record.merge.updates]
        counts = COUNTS[[update.client for update in updates]]
        stale = [1 / np.sqrt(len(w) - update.version) for update in updates]
        parts = zip(updates, counts, stale, strict=True)
        w.append(w[-1] - GLOBAL_LR * sum(s * c / counts.sum() * delta(w[u.version], u.client) for u, c, s in parts))
    assert_versions(found, w)


def test_asofed_weights_clients_by_their_share_of_all_samples(module: str) -> None:
    plan, found = weighted_run(module, "asofed")
    models, w = np.tile(START, (CLIENTS, 1)), [START]
    for record in plan.rounds:
        ((update, _),) = record.merge.updates
        fresh = w[update.version] - delta(w[update.version], update.client)
        w.append(w[-1] - COUNTS[update.client] / COUNTS.sum() * (models[update.client] - fresh))
        models[update.client] = fresh
    assert_versions(found, w)


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_command_line_weights_by_samples(module: str, tmp_path: Path, name: str) -> None:
    del module  # written to the folder
    (tmp_path / "study.toml").write_text(STUDY.format(names=f'"{name}"'), encoding="utf-8")
    done = call("run", "study.toml", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", REFUSING)
def test_an_algorithm_that_cannot_weight_by_samples_refuses_before_any_run(
    module: str, tmp_path: Path, name: str
) -> None:
    del module
    (tmp_path / "study.toml").write_text(STUDY.format(names=f'"fedavg", "{name}"'), encoding="utf-8")
    refused = call("run", "study.toml", "--out", "out", cwd=tmp_path)
    refuse(refused, f"{name} cannot weight updates by samples", f"[{name}]")
    assert not list((tmp_path / "out").glob("**/metrics.jsonl"))
    assert "weighting = 'uniform'" in refused.stderr


def test_a_table_of_an_algorithm_sets_its_own_weighting(module: str, tmp_path: Path) -> None:
    del module
    text = STUDY.format(names='"fedavg", "favano"') + '[favano]\nweighting = "uniform"\n'
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")
    assert call("run", "study.toml", "--out", "out", cwd=tmp_path).returncode == 0


def test_an_unknown_weighting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('[training]\nweighting = "sample"\n', encoding="utf-8")
    refuse(call("run", "study.toml", cwd=tmp_path), "training.weighting", "'sample'", "samples")
