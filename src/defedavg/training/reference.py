"""The reference executor: the obvious sequential loop, and so the truth that every other executor must agree with.

For each merge it trains the jobs that the merge uses, one after the other, and applies

    w[t+1] = Σ a·w[v] + global_lr · Σ b·Δ

Jobs that no merge uses are never trained. A version is dropped as soon as the plan says that nobody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..algorithms.protocol import Update
from ..errors import UserError, first_line
from ..planning.records import Round
from ..rng import extend, key
from ..tasks import Data, Task, seeded
from .minibatches import positions
from .module_state import keyed_copy, moving_buffers
from .tensor_rng import signed


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """How jobs are trained."""

    seed: int
    batch_size: int = 10
    global_lr: float = 1.0
    local_lr: float = 0.05
    sampling: str = "replacement"

    def layer_key(self, update: Update) -> int:
        """From which the layers that draw take the draws of a job."""
        return key(self.seed, "layers", update.client, update.index)

    def samples(self, task: Task, update: Update, own: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """The training samples that a job sees, (steps, batch_size); ``own``: its client's, if not the task says so."""
        own = task.clients[update.client] if own is None else own
        drawn = positions(
            self.seed,
            update.client,
            update.index,
            steps=update.steps,
            batch_size=self.batch_size,
            size=len(own),
            sampling=self.sampling,
        )
        return own[drawn]


class FlatModel:
    """A module whose parameters and moving float buffers lie in one vector, so that a version is one tensor.

    Its layers with dropout drop by keyed masks; ``draws`` is where they find their key.
    """

    def __init__(self, module: nn.Module, constants: Collection[str] = ()) -> None:
        # A copy, since it will be written to, and a builder may hand out one of its own.
        module, self.draws = keyed_copy(module)
        self.module = module
        moving = [b for name, b in module.named_buffers() if b.is_floating_point() and name not in constants]
        tensors = [*module.parameters(), *moving]
        if not tensors:
            raise UserError("the model has no parameters; give one that has")
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise UserError("the model mixes number types; give all its parameters and buffers the same dtype")
        self.vector = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        offset = 0
        for tensor in tensors:
            tensor.data = self.vector[offset : offset + tensor.numel()].view_as(tensor)
            offset += tensor.numel()
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        if not self.trainable:
            raise UserError("every parameter of the model is frozen; give one that can be trained")
        averaged = {id(b) for b in moving}
        self._others = [(b, b.clone()) for b in module.buffers() if id(b) not in averaged]

    def load(self, weights: Tensor) -> None:
        """Become a version; constants and counters, which no merge can average, are as they were built."""
        self.vector.copy_(weights)
        for buffer, start in self._others:
            buffer.copy_(start)


def sample_losses(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of every sample, checked to be just that."""
    losses = task.loss(outputs, targets)
    if losses.shape != (len(targets),):
        raise UserError(
            f"the loss gave shape {tuple(losses.shape)} for {len(targets)} samples; it must give one value per sample "
            "(reduction='none')"
        )
    return losses


class Reference:
    """Evaluates the rounds of one plan, in order."""

    def __init__(self, task: Task, recipe: LocalTraining) -> None:
        self.task = task
        self.recipe = recipe
        self.updates_trained = 0
        device = task.train.inputs.device
        module = seeded(task.model, key(recipe.seed, "init")).to(device)
        buffers = {name for name, _ in module.named_buffers()}
        first = task.train.inputs[torch.from_numpy(task.clients[0][: recipe.batch_size])]
        self._flat = FlatModel(module, constants=buffers - moving_buffers(module, first))
        self.versions: dict[int, Tensor] = {0: self._flat.vector.clone()}
        self._try()

    def _try(self) -> None:
        """One step that counts for nothing, so that a model that does not fit its data is found now."""
        samples = torch.from_numpy(self.task.clients[0][: self.recipe.batch_size])
        try:
            with torch.random.fork_rng(devices=[]):
                self._flat.module.eval()
                outputs = self._flat.module(self.task.train.inputs[samples])
                loss = sample_losses(self.task, outputs, self.task.train.targets[samples]).mean()
                torch.autograd.grad(loss, self._flat.trainable, allow_unused=True)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            what = first_line(error)
            raise UserError(f"the model cannot be trained on these data with this loss: {what}") from error

    @property
    def module(self) -> nn.Module:
        """The model, as it was last used."""
        return self._flat.module

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """A version by the names of its parameters and buffers, as ``load_state_dict`` takes it; on the CPU."""
        self._flat.load(weights)
        return {name: value.detach().cpu().clone() for name, value in self._flat.module.state_dict().items()}

    def apply(self, record: Round) -> Tensor:
        """Train what the merge uses, then merge; gives the new version."""
        return self.merge(record, {u: self._train(u) for u, _ in record.merge.updates if u.steps})

    def merge(self, record: Round, deltas: Mapping[Update, Tensor]) -> Tensor:
        """Merge what was trained, and drop what nobody needs; gives the new version."""
        merge = record.merge
        merged = torch.zeros_like(self._flat.vector)
        for update, weight in merge.updates:
            if update.steps:
                merged.add_(deltas[update], alpha=weight * self.recipe.global_lr)
        for version, weight in merge.past:
            merged.add_(self.versions[version], alpha=weight)
        self.versions[merge.version] = merged
        for version in record.freed:
            del self.versions[version]
        return merged

    def _train(self, update: Update) -> Tensor:
        """Δ = w_start − w_end of one job."""
        self.updates_trained += 1
        return self.train(update, self.versions[update.version])[0]

    def train(
        self,
        update: Update,
        start: Tensor,
        own: NDArray[np.int64] | None = None,
        goes_on: Callable[[int], bool] = lambda step: True,
    ) -> tuple[Tensor, int]:
        """Δ of a job from ``start``, and how many steps it did: before each one ``goes_on`` is asked."""
        flat, recipe = self._flat, self.recipe
        samples_of_steps = torch.from_numpy(recipe.samples(self.task, update, own)).to(flat.vector.device)
        done = 0
        flat.load(start)
        flat.module.train()
        # Layers that draw for themselves do so from the job's own key, and the global state is left alone.
        with torch.random.fork_rng(devices=[]):
            layers = recipe.layer_key(update)
            torch.default_generator.manual_seed(layers >> 1)
            for step, samples in enumerate(samples_of_steps):
                if not goes_on(step):
                    break
                if flat.draws.used:
                    flat.draws.key = torch.tensor(signed(extend(layers, step)), device=flat.vector.device)
                outputs = flat.module(self.task.train.inputs[samples])
                loss = sample_losses(self.task, outputs, self.task.train.targets[samples]).mean()
                gradients = torch.autograd.grad(loss, flat.trainable, allow_unused=True)
                with torch.no_grad():
                    for parameter, gradient in zip(flat.trainable, gradients, strict=True):
                        if gradient is not None:
                            parameter.sub_(gradient, alpha=recipe.local_lr)
                done += 1
        return start - flat.vector, done

    def measure(self, weights: Tensor, data: Data, chunk: int = 1000) -> tuple[float, float | None]:
        """Mean loss and, for a task with classes, accuracy of a version; reading changes nothing."""
        self._flat.load(weights)
        self._flat.module.eval()
        losses, hits = [], 0
        with torch.no_grad():
            for first in range(0, len(data), chunk):
                inputs, targets = data.inputs[first : first + chunk], data.targets[first : first + chunk]
                outputs = self._flat.module(inputs)
                losses.append(sample_losses(self.task, outputs, targets).double())
                if self.task.classes is not None:
                    hits += _hits(outputs, targets, self.task.classes)
        accuracy = hits / len(data) if self.task.classes is not None else None
        return float(torch.cat(losses).mean()), accuracy


def _hits(outputs: Tensor, targets: Tensor, classes: int) -> int:
    """How many samples have their largest output at their target."""
    if outputs.ndim != 2 or outputs.shape[1] < classes or targets.ndim != 1:
        raise UserError(
            f"accuracy needs outputs of shape (samples, {classes}) and one target per sample, not "
            f"{tuple(outputs.shape)} and {tuple(targets.shape)}; change the model, or make the task with classes=None"
        )
    return int((outputs.argmax(dim=1) == targets).sum())


def subset(data: Data, indices: Sequence[int]) -> Data:
    """Some of the samples."""
    chosen = torch.as_tensor(list(indices))
    return Data(data.inputs[chosen], data.targets[chosen])
