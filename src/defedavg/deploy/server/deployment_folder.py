"""The run folder of a deployment: that of a simulation, with the event log and the server's state in addition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...config.study import SweepPoint
from ...errors import UserError
from ...planning.plan_stats import summarise
from ...runstore.layout import RunFiles
from ...runstore.metrics import metric_of
from ...runstore.provenance import provenance
from ...runstore.summary import run_entry
from ...runstore.writer import begin_run, open_folder, write_summary
from ..deploy_config import DeployConfig
from ..engine import event_log as logs
from ..replay import replay
from .session import Session


def open_run(config: DeployConfig, folder: Path, *, resume: bool) -> None:
    """Prepare a run folder for the server."""
    files = RunFiles(folder)
    if resume:
        if not files.event_log.exists():
            raise UserError(f"there is no run to resume in {folder}")
        _write_summary(files, config.name, [], finished=False)
    else:
        if files.event_log.exists():
            raise UserError(f"{folder} already contains a run; resume it, or choose another folder")
        _begin(config, files)
    files.error.unlink(missing_ok=True)


def create_run_folder(config: DeployConfig, folder: Path, *, force: bool) -> None:
    """Create a folder that counts as a run even if its server never starts; replace one only with ``force``."""
    open_folder(folder, force=force)
    _begin(config, RunFiles(folder))


def _begin(config: DeployConfig, files: RunFiles) -> None:
    begin_run(files, config.toml)
    _write_summary(files, config.name, [], finished=False)


def _write_summary(files: RunFiles, name: str, entries: Sequence[Any], *, finished: bool) -> None:
    origin = provenance(executor="deployment")
    # Keep when and with which command a user started the run, which is not the command that runs the server.
    with suppress(OSError, ValueError, KeyError, TypeError):
        first = json.loads(files.summary.read_text(encoding="utf-8"))["provenance"]
        origin |= {key: first[key] for key in ("started", "command", "folder")}
    write_summary(files, name, origin, {"runs": entries}, finished=finished)


def finish(session: Session, wall_seconds: float) -> None:
    """Check the invariants of a finished run, and write its plan, its summary and its plots."""
    import torch

    from ...report.run_curves import curve_of, save_curves  # importing Matplotlib would delay the start of a server

    config, files = session.config, session.files
    found = replay(logs.read(files.event_log))
    found.plan.check()
    point = SweepPoint((), config.settings)
    found.plan.save(files.plan(point.label, config.seed))
    entry = run_entry(
        point,
        config.seed,
        session.progress,
        summarise(found.plan, found.fleet),
        found.plan.hash(),
        metric=session.executor.task.metric_name,
        updates_trained=sum(u.steps > 0 for record in found.plan.rounds for u, _ in record.merge.updates),
        wall_seconds=wall_seconds,
        threads=torch.get_num_threads(),
    )
    _write_summary(files, config.name, [entry], finished=True)
    curve = curve_of(config.settings.algorithm, point.label, session.progress.evaluations)
    save_curves(files.plots, config.name, [curve], entry["target_accuracy"], metric_of(entry))
