"""A search for learning rates in its run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config.study import Study
from ..errors import UserError
from ..fileio import read_text
from ..jsonio import json_line
from ..runstore.journal import JournalPosition
from ..runstore.metrics import metric_field
from ..runstore.provenance import provenance
from ..runstore.writer import write_lines, write_summary, write_tuned_study
from ..training import Status
from .checkpointing import SavedSession
from .earlier_results import evaluations_by_run
from .run_events import Event, RunEvaluated, RunSpec, Watch
from .search_standings import SearchOptions, batch_jobs_of, finished_outcomes, standing_to_json, standings_of
from .session_folder import SessionFolder
from .tune import RatePair, Tuning
from .tuned_study import Decision, decisions_of

INVALID = (AttributeError, KeyError, TypeError, ValueError, RecursionError)


class TuningFolder:
    """A search that is saved in a run folder: evaluations when they are made, pairs and decisions at the end.

    ``decisions`` is empty until the search has ``finished``. The options of sessions are those of ``SessionFolder``.
    """

    def __init__(
        self,
        tuning: Tuning,
        study: Study,
        folder: Path,
        *,
        force: bool = False,
        resume: bool = False,
        checkpoint_interval: float | None = None,
        notify: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.tuning = tuning
        self.finished = False
        self.decisions: list[Decision] = []
        self._study = study
        compute = tuning.sweep.compute
        self._origin = provenance(executor=compute.executor, device=compute.device, precision=compute.precision)
        self._options = SearchOptions.of(tuning)
        self._session = SessionFolder(
            study, folder, tuning.sweep, force=force, resume=resume, checkpoint_interval=checkpoint_interval,
            notify=notify,
        )  # fmt: skip
        self._files = self._session.files
        tuning.checkpoint_hook = partial(self._session.checkpoint, self._state)
        self._session.open(self._resume)

    # Resuming; nothing is written.

    def _resume(self) -> None:
        """Load the state of an earlier session, or the results of a finished search."""
        files = self._files
        if files.has_results() and not files.rate_points.exists():
            what = "holds no search for learning rates and is not resumed; use another --out or name"
            raise UserError(f"{files.folder} {what}")
        self._session.check_study()
        if files.summary.exists() and self._read_summary():
            self._load_results()
            return
        self._session.load_checkpoint("search")
        saved = self._session.saved
        if saved.search is not None:
            self._load_runs(saved, saved.search)
        elif saved != SavedSession():
            raise self._session.invalid_checkpoint()

    def _read_summary(self) -> bool:
        """Return whether the search has finished; refuse one with other options."""
        try:
            summary = json.loads(read_text(self._files.summary))
            finished = summary["finished"] is True
            before = SearchOptions.from_json(summary["search"])
        except INVALID:
            raise UserError(
                f"{self._files.summary} does not say how the search was started; start again with --force"
            ) from None
        self._check_options(before)
        return finished

    def _check_options(self, before: SearchOptions) -> None:
        if differences := before.differences(self._options):
            raise UserError(
                f"{self._files.folder} was started with other options ({differences}); give the same, or use another "
                "name"
            )

    def _load_results(self) -> None:
        path = self._files.rate_points
        try:
            records = [json.loads(line) for line in read_text(path).splitlines()]
            expected = map(json.loads, map(json_line, self.tuning.records()))
            standings = finished_outcomes(records, expected)
        except INVALID:
            raise UserError(f"{path} is not valid; start again with --force") from None
        self.tuning.resume(standings, {}, None)
        self.finished = True
        self.decisions = decisions_of(self.tuning)

    def _load_runs(self, saved: SavedSession, search: Mapping[str, Any]) -> None:
        try:
            self._check_options(SearchOptions.from_json(search["options"]))
            standings = standings_of(search["runs"], self.tuning, saved.runs.keys())
            # Runs of other groups have not begun, so the limits of their batches are not in the checkpoint.
            sweep, jobs = self.tuning.sweep, batch_jobs_of(search)
            sweep.compute = replace(sweep.compute, max_batch_jobs=jobs)
        except INVALID:
            raise self._session.invalid_checkpoint() from None
        self._session.check_positions(len(self.tuning.specs))
        evaluations = evaluations_by_run(self._files.metrics, self._session.saved_journal(), _run_key)
        runs = {
            position: (state, evaluations.get(_run_key(_identity(self.tuning.specs[position])), []))
            for position, state in saved.runs.items()
        }
        self.tuning.resume(standings, runs, saved.batch_limits)

    # Running.

    def run(self, watch: Watch) -> bool:
        """Search; return False if Ctrl-C stopped it, with everything known so far saved.

        A run that this one replaces is removed after the first round; if the new one ends before, it is restored.
        """
        with self._session.in_use():
            if not self.finished:
                self._session.begin()
                self._save(finished=False)
                with self._session.computing():
                    self.finished = self._run(watch)
            if self.finished:
                self._write_tuned(missing_only=True)
                self._session.clear_checkpoints()
        return self.finished

    def tuned_study(self, decision: Decision) -> Path:
        """Return the path of the study with the rates of a decision."""
        return self._files.tuned_study(decision.label)

    def _run(self, watch: Watch) -> bool:
        old = self._session.old

        def log(event: Event) -> None:
            if not isinstance(event, RunEvaluated) or event.evaluation.round > 0:
                old.commit()
            if isinstance(event, RunEvaluated):
                head = {**_identity(event.spec), **metric_field(event.metric)}
                self._session.append({**head, **event.evaluation.by_name()})
            watch(event)

        finished = self.tuning.run(log)
        if old.pending:
            raise KeyboardInterrupt  # before the first round
        self._save(finished=finished)
        return finished

    def _state(self, metrics: JournalPosition) -> SavedSession:
        sweep, standings = self.tuning.sweep, self.tuning.standings()
        positions = {spec: position for position, spec in enumerate(self.tuning.specs)}
        begun = [(positions[spec], state) for spec, state in sweep.run_states().items()]
        # A dropped run may end only after the checkpoint.
        runs = {position: state for position, state in begun if standings[position].outcome.status == Status.RUNNING}
        search = {
            "options": self._options.to_json(),
            "max_batch_jobs": sweep.compute.max_batch_jobs,
            "runs": list(map(standing_to_json, standings)),
        }
        return SavedSession(metrics, (), runs, sweep.batch_limits, search)

    def _write_tuned(self, *, missing_only: bool = False) -> None:
        for decision in self.decisions:
            path = self.tuned_study(decision)
            if not (missing_only and path.exists()):
                write_tuned_study(path, decision.to_toml(self._study))

    def _save(self, *, finished: bool) -> None:
        write_lines(self._files.rate_points, self.tuning.records())
        results: dict[str, Any] = {"best": []}
        if finished:
            self.decisions = decisions_of(self.tuning)
            results = {"best": list(map(_rates, self.tuning.best())), **_rankings(self.decisions)}
            self._write_tuned()
        results["search"] = self._options.to_json()
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


def _identity(spec: RunSpec) -> dict[str, Any]:
    """Return the fields of a metrics line that identify its run."""
    return {"algorithm": spec.settings.algorithm, "label": spec.label, "seed": spec.seed}


def _run_key(line: Mapping[str, Any]) -> str:
    return json_line([line["label"], line["seed"]])
