"""The limits of a batch: measures the memory that one client needs, and divides what may be used."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError

SHARE = {"cpu": 0.5, "cuda": 0.8}  # of the free memory, unless a limit is given
MAX_PENDING_UPDATES = 4096  # however much memory is available
DEFAULT_MEMORY = 4 << 30  # where the free memory is not known
VECTORS = 5  # of one job: its start, its current weights, its end, its difference, and a temporary one
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_memory(text: str) -> int:
    """Return the bytes of "800M", "12G" or "1.5 GiB"."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?b)?\s*", text, re.IGNORECASE)
    size = float(match[1]) * UNITS[match[2].lower()] if match else 0.0
    if not 1 <= size < 2**60:
        raise UserError(f"--memory {text!r} is not a size; write it as 800M or 12G")
    return int(size)


def readable(size: float) -> str:
    """Return a number of bytes with a binary unit."""
    power = min(4, max(0, int(math.log2(max(size, 1)) // 10)))
    return f"{size / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def free(device: torch.device) -> int:
    """Return the free bytes of a device, in a container at most those within its limit."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        from psutil import virtual_memory  # only here: PyTorch and NumPy are enough to train on a GPU

        available = int(virtual_memory().available)
    except ImportError:
        available = DEFAULT_MEMORY
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text("ascii") for name in ("max", "current"))
        return max(0, min(available, int(limit) - int(used)))
    except (OSError, ValueError):  # not in a container, or in one without a limit
        return available


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits that an amount of memory allows."""

    max_batch_jobs: int
    max_pending_updates: int  # trained updates that may wait for their rounds
    concurrent_jobs: int  # jobs of a batch that are computed at the same moment
    eval_samples: int  # samples of all versions together in one evaluation step
    used_versions: int  # that jobs or merges still use
    new_versions: int  # that are made and evaluated together


def least_bytes(vector: int, step: int, more_vectors: int = 0) -> int:
    """Return the bytes without which no client can be trained; see ``batch_limits``."""
    return 2 * (step + (VECTORS + more_vectors) * vector)


def batch_limits(
    vector: int, step: int, samples: int, max_batch_jobs: int, concurrent_jobs: int, allowed: int,
    more_vectors: int = 0, *, at_once: bool = False,
) -> BatchLimits:  # fmt: skip
    """Return the largest limits up to those given; half of ``allowed`` is for versions and pending updates.

    Of this half, one half is for pending updates, a quarter for versions that are in use, and a quarter for new ones.

    A job needs ``vector`` bytes for its parameters, and ``step`` bytes for the tensors of a step with ``samples``.
    ``more_vectors`` are its gradients and the state of its optimiser, while it is computed. With ``at_once``, all jobs
    of a batch are computed at the same moment.
    """
    one = least_bytes(vector, step, more_vectors) // 2
    if allowed < 2 * one:
        raise UserError(
            f"training one client takes about {readable(2 * one)}, but only {readable(allowed)} may be used; "
            "give more with --memory, or use a smaller model or batch_size"
        )
    half = allowed // 2
    concurrent_jobs = max(1, min(concurrent_jobs, max_batch_jobs, half // one))
    waiting = 0 if at_once else (half - concurrent_jobs * one) // (VECTORS * vector)
    return BatchLimits(
        max_batch_jobs=max(1, min(max_batch_jobs, concurrent_jobs + waiting)),
        max_pending_updates=max(1, min(MAX_PENDING_UPDATES, half // (2 * vector))),
        concurrent_jobs=concurrent_jobs,
        eval_samples=max(1, half // 4 * samples // max(1, step)),
        used_versions=half // (4 * vector),
        new_versions=max(1, half // (4 * vector)),
    )


def allowed(memory: int | None, device: torch.device) -> int:
    """Return the bytes to use: those that were asked for, or a share of the free ones."""
    return int(SHARE[device.type] * free(device)) if memory is None else memory


def step_bytes(step: Callable[[int], None], device: torch.device) -> int:
    """Measure the bytes of a step per client, without its parameters; ``step(clients)`` runs one step."""
    if device.type == "cuda":
        step(1)  # compiles kernels, and allocates what is allocated once
        peaks = []
        for clients in (1, 5):
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            step(clients)
            peaks.append(torch.cuda.max_memory_allocated(device) - before)
        return max(1, (peaks[1] - peaks[0]) // 4)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(1)
    return max(1, 2 * sum(saved.values()))  # the tensors saved for the backward pass, and as much for its gradients


class StepBytes:
    """The bytes of a step per client, without and with autograd; each is measured when it is first asked for.

    Without autograd, fused passes keep fewer tensors. ``step(autograd, clients)`` runs one step; ``more`` is added.
    """

    def __init__(self, step: Callable[[bool, int], None], device: torch.device, more: int) -> None:
        self._step, self._device, self._more = step, device, more
        self._found: dict[bool, int] = {}

    def __call__(self, autograd: bool) -> int:
        """Return the bytes of one of both."""
        if autograd not in self._found:
            self._found[autograd] = step_bytes(partial(self._step, autograd), self._device) + self._more
        return self._found[autograd]
