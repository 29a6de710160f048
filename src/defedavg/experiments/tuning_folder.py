"""A search for learning rates in its run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config.study import Study
from ..fileio import FolderLock, write_whole
from ..jsonio import json_line
from ..runstore.journal import Journal
from ..runstore.layout import RunFiles
from ..runstore.metrics import metric_field
from ..runstore.provenance import provenance
from ..runstore.replacement import Replacement
from ..runstore.writer import begin_run, check_folder, write_lines, write_summary
from .run_events import Event, RunEvaluated, Watch
from .tune import RatePair, Tuning
from .tuned_study import Decision


class TuningFolder:
    """A search that is saved in a run folder: every evaluation when it is made, every pair and the decision at the end.

    ``decision`` is None until the search has finished.
    """

    def __init__(self, tuning: Tuning, study: Study, folder: Path, *, force: bool) -> None:
        self.tuning = tuning
        self._study = study
        self.decision: Decision | None = None
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
            self.decision = Decision(self.tuning)
            ranked = [self.decision.winner, *filter(None, [self.decision.runner_up])]
            results = {"best": list(map(_rates, self.tuning.best())), "ranking": list(map(_rates, ranked))}
            write_whole(self._files.tuned_study, self.decision.to_toml(self._study).encode())
        write_summary(self._files, self._study.name, self._origin, results, finished=finished)


def _rates(pair: RatePair) -> dict[str, Any]:
    return {"label": pair.point.label, "global_lr": pair.global_lr, "local_lr": pair.local_lr}
