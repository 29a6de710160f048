"""How wide a batch may be: what one client needs is measured once, and what may be used is given or looked up."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError

SHARE = {"cpu": 0.5, "cuda": 0.8}  # of what is free, where nothing is said
MOST_WAITING = 4096  # trained updates, however much memory there is
VECTORS = 5  # a job's start, its weights at work, its end, its difference, and one in passing
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_memory(text: str) -> int:
    """Bytes from "800M", "12G", "1.5 GiB"."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?b)?\s*", text, re.IGNORECASE)
    size = float(found[1]) * UNITS[found[2].lower()] if found else 0.0
    if not 1 <= size < 2**60:
        raise UserError(f"--memory {text!r} is no size; write it as 800M or 12G")
    return int(size)


def readable(size: float) -> str:
    """Bytes for people."""
    power = min(4, max(0, int(math.log2(max(size, 1)) // 10)))
    return f"{size / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def free(device: torch.device) -> int:
    """Bytes that can still be had on a device; of a container no more than its limit leaves."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    lines = _read("/proc/meminfo").splitlines()
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used)))
    return min(found, default=4 << 30)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class BatchFit:
    """What a memory allows."""

    width: int  # jobs in a batch
    room: int  # trained updates that may wait for their rounds
    at_once: int  # jobs under way at the same moment
    samples: int  # samples of all versions together, when they are measured


@dataclass(frozen=True, slots=True)
class Need:
    """What one job takes: its vector of parameters, and all that a step makes on the way."""

    vector: int
    step: int
    samples: int  # in a step

    def fit(self, width: int, at_once: int, allowed: int) -> BatchFit:
        """The widest batch, up to ``width``; half of what is allowed is for it, the rest for versions and updates."""
        one = self.step + VECTORS * self.vector
        if allowed < 2 * one:
            raise UserError(
                f"training one client takes about {readable(2 * one)}, but only {readable(allowed)} may be used; "
                "give more with --memory, or use a smaller model or batch_size"
            )
        half = allowed // 2
        at_once = max(1, min(at_once, width, half // one))
        waiting = (half - at_once * one) // (VECTORS * self.vector)
        return BatchFit(
            width=max(1, min(width, at_once + waiting)),
            room=max(1, min(MOST_WAITING, half // (2 * self.vector))),
            at_once=at_once,
            samples=max(1, half // 4 * self.samples // max(1, self.step)),
        )


def allowed(memory: int | None, device: torch.device) -> int:
    """Bytes to use: what was asked for, or a share of what is free."""
    return int(SHARE[device.type] * free(device)) if memory is None else memory


def step_bytes(step: Callable[[int], None], device: torch.device) -> int:
    """What a step takes for each client besides its parameters; ``step`` runs one at a width."""
    if device.type == "cuda":
        step(1)  # compiles, and makes what is made once
        peaks = []
        for width in (1, 5):
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            step(width)
            peaks.append(torch.cuda.max_memory_allocated(device) - before)
        return max(1, (peaks[1] - peaks[0]) // 4)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(1)
    return max(1, 2 * sum(kept.values()))  # what is kept for the way back, and as much again on it
