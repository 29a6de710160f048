"""Run folders for reports from results in memory: of runs that this process computed, or of other records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.study import Study
from .metrics import Trail
from .reader import PartitionCounts, RunEntry, RunFolder, RunsInMemory, read_entry

Results = Iterable[tuple[Mapping[str, Any], Iterable[Mapping[str, Any]]]]
"""Entries like those of summary.json, each with its evaluations like the lines of metrics.jsonl."""


def folder_of_study(
    path: Path,
    study: Study,
    results: Results,
    *,
    finished: bool,
    origin: Mapping[str, Any],
    partition: PartitionCounts | None,
) -> RunFolder:
    """Return the folder of a study that this process has run, without reading it."""
    memory = RunsInMemory(study, _runs(results), partition)
    folder = _folder(path, study.name, memory, {name: str(value) for name, value in origin.items()})
    return replace(folder, text=study.to_toml(), finished=finished)


def folder_of_records(
    title: str, records: Iterable[Mapping[str, Any]], provenance: Mapping[str, str] | None = None
) -> RunFolder:
    """Return results that are not in a run folder as one; the ``curve`` of a record is a list of evaluations."""
    results = [(record, record.get("curve") or ()) for record in records]
    return _folder(Path(title), title, RunsInMemory(None, _runs(results)), provenance or {})


def _runs(results: Results) -> tuple[RunEntry, ...]:
    runs = []
    for raw, evaluations in results:
        entry = read_entry(dict(raw))
        if entry is not None:
            trail = Trail()
            for evaluation in evaluations:
                trail.add(evaluation)
            runs.append(replace(entry, trail=trail))
    return tuple(runs)


def _folder(path: Path, title: str, memory: RunsInMemory, provenance: Mapping[str, str]) -> RunFolder:
    entries: Sequence[RunEntry] = memory.runs
    return RunFolder(
        path=path,
        name=path.name,
        title=title,
        config={},
        text="",
        entries=tuple(entries),
        finished=True,
        tuned=False,
        best=(),
        provenance=provenance,
        problems=(),
        changed=0.0,
        memory=memory,
    )
