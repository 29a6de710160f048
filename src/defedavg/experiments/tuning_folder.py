"""A search for learning rates in its run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config.study import Study
from ..fileio import FolderLock
from ..jsonio import json_line
from ..runstore.journal import Journal
from ..runstore.layout import RunFiles
from ..runstore.metrics import metric_field
from ..runstore.provenance import provenance
from ..runstore.replacement import Replacement
from ..runstore.writer import begin_run, check_folder, write_lines, write_summary, write_tuned_study
from .run_events import Event, RunEvaluated, Watch
from .tune import RatePair, Tuning
from .tuned_study import Decision, decisions_of


class TuningFolder:
    """A search that is saved in a run folder: evaluations when they are made, pairs and decisions at the end.

    ``decisions`` is empty until the search has finished.
    """

    def __init__(self, tuning: Tuning, study: Study, folder: Path, *, force: bool) -> None:
        self.tuning = tuning
        self._study = study
        self.decisions: list[Decision] = []
        compute = tuning.sweep.compute
        self._origin = provenance(executor=compute.executor, device=compute.device, precision=compute.precision)
        self._files = RunFiles(folder)
        self._lock = FolderLock(folder)
        self._old = Replacement(folder)
        try:
            if self._old.recover():
                tuning.sweep.notes.append(f"restored {folder}, which a killed process was about to replace")
            check_folder(folder, force=force)
        except BaseException:
            self._lock.release()
            raise

    def run(self, watch: Watch) -> bool:
        """Search; return False if Ctrl-C stopped it, with everything known so far saved.

        A run that this one replaces is removed after the first round; if the new one ends before, it is restored.
        """
        try:
            self._old.set_aside()
            begin_run(self._files, self._study.to_toml())
            self._save(finished=False)
            return self._run(watch)
        except BaseException:
            self._old.restore()
            raise
        finally:
            self._lock.release()

    def tuned_study(self, decision: Decision) -> Path:
        """Return the path of the study with the rates of a decision."""
        return self._files.tuned_study(decision.label)

    def _run(self, watch: Watch) -> bool:
        journal = Journal(self._files.metrics)

        def log(event: Event) -> None:
            if not isinstance(event, RunEvaluated) or event.evaluation.round > 0:
                self._old.commit()
            if isinstance(event, RunEvaluated):
                spec = event.spec
                head = {"algorithm": spec.settings.algorithm, "label": spec.label, "seed": spec.seed}
                journal.append(json_line({**head, **metric_field(event.metric), **asdict(event.evaluation)}))
            watch(event)

        try:
            finished = self.tuning.run(log)
            if self._old.pending:
                raise KeyboardInterrupt  # before the first round
            self._save(finished=finished)
        finally:
            journal.close()
        return finished

    def _save(self, *, finished: bool) -> None:
        write_lines(self._files.rate_points, self.tuning.records())
        results: dict[str, Sequence[Any]] = {"best": []}
        if finished:
            self.decisions = decisions_of(self.tuning)
            results = {"best": list(map(_rates, self.tuning.best())), **_rankings(self.decisions)}
            for decision in self.decisions:
                write_tuned_study(self.tuned_study(decision), decision.to_toml(self._study))
        write_summary(self._files, self._study.name, self._origin, results, finished=finished)


def _rankings(decisions: Sequence[Decision]) -> dict[str, list[Any]]:
    """Return winner and runner-up; of several tasks, fleets or targets, with the swept values of each."""
    rankings = [[_rates(each) for each in (one.winner, one.runner_up) if each is not None] for one in decisions]
    if len(decisions) == 1:
        return {"ranking": rankings[0]}
    swept = [dict(one.given) for one in decisions]
    return {"rankings": [{"swept": each, "ranking": own} for each, own in zip(swept, rankings, strict=True)]}


def _rates(pair: RatePair) -> dict[str, Any]:
    return {"label": pair.point.label, "global_lr": pair.global_lr, "local_lr": pair.local_lr}
