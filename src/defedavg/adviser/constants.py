"""What theory says of candidates, with constants measured on the task: which rates are unstable, which are covered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import UserError
from ..jsonio import three_digits
from ..tasks import Task
from ..theory.estimates import EstimateOptions, Estimates, Notify, estimate
from ..theory.formulas import THEOREMS
from .candidates import RATES, AlgorithmGrid, GridCell, PlanShape
from .screening import PlannedShape

UNSTABLE = 10.0
"""Local rates above UNSTABLE/L are not tried: gradient descent on a quadratic of curvature L diverges above 2/L."""
USUAL = 2.0
"""The search starts at the local rate nearest to USUAL/L, the largest that is stable on such a quadratic."""


@dataclass(frozen=True, slots=True)
class TaskConstants:
    """The constants of the theorems for a task, or why there are none."""

    estimates: Estimates | None
    note: str

    @property
    def usual_rate(self) -> float | None:
        """The local rate at which the search starts."""
        return None if self.estimates is None else USUAL / self.estimates.smoothness

    @property
    def largest_rate(self) -> float:
        """The largest local rate that is tried."""
        return float("inf") if self.estimates is None else UNSTABLE / self.estimates.smoothness


def measure(task: Task, batch_size: int, seed: int, notify: Notify) -> TaskConstants:
    """Estimate the constants on a few samples of every client: a screening needs their order of magnitude only."""
    options = EstimateOptions(batch_size, seed, points=2, hessians=3, samples=8, tolerance=1e-2)
    try:
        found = estimate(task, options, notify=notify)
    except (UserError, RuntimeError, NotImplementedError) as error:
        return TaskConstants(None, f"the constants of the theory cannot be measured on this task: {error}")
    if not found.smoothness > 0:
        return TaskConstants(None, "the curvature of the task is zero, so the theory has no rates")
    return TaskConstants(found, f"L = {three_digits(found.smoothness)}: {found.note}")


def excluded_by(grid: AlgorithmGrid, candidate: GridCell, constants: TaskConstants) -> str | None:
    """Return why the rates of a candidate are not tried, if so."""
    values = grid.chosen(candidate.position)
    rate = values.get(RATES[1])
    axis = next((axis for axis in grid.axes if axis.name == RATES[1]), None)
    if rate is None or axis is None or rate <= constants.largest_rate or rate == min(axis.values):
        return None
    return f"η̄ = {rate:g} is above {UNSTABLE:g}/L = {three_digits(constants.largest_rate)}, where single steps diverge"


def excluded_cells(
    grids: Mapping[str, AlgorithmGrid], shapes: Iterable[PlanShape], constants: TaskConstants
) -> dict[GridCell, str]:
    """Return the candidates of these shapes whose rates are not tried, and why."""
    found: dict[GridCell, str] = {}
    for shape in shapes:
        grid = grids[shape.algorithm]
        for rates in grid.rate_positions():
            candidate = GridCell(shape.algorithm, (*shape.position, *rates))
            reason = excluded_by(grid, candidate, constants)
            if reason is not None:
                found[candidate] = reason
    return found


def covered(grid: AlgorithmGrid, candidate: GridCell, plan: PlannedShape, constants: TaskConstants) -> str | None:
    """Return whether a theorem covers the rates of a candidate with its planned staleness; None without a theorem."""
    if candidate.algorithm not in THEOREMS or constants.estimates is None:
        return None
    training = grid.settings(candidate.position).training
    staleness = max(1, plan.stats.staleness_max)
    limit = 1 / (4 * constants.estimates.smoothness * training.local_steps * staleness)
    product = training.global_lr * training.local_lr
    verdict = "within" if product <= limit else "above"
    bound = f"1/(4LKλ) = {limit:.3g} for the planned staleness λ = {staleness}"
    return f"ηη̄ = {product:.3g} is {verdict} the theorem's {bound}"
