"""Trains a batch of jobs as one stacked model, on the CPU or, with the step captured as one graph, on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..protocol import Update
from ..tasks import Task
from .reference import Recipe, sample_losses
from .stacked import descend, stack

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One client's work: how and on what it trains, where it starts, and which update it makes."""

    recipe: Recipe
    task: Task
    start: Tensor
    update: Update


class Trainer:
    """Trains jobs that share a model, a loss and training data; raises ``CannotStack`` where that is not possible."""

    def __init__(self, task: Task, module: nn.Module) -> None:
        self._data = task.train
        self._task = task
        self._forward = stack(module)
        self._shapes = [(name, p.shape, p.numel()) for name, p in module.named_parameters()]
        self._trainable = [name for name, p in module.named_parameters() if p.requires_grad]
        self._graphs: dict[tuple[int, int], _Captured] = {}

    def train(self, jobs: Sequence[Job]) -> list[Tensor]:
        """Δ of every job, in their order."""
        order = sorted(range(len(jobs)), key=lambda i: -jobs[i].update.steps)  # those with fewer steps leave first
        chosen = [jobs[i] for i in order]
        starts = torch.stack([job.start for job in chosen])
        steps = np.array([job.update.steps for job in chosen])
        size = chosen[0].recipe.batch_size
        samples = torch.from_numpy(np.stack([_samples(job, int(steps[0])) for job in chosen])).to(starts.device)
        rates = torch.tensor([job.recipe.local_lr for job in chosen], dtype=starts.dtype, device=starts.device)
        if starts.is_cuda:
            ends = self._captured(len(chosen), size, starts).run(starts, samples, rates, steps)
        else:
            weights = self._split(starts)
            for step in range(int(steps[0])):
                active = int((steps > step).sum())
                self.step({name: w[:active] for name, w in weights.items()}, samples[:active, step], rates[:active])
            ends = self._join(weights)
        deltas = starts - ends
        found: list[Tensor] = [starts] * len(jobs)
        for place, delta in zip(order, deltas, strict=True):
            found[place] = delta
        return found

    def step(self, weights: dict[str, Tensor], samples: Tensor, rates: Tensor) -> None:
        """One step of SGD for every client, in place: (C, …) weights, (C, B) samples, (C,) rates."""
        clients, size = samples.shape
        flat = samples.reshape(-1)
        leaves = {name: w.detach().requires_grad_(name in self._trainable) for name, w in weights.items()}
        outputs = self._forward(leaves, self._data.inputs[flat])
        losses = sample_losses(self._task, outputs, self._data.targets[flat])
        loss = losses.view(clients, size).mean(dim=1).sum()
        gradients = torch.autograd.grad(loss, [leaves[name] for name in self._trainable], allow_unused=True)
        with torch.no_grad():
            for name, gradient in zip(self._trainable, gradients, strict=True):
                if gradient is not None:
                    descend(weights[name], gradient, rates)

    def _split(self, vectors: Tensor) -> dict[str, Tensor]:
        parts = torch.split(vectors, [count for *_, count in self._shapes], dim=1)
        return {
            name: part.reshape(len(vectors), *shape).clone(memory_format=torch.contiguous_format)
            for (name, shape, _), part in zip(self._shapes, parts, strict=True)
        }

    def _join(self, weights: dict[str, Tensor]) -> Tensor:
        return torch.cat([w.reshape(len(w), -1) for w in weights.values()], dim=1)

    def _captured(self, count: int, size: int, like: Tensor) -> _Captured:
        width = next((w for w in WIDTHS if w >= count), count)
        if (width, size) not in self._graphs:
            self._graphs[width, size] = _Captured(self, width, size, like)
        return self._graphs[width, size]


def _samples(job: Job, steps: int) -> NDArray[np.int64]:
    """The sample numbers of every step, (steps, batch); after the job's own steps they mean nothing."""
    whole = np.zeros((steps, job.recipe.batch_size), dtype=np.int64)
    whole[: job.update.steps] = job.recipe.samples(job.task, job.update)
    return whole


class _Captured:
    """One step at a fixed width as a CUDA graph; places that are not used, or have done their steps, have rate zero."""

    def __init__(self, trainer: Trainer, width: int, size: int, like: Tensor) -> None:
        self._trainer = trainer
        self._weights = trainer._split(like[:1].expand(width, -1))
        self._samples = torch.zeros((width, size), dtype=torch.int64, device=like.device)
        self._rates = torch.zeros(width, dtype=like.dtype, device=like.device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # library handles and workspaces are made before the capture
                trainer.step(self._weights, self._samples, self._rates)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            trainer.step(self._weights, self._samples, self._rates)

    def run(self, starts: Tensor, samples: Tensor, rates: Tensor, steps: NDArray[np.int64]) -> Tensor:
        """The ends of all jobs."""
        count = len(starts)
        for name, own in self._trainer._split(starts).items():
            self._weights[name][:count].copy_(own)
        self._rates.zero_()
        self._rates[:count].copy_(rates)
        active = count
        for step in range(int(steps[0])):
            now = int((steps > step).sum())
            if now < active:
                self._rates[now:active].zero_()
                active = now
            self._samples[:count].copy_(samples[:, step])
            self._graph.replay()
        return self._trainer._join({name: own[:count] for name, own in self._weights.items()})
