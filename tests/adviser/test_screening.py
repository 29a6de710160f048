"""Screening: how long plans are judged, and what is said where nothing is left."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from defedavg.adviser import screening
from defedavg.adviser.candidates import AlgorithmGrid, PlanShape, grids_of
from defedavg.adviser.dropped import grouped, kind_of, nothing_left
from defedavg.adviser.screening import LONGER, UPDATES_PER_CLIENT, Holders, Planner, Screening, plan_shape, screen
from defedavg.config import study as config
from defedavg.errors import UserError

CLIENTS = 40
USUAL = UPDATES_PER_CLIENT * CLIENTS
PERIOD = 60.0
WINDOWS = "windows(6, 54)"
TRAINING = {"updates_per_round": [4], "local_steps": [5]}


def grids(*names: str, training: dict[str, Any] | None = None, **clients: object) -> dict[str, AlgorithmGrid]:
    study = {
        "clients": {"num_clients": CLIENTS, "availability": WINDOWS, **clients},
        "training": {"timeout_seconds": [100.0], **TRAINING, **(training or {})},
        "fedbuff": {"concurrency": [0]},
    }
    return grids_of(config.study(study), names, 0)


def one_class_each(classes: int = CLIENTS) -> Holders:
    return Holders(np.repeat(np.eye(classes, dtype=np.int64), CLIENTS // classes, axis=0))


def screened(found: dict[str, AlgorithmGrid], horizon: float, holders: Holders) -> Screening:
    return screen(found, horizon, 0, holders, lambda *_: None)


def test_equal_data_of_few_clients_stand_for_those_of_all() -> None:
    merged = np.zeros(CLIENTS, np.int64)
    merged[:2] = 5
    equal = Holders(np.full((CLIENTS, 3), 7))
    assert equal.unheard(merged) == []
    assert one_class_each().unheard(merged) == list(range(2, CLIENTS))


def test_a_plan_goes_on_until_the_clients_that_are_away_at_first_are_heard() -> None:
    found = grids("fedbuff")
    shape = PlanShape("fedbuff", (0,) * len(found["fedbuff"].shape_axes))
    short = plan_shape(found["fedbuff"], shape, 1e6, 0)
    assert short.seconds >= PERIOD  # goes on for the speed
    kept = screened(found, PERIOD, one_class_each()).kept[shape]
    assert one_class_each().unheard(kept.merged) == []
    assert USUAL < kept.stats.jobs_merged <= LONGER * USUAL


def test_a_plan_that_ends_before_the_horizon_drops_no_shape_for_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screening, "LONGER", 1)
    (plan,) = screened(grids("fedbuff"), PERIOD, one_class_each()).kept.values()
    assert one_class_each().unheard(plan.merged)
    assert (plan.whole, plan.typical) == (False, False)
    assert plan.stats.jobs_merged == USUAL


def test_a_distant_horizon_is_not_planned_for_nothing() -> None:
    found = grids("fedbuff", availability="windows(1e5, 9e5)")
    (plan,) = screened(found, 1e6, one_class_each()).kept.values()
    assert one_class_each().unheard(plan.merged)
    assert plan.stats.jobs_merged == USUAL
    assert (plan.whole, plan.typical) == (False, False)


def test_all_plans_together_go_on_by_a_limited_number_of_updates() -> None:
    planner = Planner(PERIOD, 0, one_class_each(), longer=2500)
    found = grids("fedbuff", training={"local_steps": [4, 5, 6]})["fedbuff"]
    merged = [planner.plan(found, shape).stats.jobs_merged for shape in found.shapes()]
    assert sum(merged) <= len(merged) * USUAL + 2500 + TRAINING["updates_per_round"][0]
    assert merged[0] > USUAL
    assert merged[-1] == USUAL


def test_a_class_that_is_not_heard_until_the_horizon_is_a_reason(tmp_path: Path) -> None:
    trace = tmp_path / "late.csv"
    rows = "".join(f"{i},0.01,100,100,{0 if i else 50},100,\n" for i in range(CLIENTS))
    trace.write_text("client,step_seconds,up_mbps,down_mbps,available_from,available_to,repeat_every\n" + rows)
    found = grids("fedbuff", availability="always", trace=str(trace))
    line = (
        r"1 of 1 setting: never hears the clients that hold class 0 within 40 s; check \[clients\], or set a longer "
        "stop.max_seconds"
    )
    with pytest.raises(UserError, match=line):
        screened(found, 40.0, one_class_each())
    assert screened(found, 60.0, one_class_each()).kept


def test_a_speed_counts_only_over_a_period_of_availability() -> None:
    # With one local step, transfers take most of the time.
    training = {"local_steps": [1, 2000]}
    always, windows = (
        screened(grids("fedbuff", training=training, availability=given), 1e6, Holders(None)).dropped
        for given in ("always", "windows(1e5, 9e5)")
    )
    assert len(always) == 1
    assert all(" local steps a second, fedbuff n=4 K=2000" in reason for reason in always.values())
    assert windows == {}


@pytest.mark.parametrize(
    ("clients", "period"),
    [({"availability": "always"}, 0.0), ({}, PERIOD), ({"availability": "phones"}, 86400.0)],
)
def test_the_period_of_availability(clients: dict[str, Any], period: float) -> None:
    from defedavg.config.build import make_fleet

    assert make_fleet(grids("fedbuff", **clients)["fedbuff"].base, 0).period == period


def test_reasons_are_of_one_kind_whatever_their_numbers_and_settings() -> None:
    reasons = [
        "never hears the clients that hold class 3 within 3.58 min",
        "never hears the clients that hold class 12 within 1,200 s",
        "has the same plan as fedbuff n=30 K=5 concurrency=20",
        "has the same plan as ace K=5",
        "merges 31 local steps a second, quafl n=2 K=5 merges 1,670",
        "merges 1,031 local steps a second, fedavg n=2 K=5 merges 9",
    ]
    assert len({kind_of(reason) for reason in reasons}) == 3
    groups = grouped([(str(i), reason) for i, reason in enumerate([*reasons, reasons[0]])])
    assert [len(group) for group in groups] == [3, 2, 2]
    assert groups[0][0] == ("0", reasons[0])


@pytest.mark.parametrize(
    ("reason", "scheduled", "remedy"),
    [
        ("merges no update within 2 s", True, "check when clients are available, or set a longer stop.max_seconds"),
        ("merges no update within 2 s", False, "set a longer stop.max_seconds, or lower training.updates_per_round"),
        ("refused: mifa cannot", True, "change what is refused, or leave these --algorithms out"),
        ("never hears the clients that hold class 1", True, "check [clients], or set a longer stop.max_seconds"),
    ],
)
def test_the_remedy_fits_the_most_frequent_reason(reason: str, scheduled: bool, remedy: str) -> None:
    dropped = [("a", "has the same plan as b K=1"), ("c", reason), ("d", reason)]
    line = nothing_left(dropped, 3, 2.0, scheduled=scheduled)
    assert line == (f"no planned setting can be advised for 2 s of simulated time; 2 of 3 settings: {reason}; {remedy}")


def test_more_updates_per_round_than_clients_are_refused_where_a_client_counts_once() -> None:
    many = {"updates_per_round": [2 * CLIENTS]}
    names = ("fedavg", "defedavg-niid", "fedbuff", "defedavg-iid", "quafl")
    done = screened(grids(*names, training=many, availability="always"), 20.0, Holders(None))
    refused = {shape.algorithm for shape, reason in done.dropped.items() if reason.startswith("refused: ")}
    assert refused == {"defedavg-iid", "quafl"}
    niid = next(plan for shape, plan in done.kept.items() if shape.algorithm == "defedavg-niid")
    # Clients are drawn with replacement, so one that is drawn twice has twice the weight, and uploads once.
    assert niid.stats.jobs_merged < CLIENTS * niid.stats.rounds
    assert math.isfinite(niid.steps_per_second)
