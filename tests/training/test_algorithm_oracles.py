"""MIFA and FAVANO against independent oracles: plain NumPy, written from their definitions."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from helpers.oracle_runs import CLIENTS, GLOBAL_LR, START, Vector, assert_versions, delta, product_run


def test_mifa_steps_along_the_mean_of_the_last_updates_of_all_clients() -> None:
    plan, found = product_run("mifa")
    last = np.zeros((CLIENTS, len(START)))
    w: list[Vector] = [START]
    for record in plan.rounds:
        for update, _ in record.merge.updates:
            last[update.client] = delta(w[update.version], update.client)
        w.append(w[-1] - GLOBAL_LR * last.mean(axis=0))
    assert_versions(found, w)


def test_mifa_with_all_clients_in_every_round_is_fedavg() -> None:
    _, mifa = product_run("mifa", n=CLIENTS)
    _, fedavg = product_run("fedavg", n=CLIENTS, own={"replacement": False})
    assert_versions(mifa, fedavg)


def favano(anchor: str, reweight: str, n: int) -> tuple[list[Vector], list[Vector], int]:
    """Return the versions that the product and the oracle compute, and the number of stale or partial updates."""
    own = {"anchor": anchor, "reweight": reweight, "wait_seconds": 0.02}
    plan, found = product_run("favano", n=n, steps=30, own=own)
    w: list[Vector] = [START]
    answers: dict[int, list[int]] = defaultdict(list)
    uneven = 0
    for record in plan.rounds:
        returned, progress = np.zeros_like(START), np.zeros_like(START)
        for update, _ in record.merge.updates:
            q = update.steps
            of_client = answers[update.client]
            of_client.append(q)
            busy = sum(steps > 0 for steps in of_client) / len(of_client)
            alpha = {"deterministic": sum(of_client) / len(of_client), "stochastic": busy * q, "none": 30}[reweight]
            change = delta(w[update.version], update.client, q) / alpha if q else np.zeros_like(START)
            returned += w[update.version] - change
            progress += change
            uneven += update.version < record.merge.version - 1 or 0 < q < 30
        s = len(record.merge.updates)
        w.append((w[-1] + returned) / (s + 1) if anchor == "start" else w[-1] - progress / (s + 1))
    return found, w, uneven


@pytest.mark.parametrize("anchor", ["start", "newest"])
@pytest.mark.parametrize("reweight", ["stochastic", "deterministic", "none"])
@pytest.mark.parametrize("n", [1, 3])
def test_favano_applies_the_normalised_progress_to_its_anchor(anchor: str, reweight: str, n: int) -> None:
    found, expected, uneven = favano(anchor, reweight, n)
    assert uneven > 30
    assert_versions(found, expected)


def test_the_anchors_of_favano_are_equal_if_every_client_started_from_the_newest_version() -> None:
    """If every round draws all clients, all receive the new version; otherwise start versions differ."""
    runs = [product_run("favano", n=CLIENTS, own={"anchor": anchor}) for anchor in ("start", "newest")]
    for plan, _ in runs:
        assert {delay for record in plan.rounds for delay in record.merge.staleness} == {0}
    assert_versions(runs[1][1], runs[0][1])
    stale = [product_run("favano", n=3, own={"anchor": anchor})[1] for anchor in ("start", "newest")]
    assert np.abs(stale[0][-1] - stale[1][-1]).max() > 1e-3
