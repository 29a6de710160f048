"""Captured steps on the CPU: a stand-in for a CUDA graph calls the step itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from defedavg.training import Trainer, TrainingJob
from defedavg.training.kernels.cuda_graph import StepGraphs
from defedavg.training.local_training import DeviceMinibatches


class Stream:
    """Records which streams it waits for."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waits.append(other)


class Replayed:
    """A graph whose replay is the step that would have been captured."""

    def replay(self) -> None:
        assert self.step is not None
        self.step()

    step: Any = None


def without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers on the CPU use graphs."""
    captured = StepGraphs._captured

    def graph(self: StepGraphs, slots: int) -> Any:
        found: Any = captured(self, slots)
        found.step = partial(self._once, slots)
        return found

    def send(_: DeviceMinibatches, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    monkeypatch.setattr(StepGraphs, "_captured", graph)
    monkeypatch.setattr(DeviceMinibatches, "send", send)
    for name, value in {
        "Stream": Stream, "current_stream": Stream, "stream": lambda _: nullcontext(), "CUDAGraph": Replayed,
        "graph": lambda *_, **__: nullcontext(), "synchronize": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


def trained(trainer: Trainer, jobs: list[TrainingJob]) -> list[Tensor]:
    """Return Δ of every job, trained with graphs."""
    trainer.asynchronous, trainer.side = True, trainer.side or Stream()
    return trainer.train(jobs)
