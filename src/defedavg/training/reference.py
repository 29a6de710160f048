"""The reference executor: a plain sequential loop, and the correctness oracle for every other executor.

For each merge it trains the jobs that the merge uses, one after the other, and applies

    w[t+1] = Σ a·w[v] + global_lr · rate_scale · (Σ b·Δ + Σ c·s)

with the state vectors s that merges assign, or, with a server optimiser, the step that it makes of this merge.
Running statistics, such as those of batch normalisation, are no weights: a difference of variances can be negative.
Their new values are the mean of the clients' values at the end of their jobs, with weights proportional to |b|.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn.utils import vector_to_parameters

from ..algorithms.protocol import FROM_VERSION, SERVER_OPTIMIZERS, Merge, Update
from ..errors import UserError
from ..planning.records import Record, Round
from ..rng import extend, key
from ..tasks import Data, Task, build_model
from ..tasks.model_calls import describe, logits_of
from ..tasks.samples import Inputs, tensors_of
from .augmentation import augmentation_of
from .evaluation import EvalResult, EvalSchedule, PendingEval
from .local_optimizers import LocalOptimizer
from .local_training import LocalTraining
from .module_state import VersionLayout, keyed_copy, updated_buffers, weighted_mean
from .placed_vectors import LiveVersions
from .scoring import check_outputs, hits, own_metric, sample_losses
from .state_vectors import NO_STATE, StateLayout, StateVectors, all_finite, assign, weighted_sum
from .stopping import Evaluation, StoppingRule
from .tensor_rng import signed

# A version is one vector. cuDNN copies the weights of recurrent layers from it and would warn about this in every run.
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")

CHUNK = 1000  # samples in one step of an evaluation

CheckpointHook = Callable[[], None]
"""Called whenever all computed versions are evaluated and reported: here a run can be checkpointed."""


class FlatModel:
    """A module whose parameters and running statistics are views of one vector, so that a version is one tensor.

    ``statistics`` names the buffers that a version contains. Dropout layers draw keyed masks from ``draws``.
    """

    def __init__(self, module: nn.Module, statistics: Collection[str] = ()) -> None:
        # A copy, because this class writes to it, and a model builder may return the same module each time.
        self.module, self.draws = keyed_copy(module)
        self.layout = VersionLayout.of(self.module, statistics)
        tensors = self.layout.tensors(self.module)
        self.trainable = [p for p in self.module.parameters() if p.requires_grad]
        if not tensors:
            raise UserError("the model has no parameters; use a model that has some")
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise UserError("the model mixes number types; give all its parameters and buffers the same dtype")
        if not self.trainable:
            raise UserError("every parameter of the model is frozen; use a model that can be trained")
        self.vector = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        vector_to_parameters(self.vector, tensors)
        views = set(map(id, tensors))
        self._buffers = [  # with the initial values of constants and counters
            (owner, name, buffer, None if id(buffer) in views else buffer.clone())
            for owner in self.module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]

    def load(self, weights: Tensor) -> None:
        """Load a version, and reset the constants and counters, which no version contains, to their initial values."""
        self.vector.copy_(weights)
        for owner, name, buffer, initial in self._buffers:
            if getattr(owner, name) is not buffer:  # forward has assigned a new tensor
                setattr(owner, name, buffer)
            if initial is not None:
                buffer.copy_(initial)

    def trainable_parts(self, vector: Tensor) -> list[Tensor]:
        """Return the parts of a vector with the layout of a version that belong to the trainable parameters."""
        tensors, trainable = self.layout.tensors(self.module), set(map(id, self.trainable))
        parts = torch.split(vector, [tensor.numel() for tensor in tensors])
        pairs = zip(parts, tensors, strict=True)
        return [part.view_as(tensor) for part, tensor in pairs if id(tensor) in trainable]

    def trained(self) -> Tensor:
        """Return the vector after training, with the statistics to which ``forward`` has assigned new tensors."""
        for owner, name, buffer, initial in self._buffers:
            if initial is None and getattr(owner, name) is not buffer:
                buffer.copy_(getattr(owner, name).detach())
        return self.vector


@contextmanager
def _fitting(use: str, inputs: Inputs, batch_size: int = 0) -> Iterator[None]:
    """Turn an error of the user's model or loss into ``UserError``, which says what does not fit."""
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    except UserError:
        raise
    except Exception as error:  # a model and a loss may raise anything
        if batch_size == 1 and "more than 1 value per channel" in str(error):
            raise UserError(
                "batch_size is 1, but batch normalisation needs several values per channel in every batch; set a "
                "larger batch_size, or use GroupNorm"
            ) from error
        shown = ", ".join(f"{tuple(part.shape)} {str(part.dtype)[6:]}" for part in tensors_of(inputs))
        raise UserError(f"the model cannot be {use} (inputs {shown}): {describe(error)}") from error


def _statistics(merge: Merge, deltas: Mapping[Update, Tensor]) -> list[tuple[Tensor, float]]:
    """Return the updates whose running statistics are averaged, with weights; equal ones in assignments alone."""
    # A client whose update has no steps has seen no data.
    trained = [(update, weight) for update, weight in merge.updates if update.steps]
    if any(weight for _, weight in trained):
        return [(deltas[update], weight) for update, weight in trained]
    return [(deltas[update], 1.0) for update, _ in trained if update in merge.assigned]


class Reference:
    """Computes the rounds of one plan, in order."""

    def __init__(self, task: Task, local_training: LocalTraining, state: StateLayout = NO_STATE) -> None:
        self.task, self.local_training = task, local_training
        self.updates_trained = 0
        module = build_model(task, key(local_training.seed, "init"))
        batch = task.train[torch.from_numpy(np.resize(task.clients[0], local_training.batch_size))]
        with _fitting("trained on these data with this loss", batch.inputs, len(batch)):
            self._flat = FlatModel(module, updated_buffers(module, batch.inputs).statistics)
            self.versions = LiveVersions(self._flat.vector.clone())
            self.state = StateVectors(state, self.versions[0])
            if self.layout.statistics and state.job_start != FROM_VERSION:
                raise UserError(
                    "the model has running statistics, but jobs of this algorithm start from models that clients keep; "
                    "use GroupNorm instead of batch normalisation"
                )
            self._check(batch)
        self.version_seconds: dict[int, float] = {0: 0.0}  # when each live version was made
        self._augmentation = augmentation_of(local_training.augment)
        if self._augmentation is not None:
            self._augmentation.check(batch.inputs)
        tested = task.test[:2]  # normalisation over a batch needs two
        with _fitting("evaluated on the test data", tested.inputs):
            self._check(tested)

    def _check(self, data: Data) -> None:
        """Compute the gradients of the loss, so that a model that does not fit its data is refused at once."""
        self._flat.module.eval()
        # In evaluation mode, the recurrent layers of cuDNN have no backward pass.
        with cudnn.flags(enabled=False):
            outputs = logits_of(self._flat.module, data.inputs)
            check_outputs(self.task, outputs, data.targets)
            loss = sample_losses(self.task, outputs, data.targets).mean()
            torch.autograd.grad(loss, self._flat.trainable, allow_unused=True)

    def _gradients(self, samples: Tensor, step_key: int) -> tuple[Tensor | None, ...]:
        data = self.task.train[samples]
        inputs = data.inputs if self._augmentation is None else self._augmentation.one_by_one(data.inputs, step_key)
        loss = sample_losses(self.task, self._flat.module(inputs), data.targets).mean()
        return torch.autograd.grad(loss, self._flat.trainable, allow_unused=True)

    @property
    def module(self) -> nn.Module:
        """The model, with the weights that were loaded last."""
        return self._flat.module

    @property
    def layout(self) -> VersionLayout:
        """Which values a version contains."""
        return self._flat.layout

    def state_need(self, rounds: int) -> int:
        """Return the number of state vectors after that many rounds, at most."""
        return self.state.layout.vectors(rounds) + SERVER_OPTIMIZERS[self.local_training.server.name]

    def release(self) -> None:
        """Free the copies on the device of vectors in host memory."""
        self.versions.release()
        self.state.release()

    def finish(self) -> None:
        """Keep only the newest version."""
        self.state.clear()
        newest = max(self.versions)
        self.versions.replace({newest: self.versions[newest]})

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """Return a version as a state dict for ``load_state_dict``, on the CPU."""
        self._flat.load(weights)
        return {name: value.detach().cpu().clone() for name, value in self._flat.module.state_dict().items()}

    def apply(self, record: Round) -> Tensor:
        """Train the jobs that the merge uses, merge their updates, and return the new version."""
        return self.merge(record, {u: self._train(u) for u, _ in record.merge.updates if u.steps})

    def merge(self, record: Round, deltas: Mapping[Update, Tensor]) -> Tensor:
        """Merge trained updates, delete the versions that the plan frees, and return the new version."""
        merge, keys = record.merge, (self.local_training.seed, record.merge.version)
        assign(self.state, merge.before, self.versions, deltas, keys)
        merged = self._merged(merge, deltas, self._global_rate(record))
        if self.layout.statistics:
            first = self.layout.first_statistic
            newest = self.versions[max(version for version, _ in merge.past)]
            merged[first:] = weighted_mean(((d[first:], b) for d, b in _statistics(merge, deltas)), newest[first:])
        self.versions[merge.version] = merged
        self.version_seconds[merge.version] = record.time
        assign(self.state, merge.after, self.versions, deltas, keys)
        for version in record.freed:
            del self.versions[version]
            del self.version_seconds[version]
        self.versions.end_merge(merge.version)
        self.state.release()
        return merged

    def _merged(self, merge: Merge, deltas: Mapping[Update, Tensor], global_rate: float) -> Tensor:
        optimizer, rate = self.local_training.server, global_rate * merge.rate_scale
        plain = optimizer.name == "sgd"
        scale = rate if plain else 1.0
        # An update without steps is zero.
        terms = [(deltas[update], b * scale) for update, b in merge.updates if update.steps and b != 0.0]
        past = [(self.versions[version], a) for version, a in merge.past]
        if merge.states:
            states = ((self.state[vector], c * scale) for vector, c in merge.states)
            # The newest version is first: its coefficient is often one.
            terms = [*reversed(past), *((value, c) for value, c in states if value is not None), *terms]
        else:
            terms += past
        merged = weighted_sum(terms)
        if plain:
            return merged
        newest = self.versions[merge.version - 1]
        return newest.sub(optimizer.step(newest - merged, self.state), alpha=rate)

    def _global_rate(self, record: Round) -> float:
        newest = record.merge.version - 1
        return self.local_training.global_rate(newest, self.version_seconds[newest])

    def local_rate(self, update: Update) -> float:
        """Return the local rate of a job, by the version that it starts from."""
        return self.local_training.local_rate(update.version, self.version_seconds[update.version])

    def _train(self, update: Update) -> Tensor:
        self.updates_trained += 1
        return self.train(update, self.start_of(update), correction=self.correction_of(update))[0]

    def start_of(self, update: Update) -> Tensor:
        """Return the weights from which the job of an update starts."""
        version = self.versions[update.version]
        if self.state.layout.job_start == FROM_VERSION:
            return version
        start = self.state.of_client(self.state.layout.job_start, update.client, version)
        return torch.zeros_like(version) if start is None else start

    def correction_of(self, update: Update) -> Tensor | None:
        """Return what is added to every gradient of the job of an update, None for nothing."""
        terms = self.state.layout.correction
        return self.state.of_client(terms, update.client, self.versions[update.version]) if terms else None

    def train(
        self, update: Update, start: Tensor, client_samples: NDArray[np.int64] | None = None,
        may_continue: Callable[[int], bool] = lambda _: True, *, rate: float | None = None,
        centre: Tensor | None = None, correction: Tensor | None = None,
    ) -> tuple[Tensor, int]:  # fmt: skip
        """Return the update of a job that starts from ``start``, and the number of steps done.

        ``may_continue`` is called with the step number before each step, and ends the job by returning False.
        ``rate`` replaces the local rate of the schedule. ``centre`` and ``correction`` are those of a ``TrainingJob``.
        """
        flat, training = self._flat, self.local_training
        samples_of_steps = torch.from_numpy(training.samples(self.task, update, client_samples)).to(flat.vector.device)
        done = 0
        flat.load(start)
        flat.module.train()
        optimizer = LocalOptimizer(
            training,
            self.local_rate(update) if rate is None else rate,
            flat.trainable,
            flat.trainable_parts(start if centre is None else centre),
            None if correction is None else flat.trainable_parts(correction),
        )
        # Layers that use PyTorch's global generator draw from the job's key; the global state is restored afterwards.
        with torch.random.fork_rng(devices=[]):
            layer_key = training.layer_key(update)
            torch.default_generator.manual_seed(layer_key >> 1)
            for step, samples in enumerate(samples_of_steps):
                if not may_continue(step):
                    break
                step_key = extend(layer_key, step)
                if flat.draws.used:
                    flat.draws.key = torch.tensor(signed(step_key), device=flat.vector.device)
                optimizer.step(self._gradients(samples, step_key))
                done += 1
        return flat.layout.update(start, flat.trained()), done

    def outputs(self, weights: Tensor, data: Data) -> Iterator[tuple[Data, Tensor]]:
        """Yield the data in parts, each with the outputs of a version."""
        self._flat.load(weights)
        self._flat.module.eval()
        for part in data.chunks(CHUNK):
            with torch.no_grad():
                outputs = self._flat.module(part.inputs)
            check_outputs(self.task, outputs, part.targets)
            yield part, outputs

    def evaluate(self, weights: Tensor, data: Data) -> tuple[float, float | None]:
        """Return the mean loss of a version and its metric: the accuracy, or the task's own."""
        task, losses, correct, kept = self.task, [], 0, []
        for part, outputs in self.outputs(weights, data):
            losses.append(sample_losses(task, outputs, part.targets).double())
            if task.metric is not None:
                kept.append(outputs)
            elif task.classes is not None:
                correct += int(hits(outputs, part.targets).sum())
        loss = float(torch.cat(losses).mean())
        if task.metric is not None:
            return loss, own_metric(task, torch.cat(kept), data.targets)
        return loss, None if task.classes is None else correct / len(data)


def evaluate_version(executor: Reference, schedule: EvalSchedule, pending: PendingEval) -> EvalResult:
    """Evaluate a version now: whether it is finite and, if it is to be evaluated, its loss and accuracy."""
    finite = all_finite(pending.weights)
    if not finite or not pending.evaluate:
        return EvalResult(finite)
    loss, accuracy = executor.evaluate(pending.weights, schedule.test)
    train_loss = executor.evaluate(pending.weights, schedule.train_subset)[0] if schedule.train_subset else None
    return EvalResult(True, loss, accuracy, train_loss)


def run_reference(
    records: Iterable[Record], executor: Reference, rule: StoppingRule, schedule: EvalSchedule,
    checkpoint_hook: CheckpointHook = lambda: None,
) -> Iterator[Evaluation]:  # fmt: skip
    """Compute rounds one after the other until the rule stops the run, and yield every evaluation."""
    for pending in _pending_evaluations(records, executor, rule, schedule):
        evaluation = schedule.record(pending, evaluate_version(executor, schedule, pending))
        if evaluation is not None:
            yield evaluation
        if not schedule.running:
            return
        checkpoint_hook()


def _pending_evaluations(
    records: Iterable[Record], executor: Reference, rule: StoppingRule, schedule: EvalSchedule
) -> Iterator[PendingEval]:
    newest = executor.versions[schedule.counters.newest[0]]
    if not schedule.started:
        yield schedule.start(newest)
    for record in records:
        if rule.ended_by(record):
            yield schedule.ended(record, newest)
        elif isinstance(record, Round):
            newest = executor.apply(record)
            yield schedule.round(record, newest)
