"""The state of a run between two rounds: what a checkpoint needs to resume it in the same environment.

The state does not contain the plan, which can be made again. It names the trained updates that wait for their round,
and contains those that could differ in some bits if they were trained again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

from torch import Tensor

from ..algorithms.protocol import StateVector, Update
from ..errors import UserError
from ..jsonio import is_count
from ..planning.records import Record, Round
from .batched import BatchedRun
from .evaluation import EvalCounters, EvalSchedule
from .placed_vectors import own_memory
from .reference import Reference
from .stopping import Evaluation, RunProgress
from .trainer import Trainer

RENAMED = {"consecutive_hits": "hits", "hits_since": "since", "evaluated": "measured"}
COUNTER_KEYS = {each.name: RENAMED.get(each.name, each.name) for each in fields(EvalCounters)}
"""Field of ``EvalCounters`` -> its key in the ``tally`` of a checkpoint, which is a file format."""


def _tensor_name(vector: StateVector) -> str:
    return f"state.{vector.name}.{vector.index}"


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError("not a count")
    return int(value)


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError("not a time")
    return float(value)


def _counters(tally: Mapping[str, Any]) -> EvalCounters:
    if set(tally) != set(COUNTER_KEYS.values()):
        raise ValueError("wrong fields")
    counters = {name: tally[key] for name, key in COUNTER_KEYS.items()}
    for name in ("newest", "evaluated"):
        number, seconds = counters[name]
        counters[name] = (_count(number), _time(seconds))
    checks = {"updates": _count, "consecutive_hits": _count, "hits_since": _time, "wall_seconds": _time}
    counters |= {name: check(counters[name]) for name, check in checks.items()}
    counters["staleness"] = list(map(_count, counters["staleness"]))
    return EvalCounters(**counters)


@dataclass(frozen=True, slots=True, eq=False)
class RunState:
    """A run between two rounds."""

    counters: EvalCounters
    updates_trained: int
    first_hit_seconds: float | None
    sustained_seconds: float | None
    versions: Mapping[int, Tensor]
    waiting: tuple[Update, ...] = ()
    deltas: Mapping[Update, Tensor] = field(default_factory=dict)
    state: Mapping[StateVector, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, reference: Reference, schedule: EvalSchedule, progress: RunProgress) -> RunState:
        """Return the state of a run of the reference executor."""
        staleness = list(schedule.counters.staleness)
        counters = replace(schedule.counters, staleness=staleness, wall_seconds=schedule.wall_seconds)
        hits = progress.first_hit_seconds, progress.sustained_seconds
        state = reference.state.assigned()
        return cls(counters, reference.updates_trained, *hits, reference.versions.stored(), state=state)

    @classmethod
    def of_batched_run(cls, run: BatchedRun, trainer: Trainer) -> RunState:
        """Return the state of a run of the batched executor."""
        state = cls.of(run.reference, run.schedule, run.progress)
        kept = {} if trainer.batch_invariant_for(run.reference.local_training) else dict(run.deltas)
        return replace(state, waiting=tuple(run.deltas), deltas=kept)

    def on_host(self) -> RunState:
        """Return the same state in host memory that no later merge changes."""
        versions = {version: own_memory(weights.cpu()) for version, weights in self.versions.items()}
        deltas = {update: delta.cpu() for update, delta in self.deltas.items()}
        state = {vector: own_memory(value.cpu()) for vector, value in self.state.items()}
        return replace(self, versions=versions, deltas=deltas, state=state)

    def to_json(self) -> dict[str, Any]:
        """Return everything except the tensors."""
        state = {"state": [[vector.name, vector.index] for vector in self.state]} if self.state else {}
        return {
            **state,
            "tally": {stored: getattr(self.counters, name) for name, stored in COUNTER_KEYS.items()},
            "updates_trained": self.updates_trained,
            "first_hit_seconds": self.first_hit_seconds,
            "sustained_seconds": self.sustained_seconds,
            "versions": sorted(self.versions),
            "waiting": [[u.client, u.index, u.version, u.steps, u in self.deltas] for u in self.waiting],
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by name."""
        for version, weights in self.versions.items():
            yield f"version.{version}", weights
        for update, delta in self.deltas.items():
            yield f"update.{update.client}.{update.index}", delta
        for vector, value in self.state.items():
            yield _tensor_name(vector), value

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RunState:
        """Return the stored state, or raise KeyError, TypeError or ValueError if this is not one."""
        counters = _counters(stored["tally"])
        for name in ("first_hit_seconds", "sustained_seconds"):
            if stored[name] is not None:
                _time(stored[name])
        waiting = {Update(*map(_count, ids)): kept for *ids, kept in stored["waiting"]}
        vectors = [StateVector(str(name), int(index)) for name, index in stored.get("state", [])]  # absent in old ones
        return cls(
            counters,
            _count(stored["updates_trained"]),
            stored["first_hit_seconds"],
            stored["sustained_seconds"],
            {int(version): tensors[f"version.{version}"] for version in stored["versions"]},
            tuple(waiting),
            {u: tensors[f"update.{u.client}.{u.index}"] for u, kept in waiting.items() if kept},
            {vector: tensors[_tensor_name(vector)] for vector in vectors},
        )

    def restore(self, reference: Reference, progress: RunProgress, evaluations: Iterable[Evaluation]) -> None:
        """Bring a new run to this state, with the evaluations that it had yielded before."""
        initial = reference.versions[0]
        for weights in (*self.versions.values(), *self.state.values()):
            if weights.shape != initial.shape or weights.dtype != initial.dtype:
                raise UserError("the checkpoint belongs to a different model; restore the program and the model")
        clients = reference.task.num_clients
        if not all(update.version in self.versions and update.client < clients for update in self.waiting):
            raise UserError("the checkpoint has updates that this run does not have; start again with --force")
        reference.versions.replace(self.versions)
        reference.state.restore(self.state)
        reference.updates_trained = self.updates_trained
        progress.rounds, progress.seconds = self.counters.newest
        progress.first_hit_seconds, progress.sustained_seconds = self.first_hit_seconds, self.sustained_seconds
        progress.evaluations = list(evaluations)

    def restore_batched_run(self, run: BatchedRun, trainer: Trainer) -> None:
        """Give a restored run the updates that wait for their round; train again those that were not stored."""
        device = run.reference.versions[run.newest].device
        missing = [update for update in self.waiting if update not in self.deltas]
        retrained: dict[Update, Tensor] = {}
        for begin in range(0, len(missing), trainer.max_batch_jobs):  # few starts are on the device together
            batch = missing[begin : begin + trainer.max_batch_jobs]
            retrained.update(zip(batch, trainer.train([run.job(update) for update in batch]), strict=True))
        run.deltas = {u: self.deltas[u].to(device) if u in self.deltas else retrained[u] for u in self.waiting}

    def skip(self, records: Iterator[Record], reference: Reference) -> Iterator[Record]:
        """Advance a plan to this state and return the rest of it; refuse a plan that does not lead to this state.

        The times of the live versions are those of the plan.
        """
        newest, seconds = self.counters.newest
        live, reached = {0: 0.0}, 0.0
        for record in islice((record for record in records if isinstance(record, Round)), newest):
            live[record.merge.version] = reached = record.time
            for version in record.freed:
                live.pop(version, None)
        if live.keys() != self.versions.keys() or reached != seconds:
            raise UserError("the plan differs from the one in the checkpoint; restore the program and the trace file")
        reference.version_seconds = live
        return records
