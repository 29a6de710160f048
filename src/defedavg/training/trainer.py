"""Trains batches of jobs as one stacked model: in threads on the CPU, by replaying CUDA graphs on a CUDA device."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UserError
from ..tasks import Data, Task
from ..tasks.samples import channels_first, channels_last
from .augmentation import augmentation_of
from .job_group import SMALL_GROUP, JobGroup, active_counts, groups_of, train_directly
from .kernels.chosen import kernels_for
from .kernels.cuda_graph import StepGraphs
from .kernels.deferred import DeferredUpdates, deferred_bytes, pending_steps
from .local_training import DeviceMinibatches, LocalTraining, TrainingJob, host_minibatches, layer_keys
from .memory import BatchLimits, StepBytes, allowed, batch_limits, least_bytes
from .module_state import VersionLayout, same_constants
from .scoring import hits, output_gradient, own_metric, sample_losses
from .stacked_optimizer import LocalMethod, StackedOptimizer, numbers_of
from .stacking.direct import DirectStep
from .stacking.layer_registry import CHANNELS_LAST, StackedPass, StackingError, plugin_layers
from .stacking.stacked_model import stack
from .state_memory import NO_NEED, StateMemory, StateNeed
from .tensor_rng import extend_all
from .threads import in_parallel

DEFAULT_MAX_BATCH_JOBS = {"cpu": 64, "cuda": 256}
LEAST_STEPS = 64  # that the buffers of graphs have room for: they are small, and new ones need new graphs
GROUP_BYTES = 8 << 20  # of parameters in one thread's group of jobs: what its cache still holds (measured)
GROUP_STEP_BYTES = 64 << 20  # of a step's tensors in one thread's group; more of them only leave the cache (measured)
MAX_GROUP_JOBS = 128  # of the smallest models, whose steps take hardly more time for many jobs than for one
SAMPLES_AT_ONCE = 20_000  # when versions are evaluated on a device
EVAL_CHUNK = 250  # samples that a thread evaluates at once

Scores = tuple[Tensor, Tensor, Tensor | None]


class Trainer:
    """Trains jobs that share a model, a loss and training data; refuses a model that cannot be stacked.

    The constructor raises ``StackingError`` for such a model. ``max_batch_jobs`` limits the jobs in a batch,
    ``max_pending_updates`` the trained updates that wait for their rounds. ``local_training`` is that of the first
    jobs: what they need is checked at once, for others when they are trained. ``state`` is the number of state vectors
    of the runs whose jobs are trained.
    """

    def __init__(
        self, task: Task, module: nn.Module, *, batch_size: int = 10, max_batch_jobs: int | None = None,
        memory: int | None = None, precision: str | None = None, local_training: LocalTraining | None = None,
        state: StateNeed = NO_NEED,
    ) -> None:  # fmt: skip
        max_batch_jobs = DEFAULT_MAX_BATCH_JOBS[task.train.device.type] if max_batch_jobs is None else max_batch_jobs
        if max_batch_jobs < 1:
            raise UserError(f"max_batch_jobs is {max_batch_jobs}; it must be at least 1")
        self._task, self._module, self._batch_size = task, module, batch_size
        self._trainable = [name for name, p in module.named_parameters() if p.requires_grad]
        self._device = task.train.device
        dtype = next(module.parameters()).dtype
        self.asynchronous = self._device.type == "cuda"
        self._kernels = kernels_for(self._device, dtype, precision)
        self._stacked = stack(module, self._kernels, task.train[:3].inputs)
        self._layout = VersionLayout.of(module, self._stacked.statistics)
        self._shapes = self._layout.shapes
        self._size = sum(shape.numel() for shape in self._shapes.values())
        self._minibatches = DeviceMinibatches(self._device)
        self._graphs: dict[tuple[int, int, LocalMethod], StepGraphs] = {}
        self.pool: Any = None
        self.side: Any = None
        self._images: Data | None = None
        if self.asynchronous:
            self.pool, self.side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._images = channels_last(task.train, for_layers=self._stacked.channels_last)
        self._vector_bytes = self._size * dtype.itemsize
        self._stopped, self._cores = False, torch.get_num_threads()
        deferred = deferred_bytes(map(self._shapes.__getitem__, self._stacked.deferrable))
        self._measured = StepBytes(self._discarded_step, self._device, deferred)
        self._step_bytes = self._measured(False)
        self.add_updates = self._kernels.add_updates
        self._group_jobs = self._most_in_group()
        self._asked_jobs, self._allowed = max_batch_jobs, allowed(memory, self._device)
        self._limits: dict[int, BatchLimits] = {}
        method = LocalMethod() if local_training is None else LocalMethod.of(local_training)
        least = least_bytes(self._vector_bytes, self._step_bytes_of(method), method.vectors)
        self.state_memory = StateMemory.within(self._device, self._vector_bytes, self._allowed, least, state)
        self._allowed -= self.state_memory.device_bytes
        self._set_limits(method)
        same_in_any_batch = self._kernels.skips_zero_rates and isinstance(module, nn.Sequential)
        fully_fused = self._stacked.self_updating >= set(self._trainable) and not self._layout.statistics
        invariant_on_device = not self.asynchronous or (same_in_any_batch and fully_fused)
        self.batch_invariant = self._stacked.batch_invariant and invariant_on_device

    def _most_in_group(self) -> int:
        """Return the number of jobs that one thread of the CPU trains together."""
        most = min(MAX_GROUP_JOBS, GROUP_BYTES // self._vector_bytes)
        if self._stacked.channels_last:  # convolutions are computed client by client: a larger group gains nothing
            most = min(most, GROUP_STEP_BYTES // self._step_bytes)
        return max(1, most)

    def batch_invariant_for(self, local_training: LocalTraining) -> bool:
        """Return whether a job's update is bit-identical in every batch on the same device, with the same precision."""
        # On a CUDA device, the order of the sum in a norm depends on the number of clients.
        return self.batch_invariant and not (self.asynchronous and LocalMethod.of(local_training).clip)

    def _set_limits(self, method: LocalMethod) -> None:
        if not method.fused and not self._stacked.yields_gradients:
            names = ", ".join(plugin_layers(self._module))
            raise StackingError(f"the registered form of {names} ignores context.targets, so it yields no gradients")
        limits = self._limits_of(method)
        self.max_batch_jobs, self.max_pending_updates = limits.max_batch_jobs, limits.max_pending_updates
        self.max_new_versions = limits.new_versions
        # On the CPU there is no other memory.
        self.version_memory = self.state_memory.for_versions(limits.used_versions if self.asynchronous else None)
        self._samples_at_once = min(SAMPLES_AT_ONCE, limits.eval_samples)

    def _limits_of(self, method: LocalMethod) -> BatchLimits:
        """Return the limits of a batch; a job that is not plain SGD needs more memory."""
        if method.vectors not in self._limits:
            concurrent = self._asked_jobs if self.asynchronous else self._group_jobs * self._cores
            sizes = self._vector_bytes, self._step_bytes_of(method), self._batch_size
            self._limits[method.vectors] = batch_limits(
                *sizes, self._asked_jobs, concurrent, self._allowed, method.vectors, at_once=self.asynchronous
            )
        return self._limits[method.vectors]

    def _step_bytes_of(self, method: LocalMethod) -> int:
        return self._measured(not method.fused and self.asynchronous and bool(self._stacked.direct))

    def _discarded_step(self, autograd: bool, clients: int) -> None:
        """Run one step on copies of the weights; ``autograd`` is that of methods that are not fused."""
        vector = torch.cat([p.detach().reshape(1, -1) for p in self._layout.tensors(self._module)], dim=1)
        zeros = torch.zeros((clients, self._batch_size), dtype=torch.int64, device=self._device)
        given = self.split(vector.expand(clients, -1)), zeros, vector.new_ones(clients), zeros[:, 0]
        self.step(*given, LocalMethod(zero_rate=autograd))

    def accepts(self, module: nn.Module) -> bool:
        """Return whether a model has the same parameters and constants as the one of this trainer."""
        statistics = self._layout.statistics
        shapes = VersionLayout.of(module, statistics).shapes
        same_shapes = list(self._shapes.items()) == list(shapes.items())
        return same_shapes and same_constants(self._module, module, statistics)

    def train(self, jobs: Sequence[TrainingJob]) -> list[Tensor]:
        """Return Δ of every job, in their order; jobs with different methods are in different batches."""
        # Jobs of one run mostly have the same method, which is not computed for each of them.
        kinds = [
            (id(job.local_training), job.local_rate, job.correction is None, job.update.steps == 1) for job in jobs
        ]
        known = {kind: self._method(job) for kind, job in dict(zip(kinds, jobs, strict=True)).items()}
        methods = [known[kind] for kind in kinds]
        deltas: dict[int, Tensor] = {}
        for method in dict.fromkeys(methods):
            chosen = [number for number, other in enumerate(methods) if other == method]
            trained = self._train_alike([jobs[number] for number in chosen], method)
            deltas.update(zip(chosen, trained, strict=True))
        return [deltas[number] for number in range(len(jobs))]

    def _method(self, job: TrainingJob) -> LocalMethod:
        rounded = torch.tensor(job.local_rate, dtype=job.start.dtype)
        method = LocalMethod.of(job.local_training)
        single = bool(self._stacked.deferrable) and job.update.steps == 1
        return replace(method, correction=job.correction is not None, zero_rate=not rounded, single_step=single)

    def _train_alike(self, jobs: Sequence[TrainingJob], method: LocalMethod) -> list[Tensor]:
        """Train jobs of one method; after running out of memory, continue with smaller batches."""
        limit = self._limits_of(method).max_batch_jobs
        deltas: list[Tensor] = []
        while len(deltas) < len(jobs):
            batch = jobs[len(deltas) : len(deltas) + min(limit, self.max_batch_jobs)]
            try:
                deltas.extend(self._train(batch, method))
                continue
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                    raise
            # Outside the handler, whose error keeps tensors alive. Graphs on a device have slots for the largest batch.
            self._shrink(min(limit, self.max_batch_jobs) if self.asynchronous else len(batch))
        return deltas

    def _shrink(self, tried: int) -> None:
        if min(self.max_batch_jobs, tried) == 1:
            raise UserError("there is not enough memory to train even one client; use a smaller model or batch_size")
        self.max_batch_jobs = min(self.max_batch_jobs, tried) // 2
        self._graphs.clear()
        gc.collect()
        if self.asynchronous:
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()

    def _train(self, jobs: Sequence[TrainingJob], method: LocalMethod) -> list[Tensor]:
        order = sorted(range(len(jobs)), key=lambda i: -jobs[i].update.steps)  # jobs with fewer steps end first
        ordered = [jobs[i] for i in order]
        deltas = (self._train_on_device if self.asynchronous else self._train_in_threads)(ordered, method)
        by_job = dict(zip(order, deltas, strict=True))
        return [by_job[i] for i in range(len(jobs))]

    def _train_in_threads(self, jobs: Sequence[TrainingJob], method: LocalMethod) -> list[Tensor]:
        """Train groups of jobs, one thread for each core: no product is large enough for several threads."""
        most = self._limits_of(method).concurrent_jobs
        concurrent = min(self._cores, most)
        size, even_end = min(self._group_jobs, most // concurrent), self._group_jobs <= SMALL_GROUP
        groups = groups_of(jobs, size, concurrent, even_end=even_end)
        try:
            trained = in_parallel(
                [partial(self._train_group, group, method) for group in groups], concurrent, self._stop
            )
        finally:
            self._stopped = False
        return [delta for deltas in trained for delta in deltas]

    def _stop(self) -> None:
        """Let no thread continue to train jobs whose results are discarded."""
        self._stopped = True

    def _train_group(self, jobs: Sequence[TrainingJob], method: LocalMethod) -> list[Tensor]:
        starts = torch.stack([job.start for job in jobs])
        steps = [job.update.steps for job in jobs]
        samples, keys = torch.from_numpy(host_minibatches(jobs, steps[0])), torch.from_numpy(layer_keys(jobs))
        rates = torch.tensor([job.local_rate for job in jobs], dtype=starts.dtype)
        weights = self.split(starts)
        optimizer = self.optimizer(method, weights)
        if optimizer is not None:
            self._start(optimizer, jobs, torch.tensor(list(map(numbers_of, jobs)), dtype=torch.float64))
        group = JobGroup(weights, steps, samples, rates, keys)
        if self._stacked.direct:
            train_directly(group, self._task, self._stacked.direct, method, optimizer, lambda: self._stopped)
        else:
            for step, active in group.active_steps(lambda: self._stopped):
                remaining = {name: w[:active] for name, w in weights.items()}
                step_keys = extend_all(keys[:active], torch.tensor(step))
                self.step(remaining, samples[:active, step], rates[:active], step_keys, method, optimizer)
        return list(self._layout.update(starts, self.join(weights)).unbind())

    def optimizer(self, method: LocalMethod, weights: dict[str, Tensor]) -> StackedOptimizer | None:
        """Return an optimiser for these weights, or None for plain SGD, whose update is fused."""
        if method.fused:
            return None
        if not self._stacked.yields_gradients:
            raise UserError(
                f"the registered form of {', '.join(plugin_layers(self._module))} ignores context.targets, so only "
                "plain SGD can train the model; update the targets, or use --executor reference"
            )
        return StackedOptimizer(method, {name: weights[name] for name in self._trainable})

    def deferrable(self, method: LocalMethod, size: int) -> tuple[str, ...]:
        """Return the names of the weights whose updates are deferred in steps with mini-batches of this size."""
        if not method.fused or method.single_step or pending_steps(size) == 1:
            return ()
        return self._stacked.deferrable if isinstance(self._task.train.inputs, Tensor) else ()

    def _start(self, optimizer: StackedOptimizer, jobs: Sequence[TrainingJob], numbers: Tensor) -> None:
        """Start new jobs with an optimiser."""
        method, parts = optimizer.method, []
        for used, vectors in (
            (method.prox, [job.start if job.centre is None else job.centre for job in jobs]),
            (method.correction, [job.correction for job in jobs]),
        ):
            parts.append(self.views(torch.stack([v for v in vectors if v is not None])) if used else {})
        optimizer.start(numbers, *parts)

    def _train_on_device(self, jobs: Sequence[TrainingJob], method: LocalMethod) -> list[Tensor]:
        starts = torch.stack([job.start for job in jobs])
        counts = [job.update.steps for job in jobs]
        steps, keys = self._minibatches.send(np.column_stack([counts, layer_keys(jobs)])).unbind(1)
        samples = self._minibatches.draw(jobs, counts[0])
        graphs = self._graphs_for(jobs[0].local_training.batch_size, counts[0], starts[:1], method)
        active = list(active_counts(counts))
        graphs.capture(active)
        if graphs.optimizer is None:
            rates = self._minibatches.send([job.local_rate for job in jobs], starts.dtype)
        else:
            rates = torch.ones_like(starts[:, 0])  # not zero: these clients are active
            self._start(graphs.optimizer, jobs, self._minibatches.send(list(map(numbers_of, jobs)), torch.float64))
        ends = graphs.run(active, starts, samples, rates, steps, keys)
        # Each difference has its own memory: one that waits long for its round must not keep a whole batch alive.
        deltas = list(torch._foreach_sub(list(starts.unbind()), list(ends.unbind())))
        if self._layout.statistics:
            first = self._layout.first_statistic
            torch._foreach_copy_([delta[first:] for delta in deltas], list(ends[:, first:].unbind()))
        return deltas

    def _graphs_for(self, size: int, steps: int, like: Tensor, method: LocalMethod) -> StepGraphs:
        """Return the graphs of a method; one set of buffers serves jobs with any number of steps."""
        capacity = min(self.max_batch_jobs, self._limits_of(method).max_batch_jobs)
        key = (capacity, size, method)
        if key in self._graphs and self._graphs[key].steps < steps:
            torch.cuda.synchronize()  # the device may still replay them
            del self._graphs[key]  # frees the buffers before larger ones are made
        if key not in self._graphs:
            longest = max(LEAST_STEPS, 1 << (steps - 1).bit_length())
            self._graphs[key] = StepGraphs(self, capacity, size, longest, like, method)
        return self._graphs[key]

    def step(
        self, weights: dict[str, Tensor], samples: Tensor, rates: Tensor, keys: Tensor, method: LocalMethod,
        optimizer: StackedOptimizer | None = None, deferred: dict[str, DeferredUpdates] | None = None,
    ) -> None:  # fmt: skip
        """Do one step for every client, in place: (C, …) weights, (C, B) samples, (C,) rates and keys.

        An ``optimizer`` has rates of its own; on a CUDA device, a client with rate zero keeps its weights. Weights with
        ``deferred`` updates stay as they are.
        """
        clients, size = samples.shape
        data = self._batch(samples.reshape(-1), keys, method)
        if method.fused and self.asynchronous and self._stacked.direct and isinstance(data.inputs, Tensor):
            direct = DirectStep(self._stacked.direct, StackedPass(weights, rates, keys, deferred=deferred or {}))
            direct(data.inputs, partial(output_gradient, self._task, targets=data.targets, size=size))
            return

        def loss(outputs: Tensor) -> Tensor:
            return sample_losses(self._task, outputs, data.targets).view(clients, size).mean(dim=1).sum()

        if optimizer is None:
            self._stacked.sgd_step(weights, self._trainable, rates, keys, data.inputs, loss)
            return
        active = rates != 0 if self.asynchronous else torch.ones_like(rates, dtype=torch.bool)
        into = {name: gradient[:clients] for name, gradient in optimizer.gradients.items()}
        self._stacked.gradients(weights, into, active, keys, data.inputs, loss)
        optimizer.step(weights, active if self.asynchronous else None)

    def _batch(self, samples: Tensor, keys: Tensor, method: LocalMethod) -> Data:
        data = self._task.train[samples] if self._images is None else self._images[samples].map(channels_first)
        augmentation = augmentation_of(method.augment)
        return data if augmentation is None else replace(data, inputs=augmentation.stacked(data.inputs, keys))

    def evaluate(self, versions: Sequence[Tensor], data: Data) -> Tensor:
        """Return mean loss and metric of every version, (V, 2) in float64; the metric is NaN where there is none."""
        evaluate = self._evaluate if self.asynchronous else self._evaluate_in_threads
        return torch.cat([evaluate(versions[i : i + 32], data) for i in range(0, len(versions), 32)])

    def _evaluate(self, versions: Sequence[Tensor], data: Data) -> Tensor:
        context = StackedPass(self.split(torch.stack(list(versions))))
        parts = data.chunks(max(1, self._samples_at_once // len(versions)))
        return self._figures([self._scores(context, part) for part in parts], data)

    def _evaluate_in_threads(self, versions: Sequence[Tensor], data: Data) -> Tensor:
        """Evaluate parts of the data in threads; their size does not depend on the number of threads."""
        contexts, parts = [StackedPass(self._parts(v)) for v in versions], list(data.chunks(EVAL_CHUNK))
        work = [partial(self._scores, context, part) for context in contexts for part in parts]
        concurrent = max(1, min(self._cores, self._samples_at_once // EVAL_CHUNK))
        scores = in_parallel(work, concurrent)
        each = (scores[i : i + len(parts)] for i in range(0, len(scores), len(parts)))
        return torch.cat([self._figures(own, data) for own in each])

    @torch.no_grad()
    def _scores(self, context: StackedPass, part: Data) -> Scores:
        """Return the sums of losses and of hits of every version, and the outputs if the task has a metric."""
        count, task = context.clients, self._task
        repeated = part.map(lambda values: values.expand(count, *values.shape).flatten(0, 1))
        outputs = self._stacked.run(context, repeated.inputs)
        losses = sample_losses(task, outputs, repeated.targets).double().view(count, -1).sum(1)
        if task.metric is not None:
            return losses, torch.zeros_like(losses), outputs.view(count, -1, *outputs.shape[1:])
        if task.classes is None:
            return losses, torch.zeros_like(losses), None
        return losses, hits(outputs, repeated.targets).view(count, -1).sum(1).double(), None

    def _figures(self, scores: Sequence[Scores], data: Data) -> Tensor:
        """Return mean loss and metric of every version, (V, 2), from the scores of all parts of the data."""
        losses, correct = torch.zeros_like(scores[0][0]), torch.zeros_like(scores[0][1])
        for sums, counted, _ in scores:
            losses += sums
            correct += counted
        metric = correct / len(data) if self._task.classes is not None else torch.full_like(correct, torch.nan)
        if every := [outputs for _, _, outputs in scores if outputs is not None]:
            values = [own_metric(self._task, outputs, data.targets) for outputs in torch.cat(every, dim=1)]
            metric = metric.new_tensor([torch.nan if value is None else value for value in values])
        return torch.stack([losses / len(data), metric], dim=1)

    def views(self, vectors: Tensor) -> dict[str, Tensor]:
        """Return the parts of vectors (C, …) as views, with the dimensions in the order of the stacked layers."""
        parts = torch.split(vectors, [shape.numel() for shape in self._shapes.values()], dim=1)
        shaped = zip(self._shapes.items(), parts, strict=True)
        views = {name: part.view(len(vectors), *shape) for (name, shape), part in shaped}
        return views | {name: views[name].permute(CHANNELS_LAST) for name in self._stacked.channels_last}

    def _parts(self, version: Tensor) -> dict[str, Tensor]:
        """Return the parts of one version; only those whose dimensions have another order are copied."""
        views, moved = self.views(version.unsqueeze(0)), self._stacked.channels_last
        # ``contiguous`` would keep the strides of dimensions of one, from which PyTorch takes the order in memory.
        return views | {name: views[name].clone(memory_format=torch.contiguous_format) for name in moved}

    def split(self, vectors: Tensor) -> dict[str, Tensor]:
        """Return contiguous copies of the parts of vectors."""
        return {name: w.clone(memory_format=torch.contiguous_format) for name, w in self.views(vectors).items()}

    def join(self, weights: dict[str, Tensor]) -> Tensor:
        """Return the vectors of these parts, (C, …)."""
        first = next(iter(weights.values()))
        vectors = first.new_empty((len(first), self._size))
        for name, view in self.views(vectors).items():
            view.copy_(weights[name])
        return vectors
