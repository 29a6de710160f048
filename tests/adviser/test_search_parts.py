"""The parts of the adviser: grids, intervals, and reasons computed from plans and splits."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.adviser.candidates import AlgorithmGrid, PlanShape, grids_of
from defedavg.adviser.confidence import SMALL, TimeInterval, log_deviation, quantile, ratio
from defedavg.adviser.reasons import _facts
from defedavg.adviser.screening import Holders, horizon_of, plan_shape, screen
from defedavg.algorithms import ALGORITHMS
from defedavg.cli.advise_command import parse_budget
from defedavg.config import study as config
from defedavg.errors import UserError


def grids(*names: str, **tables: dict[str, object]) -> dict[str, AlgorithmGrid]:
    return grids_of(config.study({"clients": {"num_clients": 20}, **tables}), names, 0)


def test_the_default_grid_has_thousands_of_candidates_of_every_algorithm() -> None:
    found = grids(*ALGORITHMS, clients={"num_clients": 100})
    cells = {name: len(list(grid.shapes())) * len(grid.rate_positions()) for name, grid in found.items()}
    assert set(cells) == set(ALGORITHMS)
    assert sum(cells.values()) > 5000


def test_a_list_of_the_study_is_an_axis_and_unused_settings_are_not() -> None:
    training = {"updates_per_round": [7], "local_lr": [0.1, 0.2]}
    found = grids("fedasync", "fedbuff", training=training, fedbuff={"concurrency": [9]})
    buffered = {axis.name: axis.values for axis in found["fedbuff"].axes}
    assert buffered["training.updates_per_round"] == (7,)
    assert buffered["fedbuff.concurrency"] == (9,)
    assert buffered["training.local_lr"] == (0.1, 0.2)
    names = {axis.name for axis in found["fedasync"].axes}
    assert not names & {"training.updates_per_round", "training.global_lr"}


@given(st.data())
def test_neighbours_are_cells_and_neighbourhood_is_symmetric(data: st.DataObject) -> None:
    grid = grids("fedbuff")["fedbuff"]
    position = tuple(data.draw(st.integers(0, len(axis.values) - 1)) for axis in grid.axes)
    for other in grid.neighbours(position):
        assert other != position
        assert position in set(grid.neighbours(other))
        grid.settings(other)


def test_settings_have_the_chosen_values() -> None:
    grid = grids("fedbuff")["fedbuff"]
    position = tuple(len(axis.values) - 1 for axis in grid.axes)
    flat = grid.settings(position).flat()
    assert {name: flat[name] for name in grid.chosen(position)} == grid.chosen(position)


def test_intervals_have_their_closed_form() -> None:
    found = TimeInterval.of([1.0, math.e])
    assert found.mean == pytest.approx(math.exp(0.5))
    assert found.high == pytest.approx(
        math.exp(0.5 + 6.314 * 0.5)
    )  # the standard error of two values is half their gap
    assert TimeInterval.of([3.0]).low is None
    least = TimeInterval.of([2.0, 2.0, 2.0], 0.1)
    assert least.low == pytest.approx(2.0 / math.exp(2.920 * 0.1 / math.sqrt(3)))
    assert TimeInterval.of([1.0, math.e], 0.1) == found  # the least value is below the standard deviation
    paired = ratio({1: 2.0, 2: 20.0, 9: 1.0}, {1: 1.0, 2: 10.0})
    assert paired is not None
    assert (paired.low, paired.mean, paired.high) == pytest.approx((2.0, 2.0, 2.0))
    assert ratio({1: 1.0}, {2: 1.0}) is None


def integrated_deviation(share: float) -> float:
    """Return the standard deviation of log U by Gauss-Legendre quadrature in s = log u, where u is uniform."""
    low = 60.0 if share == 1.0 else -math.log1p(-share)
    nodes, weights = np.polynomial.legendre.leggauss(200)
    logs, density = low / 2 * (nodes - 1), low / 2 * weights * np.exp(low / 2 * (nodes - 1)) / share
    mean = float(density @ logs)
    return math.sqrt(float(density @ (logs - mean) ** 2))


@given(st.floats(1e-9, 1.0))
def test_the_deviation_of_the_logarithm_of_a_uniform_time_is_that_of_numerical_integration(share: float) -> None:
    assert log_deviation(share) == pytest.approx(integrated_deviation(share), rel=1e-9)


def test_the_deviation_of_a_logarithm_has_its_limits_and_no_step_between_series_and_closed_form() -> None:
    assert (log_deviation(0.0), log_deviation(1.0)) == (0.0, 1.0)
    assert log_deviation(1e-12) == pytest.approx(1e-12 / math.sqrt(12), rel=1e-9)
    edge = -math.expm1(-2 * SMALL)
    shares = [edge * (1 + step * 1e-9) for step in range(-3, 4)]
    found = [log_deviation(share) / share for share in shares]
    assert found == pytest.approx([found[0]] * len(found), rel=1e-9)


def test_quantiles_fall_to_the_normal_one() -> None:
    values = [quantile(degrees) for degrees in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(NormalDist().inv_cdf(0.95), abs=0.02)


def test_reasons_name_the_classes_of_clients_that_are_heard_less() -> None:
    counts = np.zeros((20, 4), np.int64)
    found = grids("defedavg-iid", "fedavg", clients={"num_clients": 20, "slowness": "two-speed(0.5, 8)"})
    plans = {
        name: plan_shape(grid, PlanShape(name, (0,) * len(grid.shape_axes)), 20.0, 0) for name, grid in found.items()
    }
    slow = plans["defedavg-iid"].merged < np.median(plans["defedavg-iid"].merged)
    counts[:, 0], counts[slow, 0], counts[slow, 3] = 10, 0, 10
    holders = Holders(counts)
    (factor, text), *_ = sorted(_facts(plans["defedavg-iid"], plans["fedavg"], holders), reverse=True)
    heard = [holders.heard(plans[name].merged) for name in ("defedavg-iid", "fedavg")]
    assert heard[0] is not None
    assert heard[1] is not None
    texts = [words for _, words in _facts(plans["defedavg-iid"], plans["fedavg"], holders)]
    expected = f"hold class 3 are heard {heard[0][3] / heard[1][3]:.2f} times as often"
    assert any(expected in words for words in texts), (factor, text)


def test_a_class_is_heard_by_its_share_if_all_clients_are_heard_equally() -> None:
    counts = np.array([[4, 0], [1, 3], [0, 9]])
    heard = Holders(counts).heard(np.full(3, 5))
    assert heard is not None
    assert heard == pytest.approx([1.0, 1.0])
    assert Holders(counts).unheard(np.array([0, 5, 5])) == [0]
    assert Holders(None).heard(np.ones(3, np.int64)) is None


def test_equal_plans_and_refused_settings_are_dropped_with_the_reason() -> None:
    found = grids("fedbuff", training={"updates_per_round": [30], "local_steps": [5]}, fedbuff={"concurrency": [20, 0]})
    screening = screen(found, 5.0, 0, Holders(None), lambda *_: None)
    assert len(screening.kept) == 1
    (reason,) = screening.dropped.values()
    assert reason.startswith("has the same plan as fedbuff n=30 K=5 concurrency=20")


def test_one_setting_is_counted_in_the_singular() -> None:
    training: dict[str, object] = {"updates_per_round": [2], "local_steps": [5]}
    texts: list[str] = []
    found = grids("fedavg", training=training)
    screen(found, 5.0, 0, Holders(None), lambda text, _: texts.append(text))
    assert set(texts) == {"planning 1 setting"}
    with pytest.raises(UserError, match=r"no planned setting .*; 1 of 1 setting: merges no update within"):
        screen(found, 1e-6, 0, Holders(None), lambda *_: None)


def test_the_horizon_is_that_of_the_study_or_of_its_rounds() -> None:
    (point,) = config.study({"stop": {"max_rounds": 3}}).points()
    (longer,) = config.study({"stop": {"max_rounds": 6}}).points()
    (given_,) = config.study({"stop": {"max_seconds": 9.0}}).points()
    assert 0 < horizon_of(point.settings, 0) < horizon_of(longer.settings, 0)
    assert horizon_of(given_.settings, 0) == 9.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, (None, None)), ("20k", (20_000.0, None)), ("300", (300.0, None)), ("2m", (None, 120.0))],
)
def test_budgets_are_updates_or_times(text: str | None, expected: tuple[float | None, float | None]) -> None:
    assert parse_budget(text) == expected


@pytest.mark.parametrize("text", ["0", "-3", "1.2.3", "5x", "1e99"])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--budget"):
        parse_budget(text)
