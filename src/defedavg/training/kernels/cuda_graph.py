"""Training steps as CUDA graphs, one for each number of slots, replayed for every step of every job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...planning.plan import without_gc
from ..stacked_optimizer import LocalMethod, StackedOptimizer
from ..tensor_rng import extend_all
from .deferred import DeferredUpdates, pending_steps

SLOTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768)
"""The numbers of slots of graphs below the capacity of a batch."""

TWO_STREAMS = 64
"""From this many slots on, the halves of a step of plain SGD run side by side: one computes while the other reads."""

ALIGNED = 16  # slots: the first half is a multiple of this, so that the tensors of the second half stay aligned


class _StepSource(Protocol):
    """The trainer whose step a graph captures; its graphs share the memory pool ``pool`` and the stream ``side``.

    Memory of the pool is reused only on the stream that it was allocated on.
    """

    pool: Any
    side: Any

    def step(
        self, weights: dict[str, Tensor], samples: Tensor, rates: Tensor, keys: Tensor, method: LocalMethod,
        optimizer: StackedOptimizer | None, deferred: dict[str, DeferredUpdates],
    ) -> None: ...  # fmt: skip
    def optimizer(self, method: LocalMethod, weights: dict[str, Tensor]) -> StackedOptimizer | None: ...
    def deferrable(self, method: LocalMethod, size: int) -> tuple[str, ...]: ...
    def add_updates(
        self, weight: Tensor, deferred: DeferredUpdates, rates: Tensor, steps: Tensor, between: tuple[int, int],
        size: int,
    ) -> None: ...  # fmt: skip
    def views(self, vectors: Tensor) -> dict[str, Tensor]: ...
    def split(self, vectors: Tensor) -> dict[str, Tensor]: ...
    def join(self, weights: dict[str, Tensor]) -> Tensor: ...


class StepGraphs:
    """Buffers for a batch of at most ``capacity`` jobs, and captured steps for the first slots of them.

    Jobs are in the order of their numbers of steps, the longest first. A step replays the smallest graph that has a
    slot for every job that is not done yet; unused slots, and those whose job is done, have learning rate zero.
    The device counts the steps itself, so that the host never waits for it. ``optimizer`` is None for plain SGD.
    """

    def __init__(
        self, source: _StepSource, capacity: int, size: int, steps: int, like: Tensor, method: LocalMethod
    ) -> None:
        device = like.device
        self.steps = steps
        self._source, self._method, self._capacity, self._size = source, method, capacity, size
        self._weights = source.split(like.expand(capacity, -1))
        self.optimizer = source.optimizer(method, self._weights)
        # One copy selects what a step needs: the numbers of its samples and its key.
        self._samples_and_key = torch.zeros((capacity, steps, size + 1), dtype=torch.int64, device=device)
        self._rates = torch.zeros(capacity, dtype=like.dtype, device=device)
        self._steps = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._deferred = {
            name: DeferredUpdates.of(self._weights[name], size, self._step) for name in source.deferrable(method, size)
        }
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.capture([capacity])  # the largest first: smaller ones fit into its memory

    def capture(self, active: Sequence[int]) -> None:
        """Capture the graphs that are missing; ``active`` are the numbers of jobs that do each step.

        A capture overwrites the state of the optimiser, so jobs are started afterwards.
        """
        for slots in dict.fromkeys(map(self._slots, active)):
            if slots not in self._graphs:
                self._graphs[slots] = self._captured(slots)

    def run(
        self, active: Sequence[int], starts: Tensor, samples: Tensor, rates: Tensor, steps: Tensor, keys: Tensor
    ) -> Tensor:
        """Return the end weights of all jobs without waiting for the device; ``active`` is that of ``capture``."""
        count, longest = len(starts), len(active)
        for name, start in self._source.views(starts).items():
            self._weights[name][:count].copy_(start)
        self._samples_and_key[:count, :longest, :-1].copy_(samples)
        numbers = torch.arange(longest, device=keys.device)
        self._samples_and_key[:count, :longest, -1].copy_(extend_all(keys.unsqueeze(1), numbers))
        self._rates[:count].copy_(rates)
        self._steps.zero_()
        self._steps[:count].copy_(steps)
        self._step.zero_()
        self._add_updates(count, 0, 0)
        for number, jobs in enumerate(active):
            self._graphs[self._slots(jobs)].replay()
            done = number + 1
            if done == longest or done % self._period == 0:
                first = number // self._period * self._period
                self._add_updates(active[first], first, done)
        return self._source.join({name: weights[:count] for name, weights in self._weights.items()})

    @property
    def _period(self) -> int:
        return pending_steps(self._size)

    def _add_updates(self, jobs: int, first: int, end: int) -> None:
        """Add the deferred updates of the steps from ``first`` to ``end`` of the first jobs to their weights."""
        rates, steps = self._rates[:jobs], self._steps[:jobs]
        for name, deferred in self._deferred.items():
            part, weight = deferred.part(slice(0, jobs)), self._weights[name][:jobs]
            self._source.add_updates(weight, part, rates, steps, (first, end), self._size)

    def _slots(self, jobs: int) -> int:
        return min(self._capacity, next((slots for slots in SLOTS if jobs <= slots), self._capacity))

    def _captured(self, slots: int) -> torch.cuda.CUDAGraph:
        """Return a new graph for this number of slots; capturing it does not change weights."""
        self._steps.zero_()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels, and makes library handles and workspaces, before the capture
                self._step.zero_()
                self._once(slots)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The garbage collector could free graphs of another trainer, which CUDA does not permit during a capture.
        with without_gc(), torch.cuda.graph(graph, pool=self._source.pool):
            self._once(slots)
        return graph

    def _once(self, slots: int) -> None:
        chosen = self._samples_and_key[:slots].index_select(1, self._step).squeeze(1)
        rates = torch.where(self._step < self._steps[:slots], self._rates[:slots], 0.0)
        half = slots // 2 // ALIGNED * ALIGNED if slots >= TWO_STREAMS and self.optimizer is None else 0
        if half:
            self._beside(chosen, rates, half)
        else:
            self._part(chosen, rates, slice(0, slots))
        self._step.add_(1)

    def _beside(self, chosen: Tensor, rates: Tensor, half: int) -> None:
        """Do the step of the first half on the side stream, and that of the others on this one."""
        stream, side = torch.cuda.current_stream(), self._source.side
        side.wait_stream(stream)
        try:
            with torch.cuda.stream(side):
                self._part(chosen, rates, slice(0, half))
            self._part(chosen, rates, slice(half, len(rates)))
        finally:  # without this, the end of a capture would replace an error, such as too little memory, by its own
            stream.wait_stream(side)

    def _part(self, chosen: Tensor, rates: Tensor, part: slice) -> None:
        weights = {name: w[part] for name, w in self._weights.items()}
        deferred = {name: updates.part(part) for name, updates in self._deferred.items()}
        samples, keys = chosen[part, :-1], chosen[part, -1]
        self._source.step(weights, samples, rates[part], keys, self._method, self.optimizer, deferred)
