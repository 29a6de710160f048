"""Where a run stands between two rounds: all that is needed to go on later, elsewhere, to the same bits.

The plan is not in it, since it can be made again. Updates that wait for their round are named; those that would not be
the same bit for bit if they were trained again are in it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from ..algorithms.protocol import Update
from ..errors import UserError
from ..planning.records import Record, Round
from .batched import BatchedRun
from .reference import Reference
from .stopping import EvalCounters, EvalSchedule, Evaluation, RunProgress
from .trainer import Trainer

VERSION, UPDATE = "version", "update"


@dataclass(frozen=True, slots=True, eq=False)
class RunState:
    """A run between two rounds."""

    tally: EvalCounters
    updates_trained: int
    first_hit_seconds: float | None
    sustained_seconds: float | None
    versions: Mapping[int, Tensor]
    waiting: tuple[Update, ...] = ()
    deltas: Mapping[Update, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, reference: Reference, meter: EvalSchedule, progress: RunProgress) -> RunState:
        """Of a run computed one job after the other."""
        tally = meter.tally
        kept = EvalCounters(**{**asdict(tally), "staleness": list(tally.staleness), "wall_seconds": meter.wall_seconds})
        hits = progress.first_hit_seconds, progress.sustained_seconds
        return cls(kept, reference.updates_trained, *hits, dict(reference.versions))

    @classmethod
    def of_lane(cls, lane: BatchedRun, trainer: Trainer) -> RunState:
        """Of a run that shares batches."""
        plain = cls.of(lane.reference, lane.meter, lane.progress)
        kept = {} if trainer.repeats else dict(lane.deltas)
        hits = plain.first_hit_seconds, plain.sustained_seconds
        return cls(plain.tally, plain.updates_trained, *hits, plain.versions, tuple(lane.deltas), kept)

    def to_json(self) -> dict[str, Any]:
        """All but the tensors."""
        return {
            "tally": asdict(self.tally),
            "updates_trained": self.updates_trained,
            "first_hit_seconds": self.first_hit_seconds,
            "sustained_seconds": self.sustained_seconds,
            "versions": sorted(self.versions),
            "waiting": [[u.client, u.index, u.version, u.steps, u in self.deltas] for u in self.waiting],
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors by name."""
        for version, weights in self.versions.items():
            yield f"{VERSION}.{version}", weights
        for update, delta in self.deltas.items():
            yield f"{UPDATE}.{update.client}.{update.index}", delta

    @classmethod
    def from_json(cls, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RunState:
        """Put together again; what is no standing raises KeyError, TypeError or ValueError."""
        tally = found["tally"]
        if set(tally) != {f.name for f in fields(EvalCounters)}:
            raise ValueError("wrong fields")
        (newest, now), (measured, then) = tally["newest"], tally["measured"]
        waiting = {Update(*map(int, ids)): kept for *ids, kept in found["waiting"]}
        return cls(
            EvalCounters(**{**tally, "newest": (int(newest), float(now)), "measured": (int(measured), float(then))}),
            int(found["updates_trained"]),
            found["first_hit_seconds"],
            found["sustained_seconds"],
            {int(version): tensors[f"{VERSION}.{version}"] for version in found["versions"]},
            tuple(waiting),
            {u: tensors[f"{UPDATE}.{u.client}.{u.index}"] for u, kept in waiting.items() if kept},
        )

    def restore(self, reference: Reference, progress: RunProgress, evaluations: Iterable[Evaluation]) -> None:
        """Let a fresh run stand here, with what it measured until now."""
        first = reference.versions[0]
        for weights in self.versions.values():
            if weights.shape != first.shape or weights.dtype != first.dtype:
                raise UserError("the checkpoint is of another model; was the program or the model changed?")
        reference.versions = {version: weights.to(first.device) for version, weights in self.versions.items()}
        reference.updates_trained = self.updates_trained
        progress.rounds, progress.seconds = self.tally.newest
        progress.first_hit_seconds, progress.sustained_seconds = self.first_hit_seconds, self.sustained_seconds
        progress.evaluations = list(evaluations)

    def restore_lane(self, lane: BatchedRun, trainer: Trainer) -> None:
        """Give a lane the updates that wait for their round; those that were not kept are trained again."""
        device = lane.reference.versions[lane.newest].device
        missing = [update for update in self.waiting if update not in self.deltas]
        again = dict(zip(missing, trainer.train([lane.job(update) for update in missing]), strict=True))
        lane.deltas = {u: self.deltas[u].to(device) if u in self.deltas else again[u] for u in self.waiting}

    def skip(self, records: Iterator[Record]) -> Iterator[Record]:
        """What is left of a plan behind here; refuses a plan that did not lead here."""
        newest, seconds = self.tally.newest
        live = {0}
        last = None
        while newest > 0 and (last is None or last.merge.version < newest):
            last = next((record for record in records if isinstance(record, Round)), None)
            if last is None:
                break
            live = (live | {last.merge.version}) - set(last.freed)
        if live != set(self.versions) or (newest > 0 and (last is None or last.time != seconds)):
            raise UserError("the plan is another than the one that was begun; was the trace or the program changed?")
        return records
