"""Trains batches of jobs as one stacked model: in threads on the CPU, with the step captured as a graph on CUDA."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..algorithms.protocol import Update
from ..errors import UserError
from ..tasks import Data, Task
from .device_minibatches import Shares, host_samples
from .kernels.cuda_graph import Captured
from .kernels.plain import CpuLayerKernels, LayerKernels
from .memory import Need, allowed, step_bytes
from .module_state import same_constants
from .precision import DEFAULT, check_precision
from .reference import LocalTraining, sample_losses
from .stacking.layers import CHANNELS_LAST, Step
from .stacking.stacked_model import stack
from .tensor_rng import extend_all, signed
from .threads import threads

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
WIDTH = {"cpu": 64, "cuda": 192}
GROUP_BYTES = 8 << 20  # of parameters that one thread works on at once: what its cache still holds (measured)
SMALL_GROUP = 4  # jobs; those of larger groups are so short that nobody waits long for the last
SAMPLES_AT_ONCE = 20_000  # when versions are measured on a device


@dataclass(frozen=True, slots=True, eq=False)
class TrainingJob:
    """One client's work: how and on what it trains, where it starts, and which update it makes."""

    recipe: LocalTraining
    task: Task
    start: Tensor
    update: Update


class Trainer:
    """Trains jobs that share a model, a loss and training data; raises ``CannotStack`` where that is not possible."""

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        *,
        batch_size: int = 10,
        width: int | None = None,
        memory: int | None = None,
        precision: str | None = None,
    ) -> None:
        width = WIDTH[task.train.inputs.device.type] if width is None else width
        if width < 1:
            raise UserError(f"the batch width is {width}; it must be at least 1")
        self._task = task
        self._module = module
        self._data = task.train
        self._shapes = [(name, p.shape, p.numel()) for name, p in module.named_parameters()]
        self._trainable = [name for name, p in module.named_parameters() if p.requires_grad]
        self._device = task.train.inputs.device
        dtype = next(module.parameters()).dtype
        self.asynchronous = self._device.type == "cuda"
        self._products = _products(self._device, dtype, precision)
        self._stacked = stack(module, self._products, task.train.inputs[:3])
        self._shares = Shares(self._device)
        self._graphs: dict[tuple[int, int, int], Captured] = {}
        self.pool: Any = torch.cuda.graph_pool_handle() if self.asynchronous else None
        self._threads: ThreadPoolExecutor | None = None
        self._stopped = False
        size = sum(count for *_, count in self._shapes) * dtype.itemsize
        group = max(1, min(32, GROUP_BYTES // size))
        at_once = width if self.asynchronous else group * torch.get_num_threads()
        need = Need(size, step_bytes(partial(self._try, module, batch_size), self._device), batch_size)
        fit = need.fit(width, at_once, allowed(memory, self._device))
        self.width, self.room = fit.width, fit.room
        self._group = min(group, fit.at_once)
        self._at_once = max(1, fit.at_once // self._group)
        self._samples_at_once = min(SAMPLES_AT_ONCE, fit.samples)
        # Whether a job has the same bits in whatever batch it is trained.
        alike = self._products.skips and isinstance(module, nn.Sequential)
        self.repeats = not self.asynchronous or (alike and self._stacked.moved >= set(self._trainable))

    def _try(self, module: nn.Module, batch_size: int, clients: int) -> None:
        """A step that counts for nothing."""
        vector = torch.cat([p.detach().reshape(1, -1) for p in module.parameters()], dim=1)
        none = torch.zeros((clients, batch_size), dtype=torch.int64, device=self._device)
        self.step(
            self.split(vector.expand(clients, -1)), none, torch.ones_like(vector[0, :1]).expand(clients), none[:, 0]
        )

    def accepts(self, module: nn.Module) -> bool:
        """Whether a model has the same parameters and constants as the one this was made for."""
        shapes = [(name, p.shape, p.numel()) for name, p in module.named_parameters()]
        return self._shapes == shapes and same_constants(self._module, module)

    def train(self, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        """Δ of every job, in their order; where memory runs out, in smaller batches from then on."""
        found: list[Tensor] = []
        while len(found) < len(jobs):
            part = jobs[len(found) : len(found) + self.width]
            try:
                found.extend(self._train(part))
                continue
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
            # Only here, where the error and all that it held are gone, can their memory be had again.
            self._shrink(len(part))
        return found

    def _shrink(self, tried: int) -> None:
        """Half the width from now on."""
        if min(self.width, tried) == 1:
            raise UserError("there is not enough memory to train even one client; use a smaller model or batch_size")
        self.width = min(self.width, tried) // 2
        self._graphs.clear()
        gc.collect()
        if self.asynchronous:
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()

    def _train(self, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        order = sorted(range(len(jobs)), key=lambda i: -jobs[i].update.steps)  # those with fewer steps leave first
        chosen = [jobs[i] for i in order]
        deltas = self._on_device(chosen) if self.asynchronous else self._in_threads(chosen)
        found: list[Tensor] = [deltas[0]] * len(jobs)
        for place, delta in zip(order, deltas, strict=True):
            found[place] = delta
        return found

    def _in_threads(self, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        """Groups of jobs, one thread for each core: every product is small, so none is worth sharing."""
        groups = self._groups(jobs)
        with threads(1):  # a sum is then done in the same order whatever runs beside it
            if self._at_once == 1 or len(groups) == 1:
                return [delta for group in groups for delta in self._group_deltas(group)]
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._at_once, "trainer", torch.set_num_threads, (1,))
            work: list[Future[list[Tensor]]] = []
            try:
                work.extend(self._threads.submit(self._group_deltas, group) for group in groups)
                return [delta for part in work for delta in part.result()]
            except BaseException:  # Ctrl-C, too: no thread may go on with what nobody waits for
                self._stopped = True
                for part in work:
                    part.cancel()
                wait(work)
                self._stopped = False
                raise

    def _groups(self, jobs: Sequence[TrainingJob]) -> list[Sequence[TrainingJob]]:
        """Jobs for one thread at a time; few are shared out, too, and the last of large ones singly, so that all end
        together."""
        size = min(self._group, -(-len(jobs) // self._at_once))
        groups = []
        while jobs:
            fair = size if self._group > SMALL_GROUP else min(size, -(-len(jobs) // (2 * self._at_once)))
            groups.append(jobs[:fair])
            jobs = jobs[fair:]
        return groups

    def _group_deltas(self, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        starts = torch.stack([job.start for job in jobs])
        steps = [job.update.steps for job in jobs]
        samples = torch.from_numpy(host_samples(jobs, steps[0]))
        rates = torch.tensor([job.recipe.local_lr for job in jobs], dtype=starts.dtype)
        keys = torch.tensor([signed(job.recipe.layer_key(job.update)) for job in jobs])
        weights = self.split(starts)
        active = len(jobs)
        for step in range(steps[0]):
            if self._stopped:
                break
            while steps[active - 1] <= step:
                active -= 1
            own = {name: w[:active] for name, w in weights.items()} if active < len(jobs) else weights
            now = extend_all(keys[:active], torch.tensor(step))
            self.step(own, samples[:active, step], rates[:active], now)
        return list((starts - self.join(weights)).unbind())

    def _on_device(self, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        starts = torch.stack([job.start for job in jobs])
        size, longest = jobs[0].recipe.batch_size, jobs[0].update.steps
        steps, keys = self._shares.send(
            [[job.update.steps, signed(job.recipe.layer_key(job.update))] for job in jobs]
        ).unbind(1)
        rates = self._shares.send([job.recipe.local_lr for job in jobs], starts.dtype)
        samples = self._shares.samples(jobs, longest)
        graph = self._captured(len(jobs), size, longest, starts[:1])
        ends = graph.run(starts, samples, rates, steps, keys, longest)
        # Each with memory of its own: one that waits long for its round must not keep a whole batch alive.
        return list(torch._foreach_sub(list(starts.unbind()), list(ends.unbind())))

    def _captured(self, count: int, size: int, steps: int, like: Tensor) -> Captured:
        # Where places that are not used cost nothing, two graphs do for all.
        widths = (16, self.width) if self._products.skips else WIDTHS
        width = next(w for w in (*widths, count) if w >= count)
        steps = 1 << (steps - 1).bit_length()
        if (width, size, steps) not in self._graphs:
            self._graphs[width, size, steps] = Captured(self, width, size, steps, like)
        return self._graphs[width, size, steps]

    def step(self, weights: dict[str, Tensor], samples: Tensor, rates: Tensor, keys: Tensor) -> None:
        """One step of SGD for every client, in place: (C, …) weights, (C, B) samples, (C,) rates and keys."""
        clients, size = samples.shape
        flat = samples.reshape(-1)
        targets = self._data.targets[flat]

        def loss(outputs: Tensor) -> Tensor:
            return sample_losses(self._task, outputs, targets).view(clients, size).mean(dim=1).sum()

        self._stacked.learn(weights, self._trainable, rates, keys, self._data.inputs[flat], loss)

    def measure(self, versions: Sequence[Tensor], data: Data) -> Tensor:
        """Mean loss and accuracy of every version, (V, 2) in float64; not a number where there are no classes."""
        found = [self._measure(torch.stack(list(versions[i : i + 32])), data) for i in range(0, len(versions), 32)]
        return torch.cat(found)

    @torch.no_grad()
    def _measure(self, vectors: Tensor, data: Data) -> Tensor:
        count = len(vectors)
        step = Step(self.split(vectors))
        losses = torch.zeros(count, dtype=torch.float64, device=vectors.device)
        hits = torch.zeros_like(losses)
        chunk = max(1, self._samples_at_once // count)
        for first in range(0, len(data), chunk):
            inputs, targets = data.inputs[first : first + chunk], data.targets[first : first + chunk]
            all_inputs = inputs.expand(count, *inputs.shape).flatten(0, 1)
            all_targets = targets.expand(count, *targets.shape).flatten(0, 1)
            outputs = self._stacked.run(step, all_inputs)
            losses += sample_losses(self._task, outputs, all_targets).double().view(count, -1).sum(1)
            if self._task.classes is not None:
                hits += (outputs.argmax(dim=1) == all_targets).view(count, -1).sum(1)
        share = hits / len(data) if self._task.classes is not None else torch.full_like(hits, torch.nan)
        return torch.stack([losses / len(data), share], dim=1)

    def views(self, vectors: Tensor) -> dict[str, Tensor]:
        """The parameters in vectors (C, …), in the order in which they are kept."""
        parts = torch.split(vectors, [count for *_, count in self._shapes], dim=1)
        whole = (
            (name, part.view(len(vectors), *shape)) for (name, shape, _), part in zip(self._shapes, parts, strict=True)
        )
        return {name: part.permute(CHANNELS_LAST) if name in self._stacked.turned else part for name, part in whole}

    def split(self, vectors: Tensor) -> dict[str, Tensor]:
        """The parameters in vectors, each with memory of its own."""
        return {name: w.clone(memory_format=torch.contiguous_format) for name, w in self.views(vectors).items()}

    def join(self, weights: dict[str, Tensor]) -> Tensor:
        """The vectors of parameters, (C, …)."""
        first = next(iter(weights.values()))
        vectors = first.new_empty((len(first), sum(count for *_, count in self._shapes)))
        for name, view in self.views(vectors).items():
            view.copy_(weights[name])
        return vectors


def _products(device: torch.device, dtype: torch.dtype, precision: str | None) -> LayerKernels:
    precision = precision or DEFAULT[device.type]
    check_precision(precision, device.type)
    if device.type == "cpu":
        return CpuLayerKernels()
    if dtype == torch.float32:
        try:
            from .kernels.triton_layers import TritonLayerKernels

            return TritonLayerKernels(precision)
        except ImportError:  # no Triton: the same results, to rounding, from plain operations
            pass
    return LayerKernels(half=precision == "bf16")


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
