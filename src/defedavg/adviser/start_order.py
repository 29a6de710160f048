"""The order in which candidates start: every shape with its usual rates, then every shape with the next ones.

The usual local rate is 2/L, the largest at which gradient descent on a quadratic of curvature L is stable. The usual
global rate is 1/√(1 + staleness): about as many updates as the staleness start from the same version, and their noise
adds up. Where an algorithm has a global rate alone, it steps along single gradients: the usual rate is the largest at
which gradient descent with such a delay is stable, 2/L · sin(π / (2 (2 staleness + 1))). Server optimisers that
normalise their step start in the middle of their axis. Between two rates that are as near, the larger one starts: it
learns faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping

from ..rng import key, permutation
from .candidates import ADAPTIVE, RATES, AlgorithmGrid, Axis, GridCell, PlanShape
from .screening import PlannedShape


def start_order(
    grids: Mapping[str, AlgorithmGrid],
    plans: Mapping[PlanShape, PlannedShape],
    excluded: Collection[GridCell],
    usual_rate: float | None,
    seed: int,
) -> Iterator[list[GridCell]]:
    """Yield turns: the first has every shape with its usual rates, algorithms in turn and their shapes drawn by key."""
    by_algorithm: dict[str, list[list[GridCell]]] = {}
    shapes = list(plans)
    for i in permutation(key(seed, "advise.order"), len(shapes)).tolist():
        shape = shapes[i]
        grid = grids[shape.algorithm]
        cells = [GridCell(shape.algorithm, (*shape.position, *rates)) for rates in grid.rate_positions()]
        cells = [each for each in cells if each not in excluded]
        staleness = plans[shape].stats.staleness_mean
        cells.sort(key=lambda each: _place(grid, each, usual_rate, staleness))
        by_algorithm.setdefault(shape.algorithm, []).append(cells)
    in_turn = [cells for turn in itertools.zip_longest(*by_algorithm.values()) for cells in turn if cells]
    for turn in itertools.zip_longest(*in_turn):
        yield [each for each in turn if each is not None]


def _place(grid: AlgorithmGrid, candidate: GridCell, usual_rate: float | None, staleness: float) -> tuple[float, ...]:
    """Return the key by which the rates of a shape are sorted; of equal distances, the larger rates come first."""
    rates = grid.rates(candidate).values()
    return round(distance(grid, candidate, usual_rate, staleness), 9), *(-rate for rate in rates)


def distance(grid: AlgorithmGrid, candidate: GridCell, usual_rate: float | None, staleness: float) -> float:
    """Return how far the rates of a candidate are from the usual ones, as the sum of their absolute log ratios."""
    axes = grid.axes[len(grid.shape_axes) :]
    position = candidate.position[len(grid.shape_axes) :]
    total = 0.0
    for axis, i in zip(axes, position, strict=True):
        usual = _usual(grid, axis, usual_rate, staleness)
        total += abs(math.log(axis.values[i] / min(max(usual, min(axis.values)), max(axis.values))))
    return total


def _usual(grid: AlgorithmGrid, axis: Axis, local: float | None, staleness: float) -> float:
    middle = math.sqrt(min(axis.values) * max(axis.values))
    if axis.name == RATES[1]:
        return middle if local is None else local
    if grid.base.server_optimizer in ADAPTIVE:
        return middle
    if grid.rate_axes == 2:
        return 1 / math.sqrt(1 + staleness)
    return middle if local is None else local * delayed_stability(staleness)


def delayed_stability(delay: float) -> float:
    """Return the largest stable rate of gradient descent with a delay in versions, relative to that without one.

    On a quadratic of curvature L, w[t+1] = w[t] - η L w[t - delay] is stable for η < 2/L · sin(π / (2 (2 delay + 1))).
    """
    return math.sin(math.pi / (2 * (2 * delay + 1)))
