"""Estimates of the theorems' constants for a task: a model, data, and a partition over clients.

By default all samples of all clients are used, so σ², G², ν² and F(w⁰) are exact at the evaluated points; only L is
estimated from a few sampled clients. σ², G² and ν² are means over clients, which is sufficient: the proof of Theorem 1
uses only the means.
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
from torch.func import functional_call, grad, vmap

from ..errors import UserError
from ..rng import extend, extend_all, key, normal_all, permutation, uniform
from ..tasks import LeastSquares, Task, build_model
from ..tasks.model_calls import logits_of
from ..tasks.samples import Inputs, each
from ..training.scoring import sample_losses

Notify = Callable[[str], None]
Floats = NDArray[np.float64]
Samples = NDArray[np.int64]
Norms = Callable[[Tensor], Tensor]
"""Maps versions of shape (V, parameters) to their ‖∇F‖² of shape (V,)."""

CHUNK_VERSIONS = 16  # versions whose full gradients are computed together
CHUNK_VALUES = 1 << 22  # of the gradients of single samples that are computed together

STEPS: Final = 50  # of SGD between two evaluated points


class Objective:
    """The mean loss of a task over any of its samples."""

    def __init__(self, task: Task, seed: int = 0) -> None:
        self.task, self._can_map = task, True
        self._module = build_model(task, key(seed, "init")).eval()
        with torch.no_grad():
            logits_of(self._module, task.train[:1].inputs)
        parameters = list(self._module.named_parameters())
        self._shapes = {name: p.shape for name, p in parameters}
        self._sizes = [p.numel() for _, p in parameters]
        self.initial = torch.cat([p.detach().reshape(-1) for _, p in parameters])
        self.trainable = torch.cat([torch.full_like(p, float(p.requires_grad)).reshape(-1) for _, p in parameters])

    def losses(self, weights: Tensor, samples: Samples) -> Tensor:
        """Return the loss of every sample; buffers, which follow the parameters in a version, are ignored."""
        data = self.task.train[torch.from_numpy(samples)]
        outputs = functional_call(self._module, self._named(weights), (data.inputs,))
        return sample_losses(self.task, outputs, data.targets)

    def value(self, weights: Tensor, samples: Samples) -> float:
        """Return the mean loss."""
        with torch.no_grad():
            return float(self.losses(weights, samples).double().mean())

    def gradient(self, weights: Tensor, samples: Samples) -> Tensor:
        """Return the gradient of the mean loss; it is zero for frozen parameters."""
        leaf = weights[: len(self.initial)].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.losses(leaf, samples).mean(), leaf)
        return gradient * self.trainable

    def squared_deviations(self, weights: Tensor, samples: Samples, mean: Tensor) -> list[float]:
        """Return ‖gradient − mean‖² of the loss of every sample; ``mean`` is in float64."""
        at_once, found = max(1, CHUNK_VALUES // len(self.initial)), list[float]()
        for start in range(0, len(samples), at_once):
            gradients = self._sample_gradients(weights[: len(self.initial)], samples[start : start + at_once])
            found += (gradients.double() - mean).square().sum(1).tolist()
        return found

    def _sample_gradients(self, weights: Tensor, samples: Samples) -> Tensor:
        """Return the gradients of the losses of single samples, (samples, parameters)."""
        if self._can_map:
            data = self.task.train[torch.from_numpy(samples)]
            try:
                found: Tensor = vmap(grad(self._sample_loss), (None, 0, 0))(weights, data.inputs, data.targets)
                return found * self.trainable
            except RuntimeError:  # torch.func cannot map this module over samples
                self._can_map = False
        return torch.stack([self.gradient(weights, samples[j : j + 1]) for j in range(len(samples))])

    def _sample_loss(self, weights: Tensor, inputs: Inputs, target: Tensor) -> Tensor:
        outputs = functional_call(self._module, self._named(weights), (each(lambda part: part[None], inputs),))
        return sample_losses(self.task, outputs, target[None]).sum()

    def _named(self, weights: Tensor) -> dict[str, Tensor]:
        parts = torch.split(weights[: len(self.initial)], self._sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def hessian_product(self, weights: Tensor, direction: Tensor, samples: Samples) -> Tensor:
        """Return the product of the Hessian and a direction."""
        leaf = weights[: len(self.initial)].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.losses(leaf, samples).mean(), leaf, create_graph=True)
        if not gradient.requires_grad:  # the loss is linear in the parameters
            return torch.zeros_like(direction)
        (product,) = torch.autograd.grad(gradient @ (direction * self.trainable), leaf, materialize_grads=True)
        return product * self.trainable


def exact_norms(problem: LeastSquares) -> Norms:
    """Return a function that computes the norms in closed form."""
    curvature, optimum = torch.from_numpy(problem.curvature), torch.from_numpy(problem.optimum)
    return lambda versions: ((versions - optimum) * curvature).square().sum(1)


def full_norms(task: Task) -> Norms:
    """Return a function that computes the norms from all training samples of all clients."""
    objective = Objective(task)
    samples = np.concatenate(task.clients)
    equal_clients = np.concatenate([np.full(len(part), 1 / (task.num_clients * len(part))) for part in task.clients])
    sample_weights = torch.from_numpy(equal_clients).to(objective.initial)

    def value(weights: Tensor) -> Tensor:
        return objective.losses(weights, samples) @ sample_weights

    gradients, size = vmap(grad(value), chunk_size=CHUNK_VERSIONS), len(objective.initial)
    return lambda versions: (gradients(versions[:, :size]) * objective.trainable).square().sum(1)


def largest_curvature(
    objective: Objective,
    weights: Tensor,
    samples: Samples,
    *,
    seed: int = 0,
    tolerance: float = 1e-4,
    max_iterations: int = 200,
) -> float:
    """Return the largest |eigenvalue| of the Hessian by power iteration from a keyed direction: a lower estimate."""
    keys = extend_all(key(seed, "theory.direction"), np.arange(len(objective.initial)))
    direction = torch.from_numpy(normal_all(keys)).to(objective.initial)
    direction /= direction.norm()
    eigenvalue = 0.0
    for _ in range(max_iterations):
        image = objective.hessian_product(weights, direction, samples)
        before, eigenvalue = eigenvalue, float(image.norm())
        if eigenvalue == 0.0 or abs(eigenvalue - before) <= tolerance * eigenvalue:
            break
        direction = image / eigenvalue
    return eigenvalue


@dataclass(frozen=True, slots=True)
class Estimates:
    """The estimated constants, each the largest over the evaluated points; ``note`` describes the samples used.

    ``noise``, ``gradient`` and ``heterogeneity`` are means over clients; ``…_most`` is the largest of a single client.
    """

    smoothness: float
    noise: float
    noise_most: float
    gradient: float
    gradient_most: float
    heterogeneity: float
    heterogeneity_most: float
    gap: float
    batch_size: int
    note: str


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """The points along a path of SGD, the clients whose Hessian is used, and the samples of each client."""

    batch_size: int = 10
    seed: int = 0
    points: int = 3
    hessians: int = 10
    samples: int | None = None  # of each client; None: all
    tolerance: float = 1e-4
    sampling: str = "replacement"  # of mini-batches: replacement or shuffle
    local_steps: int = 1  # of a job, over which σ² is averaged for shuffle

    def __post_init__(self) -> None:
        for name in ("batch_size", "points", "hessians", "samples", "local_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")


def estimate(
    task: Task, options: EstimateOptions | None = None, *, minimum: float = 0.0, notify: Notify | None = None
) -> Estimates:
    """Estimate all constants; ``minimum`` is the best known lower bound of F (0 for the built-in losses)."""
    options, notify = options or EstimateOptions(), notify or (lambda _: None)
    objective = Objective(task, options.seed)
    samples = [_client_samples(part, options, i) for i, part in enumerate(task.clients)]
    order = permutation(key(options.seed, "theory.clients"), task.num_clients)
    hessian_clients = sorted(order[: options.hessians].tolist())
    weights = objective.initial
    gap = float(np.mean([objective.value(weights, part) for part in samples])) - minimum
    if not gap > 0:
        raise UserError(
            f"F(w⁰) − {minimum:g} is {gap:g}, but the theorems need F(w⁰) above the lower bound; use a smaller minimum"
        )
    moments: list[Floats] = []
    smoothness = 0.0
    for point in range(options.points):
        if point:
            weights = _descend(objective, weights, samples, options, point, 1 / smoothness if smoothness else 1.0)
        counts = f"curvature of {len(hessian_clients)} clients, gradients of {len(samples)}"
        notify(f"point {point + 1} of {options.points}: {counts}")
        curvatures = [
            largest_curvature(objective, weights, samples[i], seed=options.seed, tolerance=options.tolerance)
            for i in hessian_clients
        ]
        smoothness = max(smoothness, *curvatures)
        factors = [batch_variance(len(part), options) for part in task.clients]
        moments.append(_moments(objective, weights, samples, factors))
    note = (
        f"{sum(map(len, samples))} of {sum(map(len, task.clients))} training samples of {len(samples)} clients; "
        f"L from the Hessians of {len(hessian_clients)} clients; at {options.points} points along SGD, {STEPS} steps "
        "apart, the first at w⁰"
    )
    if options.sampling == "shuffle":
        note += (
            "; σ² is the variance of one mini-batch drawn without replacement, mean over the steps of a job (the "
            "theorems assume independent mini-batches, which those of an epoch are not)"
        )
    return Estimates(smoothness=smoothness, **_largest(moments), gap=gap, batch_size=options.batch_size, note=note)


def closed_form_estimates(problem: LeastSquares, batch_size: int) -> Estimates:
    """Return the constants of a least-squares problem at its initialisation, in closed form."""
    curvature, means = problem.curvature, problem.client_means
    initial = problem.task.model().get_parameter("weight").detach().numpy()
    noise = problem.client_variances @ curvature**2 / batch_size
    gradient, heterogeneity = ((means - point) ** 2 @ curvature**2 for point in (initial, problem.optimum))
    return Estimates(
        smoothness=problem.smoothness,
        **_largest([np.array([noise, gradient, heterogeneity])]),
        gap=problem.value(initial) - problem.minimum,
        batch_size=batch_size,
        note="closed form, all samples of all clients, at w⁰",
    )


def batch_variance(size: int, options: EstimateOptions) -> float:
    """Return the variance of a mini-batch gradient relative to that of one sample of a client with ``size`` samples.

    With replacement it is 1/b. For ``shuffle`` a mini-batch takes c samples of one epoch without replacement, and at
    the end of an epoch the others from the next: each part contributes (c/b)² · (1/c) · (size − c)/(size − 1), so that
    b samples of one epoch give (1/b) · (size − b)/(size − 1). The mean over the steps of a job is returned.
    """
    b = options.batch_size
    if options.sampling == "replacement":
        return 1 / b
    if size == 1:
        return 0.0  # every mini-batch has the one sample
    period = size // math.gcd(size, b)  # steps after which the position in the epoch repeats
    variances = []
    for step in range(min(options.local_steps, period)):
        head = min(b, size - step * b % size)
        tail = (b - head) % size  # complete epochs between the two have no variance
        variances.append(head * (size - head) + tail * (size - tail))
    periods, rest = divmod(options.local_steps, period)
    total = periods * sum(variances) + sum(variances[:rest])
    return total / options.local_steps / (b * b * (size - 1))


def _moments(objective: Objective, weights: Tensor, samples: Sequence[Samples], factors: Sequence[float]) -> Floats:
    """Return σ², ‖∇F_i‖² and ‖∇F_i − ∇F‖², one row each, of every client at one point."""
    means = [objective.gradient(weights, part).double() for part in samples]
    overall = sum(means, torch.zeros_like(means[0])) / len(samples)
    found = np.empty((3, len(samples)))
    for i, (part, mean) in enumerate(zip(samples, means, strict=True)):
        found[0, i] = math.fsum(objective.squared_deviations(weights, part, mean)) / len(part) * factors[i]
        found[1, i] = float(mean.square().sum())
        found[2, i] = float((mean - overall).square().sum())
    return found


def _largest(moments: Sequence[Floats]) -> dict[str, float]:
    """Return the mean and the maximum over clients of each moment, each the largest over the points."""
    largest = {}
    for name, *at_points in zip(("noise", "gradient", "heterogeneity"), *moments, strict=True):
        largest[name] = max(float(values.mean()) for values in at_points)
        largest[f"{name}_most"] = max(float(values.max()) for values in at_points)
    return largest


def _client_samples(part: Samples, options: EstimateOptions, client: int) -> Samples:
    """Return a client's samples, or a keyed selection of them."""
    if options.samples is None or options.samples >= len(part):
        return part
    selected = permutation(key(options.seed, "theory.samples", client), len(part))[: options.samples]
    return part[np.sort(selected)]


def _descend(
    objective: Objective, weights: Tensor, samples: Sequence[Samples], options: EstimateOptions, point: int, rate: float
) -> Tensor:
    """Return the weights after more steps of SGD, each on a keyed batch of a keyed client."""
    for step in range(STEPS):
        draw = key(options.seed, "theory.path", point, step)
        part = samples[int(uniform(draw) * len(samples))]
        keys = extend_all(extend(draw, 1), np.arange(options.batch_size))
        positions = ((keys >> np.uint64(32)) * np.uint64(len(part)) >> np.uint64(32)).astype(np.int64)
        weights = weights - rate * objective.gradient(weights, part[positions])
    return weights
