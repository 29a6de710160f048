"""Infer readings of the paper: which values of the readings reproduce the seconds of Table 1.

The search has stages. A stage tries every combination of its readings on its cells, together with the best
combinations of the stages before. The error of a cell is |log(ours / paper)|; the score of a combination is the mean
error over its cells and over both times: that of the first hit, and that from which the target is held. Only cells of
stages are used in the search; the other cells of Table 1, more than a third, are held out and test the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Final

from .published import BOUNDS, Cell, cells
from .readings import FIRST, READINGS, N, Readings
from .result_files import Result, ResultFiles, StoredRun
from .run_grid import PaperRun
from .run_request import PaperRequest

SEED: Final = 0
MISSED: Final = 2.0
"""A run is given up after this multiple of the paper's seconds, and a target that is missed counts as this ratio."""

START: Final = Readings(
    upload="background",
    asysg_concurrency=N,
    favano_anchor="newest",
    favano_wait="0.1",
    favano_alpha="steps",
    favano_send="merge",
    fedbuff_concurrency="100",
    fedbuff_clients="any",
    slowness="uniform(1, 5)",
    normalise="symmetric",
    test_data="own",
    split="grouped-classes",
    sampling="shuffle",
)
"""Where the search starts. It does not follow the defaults, so that stored results stay those of the search."""

TIMES: Final = {"first_hit_seconds": "first hit", "sustained_seconds": "sustained"}


def _cells(*rows: tuple[str, str, str], sizes: Sequence[int] = (10,)) -> tuple[Cell, ...]:
    return tuple(Cell(dataset, setting, name, n) for dataset, setting, name in rows for n in sizes)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the search: every combination of ``readings`` is scored on ``cells``; the ``keep`` best go on."""

    title: str
    readings: tuple[str, ...]
    cells: tuple[Cell, ...]
    keep: int = 1


STAGES: Final = (
    Stage(
        "inputs and mini-batches",
        ("normalise", "sampling"),
        _cells(
            ("fashionmnist", "iid", "fedavg"),
            ("fashionmnist", "iid", "defedavg-iid"),
            ("cifar10", "iid", "fedavg"),
            ("cifar10", "iid", "defedavg-iid"),
        ),
    ),
    Stage(
        "test data",
        ("test_data",),
        _cells(
            ("fashionmnist", "iid", "fedavg"),
            ("fashionmnist", "iid", "defedavg-iid"),
            ("cifar10", "iid", "fedavg"),
            ("cifar10", "iid", "defedavg-iid"),
        )
        + _cells(("fashionmnist", "iid", "fedavg"), sizes=(40,)),
    ),
    Stage(
        "time",
        ("slowness", "upload"),
        _cells(("fashionmnist", "iid", "fedavg"), ("fashionmnist", "iid", "defedavg-iid"), sizes=(10, 40)),
    ),
    Stage(
        "classes of a client",
        ("split",),
        _cells(
            ("fashionmnist", "non-iid", "fedavg"),
            ("fashionmnist", "non-iid", "defedavg-niid"),
            ("cifar10", "non-iid", "defedavg-niid"),
        )
        + _cells(("fashionmnist", "non-iid", "fedavg"), sizes=(40,)),
    ),
    Stage(
        "the other algorithms",
        ("asysg_concurrency", "favano_anchor", "fedbuff_concurrency"),
        _cells(
            ("fashionmnist", "iid", "asysg"),
            ("fashionmnist", "iid", "favano"),
            ("fashionmnist", "non-iid", "favano"),
            ("fashionmnist", "non-iid", "fedbuff"),
        ),
    ),
    Stage(
        "FAVANO's wait",
        ("favano_wait",),
        _cells(("fashionmnist", "iid", "favano"), ("fashionmnist", "non-iid", "favano")),
    ),
    Stage("regularisation", ("weight_decay", "augment"), _cells(("cifar10", "iid", "defedavg-iid"))),
    Stage(
        "FAVANO's α",
        ("favano_alpha",),
        _cells(("fashionmnist", "iid", "favano"), ("fashionmnist", "non-iid", "favano"), sizes=(10, 20)),
    ),
    Stage(
        "when FAVANO's clients receive a version",
        ("favano_send",),
        _cells(("fashionmnist", "iid", "favano"), ("fashionmnist", "non-iid", "favano"), sizes=(10, 20)),
    ),
    Stage(
        "FedBuff's clients",
        ("fedbuff_clients",),
        _cells(("fashionmnist", "non-iid", "fedbuff"), sizes=(10, 20, 40, 80)),
    ),
)

SEARCHED: Final = tuple(dict.fromkeys(cell for stage in STAGES for cell in stage.cells))
HELD_OUT: Final = tuple(cell for cell in cells() if cell not in SEARCHED)


def error(cell: Cell, seconds: float | None) -> float:
    """Return |log(ours / paper)|; a missed target counts as the ratio ``MISSED``.

    Where the paper missed the target by the time t, it is zero if we missed it, too, and |log(ours / t)| otherwise.
    """
    if seconds is None:
        return 0.0 if cell.seconds is None else math.log(MISSED)
    return abs(math.log(seconds / (cell.seconds or BOUNDS[cell.dataset])))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A combination of readings with its scores by the kind of time; ``times`` holds the seconds of every cell."""

    readings: Readings
    times: Mapping[Cell, Mapping[str, float | None]]

    def score(self, kind: str) -> float:
        """Return the mean error over the cells."""
        return fmean(error(cell, times[kind]) for cell, times in self.times.items())

    @property
    def mean_score(self) -> float:
        """The mean of the two scores. The lower one would let every combination choose the kind that suits it."""
        return fmean(self.score(kind) for kind in TIMES)


@dataclass(frozen=True)
class Search:
    """The search over ``stages``; results of runs are in the folder ``infer`` of the request."""

    request: PaperRequest
    stages: Sequence[Stage] = STAGES
    _results: dict[tuple[Cell, tuple[tuple[str, str], ...]], Result] = field(default_factory=dict)

    def store(self, readings: Readings, cell: Cell) -> ResultFiles:
        """Return the store of a cell's results; its name has the readings that affect the cell and are not the first.

        So a reading that is added later does not change the names of stored results.
        """
        choices = replace(
            self.request.choices, readings=readings, time_limit_factor=MISSED, max_seconds=None, as_long_as_fedavg=False
        )
        first = FIRST.relevant(cell)
        changed = {name: value for name, value in readings.relevant(cell).items() if value != first.get(name)}
        suffix = "".join(f" {name}={value}" for name, value in changed.items())
        return ResultFiles(self.request.folder / "infer", choices, suffix)

    def run(self) -> tuple[list[list[Candidate]], bool]:
        """Return the candidates of every stage, best first, and False if Ctrl-C stopped the search or runs are missing.

        The search ends with the first stage that is not complete.
        """
        kept = [START]
        ranked: list[list[Candidate]] = []
        for number, stage in enumerate(self.stages):
            combinations = _combinations(stage, kept)
            if not self._compute(stage, combinations):
                return ranked, False
            scored = [*stage.cells, *self._unaffected(number)]
            candidates = [Candidate(each, {c: self._times(each, c) for c in scored}) for each in combinations]
            candidates.sort(key=lambda candidate: candidate.mean_score)
            ranked.append(candidates)
            kept = [candidate.readings for candidate in candidates[: stage.keep]]
        return ranked, True

    def expected(self, number: int) -> Readings:
        """Return the readings with which a stage begins if the stages before it find the defaults."""
        found = [name for stage in self.stages[:number] for name in stage.readings]
        return replace(START, **{name: getattr(Readings(), name) for name in found})

    def compute_stage(self, number: int, assumed: Readings) -> bool:
        """Compute the runs of one stage as if it began with ``assumed``; return whether all are stored.

        So stages can be computed side by side. ``run`` uses the results of those that were assumed correctly.
        """
        stage = self.stages[number]
        return self._compute(stage, _combinations(stage, [assumed]))

    def _unaffected(self, number: int) -> list[Cell]:
        """Return the cells of earlier stages that the readings of a stage do not affect: their results are known."""
        stage, before = self.stages[number], [cell for stage in self.stages[:number] for cell in stage.cells]
        every = [replace(Readings(), **{n: v}) for n in stage.readings for v in READINGS[n].values]
        affected = {cell for cell in before for name in stage.readings for r in every if name in r.relevant(cell)}
        return [cell for cell in dict.fromkeys(before) if cell not in affected and cell not in stage.cells]

    def _compute(self, stage: Stage, combinations: Iterable[Readings]) -> bool:
        """Compute the runs of a stage that have no result; return whether all of them have one."""
        runs = {
            _key(readings, cell): StoredRun(self.store(readings, cell), PaperRun(cell, cell.rates))
            for readings in combinations
            for cell in stage.cells
        }
        table = ResultFiles(self.request.folder / "table1", self.request.choices)
        for each in runs.values():
            each.store.adopt_matching(table, each.run, SEED)
        missing = [(each, SEED) for each in runs.values() if each.store.missing([each.run], [SEED])]
        title = f"readings: {stage.title}"
        return self.request.compute_stored(missing, len(runs) - len(missing), self.request.folder / "infer", title)

    def _times(self, readings: Readings, cell: Cell) -> dict[str, float | None]:
        key = _key(readings, cell)
        if key not in self._results:
            (self._results[key],) = self.store(readings, cell).results([PaperRun(cell, cell.rates)], [SEED])
        return {kind: self._results[key][kind] for kind in TIMES}


def _combinations(stage: Stage, bases: Sequence[Readings]) -> list[Readings]:
    """Return every combination of the readings of a stage with each of the bases."""
    return [
        replace(base, **dict(zip(stage.readings, values, strict=True)))
        for base in bases
        for values in product(*(READINGS[name].values for name in stage.readings))
    ]


def _key(readings: Readings, cell: Cell) -> tuple[Cell, tuple[tuple[str, str], ...]]:
    """Return a key that is equal for readings that do not differ in what affects the cell."""
    return cell, tuple(readings.relevant(cell).items())
