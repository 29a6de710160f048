"""One step at a fixed width as a CUDA graph, replayed for every step of every job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..tensor_rng import extend_all

if TYPE_CHECKING:
    from ..trainer import Trainer


class Captured:
    """Places that are not used, or have done their steps, have rate zero. The step counts itself, on the device."""

    def __init__(self, trainer: Trainer, width: int, size: int, steps: int, like: Tensor) -> None:
        device = like.device
        self._trainer = trainer
        self._weights = trainer.split(like.expand(width, -1))
        self._samples = torch.zeros((width, steps, size), dtype=torch.int64, device=device)
        self._rates = torch.zeros(width, dtype=like.dtype, device=device)
        self._steps = torch.zeros(width, dtype=torch.int64, device=device)
        self._keys = torch.zeros(width, dtype=torch.int64, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled, library handles and workspaces made, before the capture
                self._once()
                self._step.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=trainer.pool):
            self._once()

    def _once(self) -> None:
        samples = self._samples.index_select(1, self._step).squeeze(1)
        rates = torch.where(self._step < self._steps, self._rates, 0.0)
        self._trainer.step(self._weights, samples, rates, extend_all(self._keys, self._step))
        self._step.add_(1)

    def run(self, starts: Tensor, samples: Tensor, rates: Tensor, steps: Tensor, keys: Tensor, longest: int) -> Tensor:
        """The ends of all jobs; the longest has so many steps. Nothing here waits for the device."""
        count = len(starts)
        for name, own in self._trainer.views(starts).items():
            self._weights[name][:count].copy_(own)
        self._samples[:count, :longest].copy_(samples)
        self._rates[:count].copy_(rates)
        self._keys[:count].copy_(keys)
        self._steps.zero_()
        self._steps[:count].copy_(steps)
        self._step.zero_()
        for _ in range(longest):
            self._graph.replay()
        return self._trainer.join({name: own[:count] for name, own in self._weights.items()})
