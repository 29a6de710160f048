"""One training step for a fixed number of slots as a CUDA graph, replayed for every step of every job."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ...planning.plan import without_gc
from ..stacked_optimizer import LocalMethod, StackedOptimizer
from ..tensor_rng import extend_all


class _StepSource(Protocol):
    """The trainer whose step a graph captures; ``pool`` is the memory pool that its graphs share."""

    pool: Any

    def step(
        self, weights: dict[str, Tensor], samples: Tensor, rates: Tensor, keys: Tensor, method: LocalMethod,
        optimizer: StackedOptimizer | None,
    ) -> None: ...  # fmt: skip
    def optimizer(self, method: LocalMethod, weights: dict[str, Tensor]) -> StackedOptimizer | None: ...
    def views(self, vectors: Tensor) -> dict[str, Tensor]: ...
    def split(self, vectors: Tensor) -> dict[str, Tensor]: ...
    def join(self, weights: dict[str, Tensor]) -> Tensor: ...


class StepGraph:
    """A captured step; unused slots, and those whose job has done its steps, have learning rate zero.

    The device counts the steps itself, so that the host never waits for it. ``optimizer`` is None for plain SGD.
    """

    def __init__(
        self, source: _StepSource, slots: int, size: int, steps: int, like: Tensor, method: LocalMethod
    ) -> None:
        device = like.device
        self._source, self._method = source, method
        self._weights = source.split(like.expand(slots, -1))
        self.optimizer = source.optimizer(method, self._weights)
        # One copy selects what a step needs: the numbers of its samples and its key.
        self._samples_and_key = torch.zeros((slots, steps, size + 1), dtype=torch.int64, device=device)
        self._rates = torch.zeros(slots, dtype=like.dtype, device=device)
        self._steps = torch.zeros(slots, dtype=torch.int64, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels, and makes library handles and workspaces, before the capture
                self._once()
                self._step.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # The garbage collector could free the graphs of another trainer, which CUDA does not permit during a capture.
        with without_gc(), torch.cuda.graph(self._graph, pool=source.pool):
            self._once()

    def _once(self) -> None:
        chosen = self._samples_and_key.index_select(1, self._step).squeeze(1)
        rates = torch.where(self._step < self._steps, self._rates, 0.0)
        self._source.step(self._weights, chosen[:, :-1], rates, chosen[:, -1], self._method, self.optimizer)
        self._step.add_(1)

    def run(self, starts: Tensor, samples: Tensor, rates: Tensor, steps: Tensor, keys: Tensor, longest: int) -> Tensor:
        """Return the end weights of all jobs without waiting for the device; ``longest`` is max of ``steps``."""
        count = len(starts)
        for name, start in self._source.views(starts).items():
            self._weights[name][:count].copy_(start)
        self._samples_and_key[:count, :longest, :-1].copy_(samples)
        numbers = torch.arange(longest, device=keys.device)
        self._samples_and_key[:count, :longest, -1].copy_(extend_all(keys.unsqueeze(1), numbers))
        self._rates[:count].copy_(rates)
        self._steps.zero_()
        self._steps[:count].copy_(steps)
        self._step.zero_()
        for _ in range(longest):
            self._graph.replay()
        return self._source.join({name: weights[:count] for name, weights in self._weights.items()})
