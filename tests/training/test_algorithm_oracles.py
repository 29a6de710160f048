"""Every algorithm with state against an independent oracle: plain NumPy, written from its definition."""

from __future__ import annotations

import numpy as np

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
