"""The constants of the theorems, estimated for a task: a model, data, and who holds which of them.

By default every sample of every client counts, so that σ², G², ν² and F(w⁰) are exact at the points looked at; only L,
for which a few clients are drawn, is a sample. σ², G² and ν² are means over clients, and may be: the proof of Theorem 1
uses them in no other way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UserError
from ..rng import extend, extend_all, key, normal_all, permutation, uniform
from ..tasks import LeastSquares, Task
from .formulas import Constants
from .objective import Objective, Samples

Say = Callable[[str], None]

STEPS: Final = 50  # of SGD, from one point that is looked at to the next


def largest_curvature(
    objective: Objective,
    weights: Tensor,
    samples: Samples,
    *,
    seed: int = 0,
    tolerance: float = 1e-4,
    most: int = 200,
) -> float:
    """The largest |eigenvalue| of the Hessian, by power iteration from a keyed direction; it approaches from below."""
    keys = extend_all(key(seed, "theory.direction"), np.arange(len(objective.start)))
    direction = torch.from_numpy(normal_all(keys)).to(objective.start)
    direction /= direction.norm()
    found = 0.0
    for _ in range(most):
        image = objective.curve(weights, direction, samples)
        before, found = found, float(image.norm())
        if found == 0.0 or abs(found - before) <= tolerance * found:
            break
        direction = image / found
    return found


@dataclass(frozen=True, slots=True)
class Estimates:
    """What was found; each the largest over the points looked at. ``note`` says on which samples."""

    smoothness: float
    noise: float  # mean over clients, and the largest below: of single clients
    noise_most: float
    gradient: float
    gradient_most: float
    heterogeneity: float
    heterogeneity_most: float
    gap: float
    batch_size: int
    note: str

    def constants(self, **size: int) -> Constants:
        """The constants of a run of that size: ``updates_per_round``, ``local_steps``, and so on."""
        return Constants(
            smoothness=self.smoothness,
            noise=self.noise,
            gradient=self.gradient,
            heterogeneity=self.heterogeneity,
            gap=self.gap,
            **size,
        )


@dataclass(frozen=True, slots=True)
class Probe:
    """Where to look and how closely: points on a path of SGD, clients asked for their Hessian, samples of each."""

    batch_size: int = 10
    seed: int = 0
    points: int = 3
    hessians: int = 10
    samples: int | None = None  # of each client; all if not given
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("batch_size", "points", "hessians", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")


def estimate(task: Task, probe: Probe | None = None, *, minimum: float = 0.0, say: Say | None = None) -> Estimates:
    """Estimate every constant; ``minimum`` is the best known lower bound of F (0 for the losses built in)."""
    probe, say = probe or Probe(), say or (lambda _: None)
    objective = Objective(task, probe.seed)
    shares = [_some(own, probe, i) for i, own in enumerate(task.clients)]
    asked = sorted(permutation(key(probe.seed, "theory.clients"), task.num_clients)[: probe.hessians].tolist())
    weights = objective.start
    gap = float(np.mean([objective.value(weights, own) for own in shares])) - minimum
    if not gap > 0:
        raise UserError(f"F(w⁰) − {minimum:g} is {gap:g}; the theorems need a start above the lower bound")
    seen: list[_Spread] = []
    smoothness = 0.0
    for point in range(probe.points):
        if point:
            weights = _descend(objective, weights, shares, probe, point, 1 / smoothness if smoothness else 1.0)
        say(f"point {point + 1} of {probe.points}: curvature of {len(asked)} clients, gradients of {len(shares)}")
        curvatures = [
            largest_curvature(objective, weights, shares[i], seed=probe.seed, tolerance=probe.tolerance) for i in asked
        ]
        smoothness = max(smoothness, *curvatures)
        seen.append(_spread(objective, weights, shares, probe.batch_size))
    count = sum(map(len, shares))
    note = (
        f"{count} of {sum(map(len, task.clients))} training samples of {len(shares)} clients; L from the Hessians of "
        f"{len(asked)} of them; at w⁰ and {probe.points - 1} points that SGD reaches every {STEPS} steps from there"
    )
    return Estimates(
        smoothness=smoothness,
        noise=max(float(each.noise.mean()) for each in seen),
        noise_most=max(float(each.noise.max()) for each in seen),
        gradient=max(float(each.gradient.mean()) for each in seen),
        gradient_most=max(float(each.gradient.max()) for each in seen),
        heterogeneity=max(float(each.heterogeneity.mean()) for each in seen),
        heterogeneity_most=max(float(each.heterogeneity.max()) for each in seen),
        gap=gap,
        batch_size=probe.batch_size,
        note=note,
    )


def known(problem: LeastSquares, batch_size: int) -> Estimates:
    """The constants of least squares at its start, in closed form."""
    curvature, means = problem.curvature, problem.client_means
    start = problem.task.model().get_parameter("weight").detach().numpy()
    noise = problem.client_variances @ curvature**2 / batch_size
    spread = (means - problem.optimum) ** 2 @ curvature**2
    slopes = (start - means) ** 2 @ curvature**2
    return Estimates(
        smoothness=problem.smoothness,
        noise=float(noise.mean()),
        noise_most=float(noise.max()),
        gradient=float(slopes.mean()),
        gradient_most=float(slopes.max()),
        heterogeneity=float(spread.mean()),
        heterogeneity_most=float(spread.max()),
        gap=problem.value(start) - problem.minimum,
        batch_size=batch_size,
        note="closed form, all samples of all clients, at w⁰",
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Spread:
    """σ², ‖∇F_i‖² and ‖∇F_i − ∇F‖² of every client at one point."""

    noise: NDArray[np.float64]
    gradient: NDArray[np.float64]
    heterogeneity: NDArray[np.float64]


def _spread(objective: Objective, weights: Tensor, shares: Sequence[Samples], batch_size: int) -> _Spread:
    overall = sum((objective.gradient(weights, own) for own in shares), torch.zeros_like(objective.start)).double()
    overall /= len(shares)
    found = np.empty((3, len(shares)))
    for i, own in enumerate(shares):
        mean = objective.gradient(weights, own).double()
        # The variance of a mini-batch drawn with replacement is that of one sample over the batch size.
        apart = (objective.gradient(weights, own[j : j + 1]).double() - mean for j in range(len(own)))
        found[0, i] = math.fsum(float(each.square().sum()) for each in apart) / len(own) / batch_size
        found[1, i] = float(mean.square().sum())
        found[2, i] = float((mean - overall).square().sum())
    return _Spread(*found)


def _some(own: Samples, probe: Probe, client: int) -> Samples:
    """A client's samples, or a keyed choice of them."""
    if probe.samples is None or probe.samples >= len(own):
        return own
    chosen = permutation(key(probe.seed, "theory.samples", client), len(own))[: probe.samples]
    return own[np.sort(chosen)]


def _descend(
    objective: Objective, weights: Tensor, shares: Sequence[Samples], probe: Probe, turn: int, rate: float
) -> Tensor:
    """Further along a path of SGD, each step on a keyed batch of a keyed client."""
    for step in range(STEPS):
        draw = key(probe.seed, "theory.path", turn, step)
        own = shares[int(uniform(draw) * len(shares))]
        keys = extend_all(extend(draw, 1), np.arange(probe.batch_size))
        places = ((keys >> np.uint64(32)) * np.uint64(len(own)) >> np.uint64(32)).astype(np.int64)
        weights = weights - rate * objective.gradient(weights, own[places])
    return weights
