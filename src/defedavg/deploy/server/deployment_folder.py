"""The run folder of a deployment: that of a simulation, with the event log and the server's state in addition."""

from __future__ import annotations

import json
from pathlib import Path

from ... import __version__
from ...config.study import SweepPoint
from ...errors import UserError
from ...fileio import file_name, write_whole, writing
from ...jsonio import finite
from ...planning.devices import Fleet
from ...planning.plan_stats import summarise
from ...runstore.provenance import provenance
from ..deploy_config import DeployConfig
from ..engine import event_log as logs
from ..engine.event_log import LOG
from ..replay import replay
from .session import Session

ERROR = "error.txt"


def holds_run(folder: Path, run: str) -> bool:
    """Return whether the folder holds this very run: then Flower has restarted its server."""
    return (folder / LOG).exists() and logs.read(folder / LOG).head.get("run") == run


def folder_of(config: DeployConfig) -> Path:
    """Return the run folder that the settings name."""
    if not config.deploy.folder:
        raise UserError("deploy.folder is empty; set it to the folder in which the server keeps the run")
    return Path(config.deploy.folder).absolute()


def open_run(config: DeployConfig, folder: Path, *, resume: bool) -> None:
    """Prepare a run folder for the server."""
    if resume:
        if not (folder / LOG).exists():
            raise UserError(f"there is no run to resume in {folder}")
        _save_summary(folder, config.name, [], finished=False)
    else:
        if (folder / LOG).exists():
            raise UserError(f"{folder} already contains a run; resume it, or choose another folder")
        _write_config(config, folder)
    (folder / ERROR).unlink(missing_ok=True)


def is_finished(folder: Path) -> bool:
    """Return whether the run in a folder is finished."""
    path = folder / "summary.json"
    return path.exists() and bool(json.loads(path.read_text(encoding="utf-8"))["finished"])


def create_run_folder(config: DeployConfig, folder: Path, force: bool) -> None:
    """Create a folder that counts as a run even if its server never starts; replace one only with ``force``."""
    from ...experiments.study_run import open_folder

    open_folder(folder, force)
    _write_config(config, folder)


def _write_config(config: DeployConfig, folder: Path) -> None:
    with writing(folder):
        (folder / "plans").mkdir(parents=True, exist_ok=True)
        (folder / "plots").mkdir(exist_ok=True)
    write_whole(folder / "config.toml", config.toml.encode())
    _save_summary(folder, config.name, [], finished=False)


def _save_summary(folder: Path, name: str, entries: list[object], *, finished: bool) -> None:
    made = {**provenance(executor="deployment"), **_first_provenance(folder)}
    whole = {"name": name, "version": __version__, "finished": finished, "provenance": made, "runs": entries}
    write_whole(folder / "summary.json", (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())


def _first_provenance(folder: Path) -> dict[str, str]:
    """Return when and with which command a user started the run, which is not the command that runs the server."""
    try:
        made = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["provenance"]
        return {name: made[name] for name in ("started", "command", "folder")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def finish(session: Session, wall: float) -> None:
    """Check the invariants of a run that is over, and write its plan, its summary and its plots."""
    from ...experiments.study_run import (  # the import takes half a second, which would delay the server's start
        curve_of,
        draw_curves,
        entry_of,
    )

    config, folder = session.config, session.folder
    found = replay(logs.read(folder / LOG))
    found.plan.check()
    fleet = Fleet(
        num_clients=found.plan.header.num_clients,
        seed=config.seed,
        model_megabytes=found.model_bytes * 1e-6,
        trace=found.trace,
    )
    point = SweepPoint((), config.settings)
    merged = sum(update.steps > 0 for record in found.plan.rounds for update, _ in record.merge.updates)
    found.plan.save(folder / "plans" / (file_name(point.label, config.seed) + ".jsonl.gz"))
    stats = summarise(found.plan, fleet)
    entry = entry_of(point, config.seed, session.progress, stats, found.plan.hash(), trained=merged, wall=wall)
    _save_summary(folder, config.name, [finite(entry)], finished=True)
    draw_curves(
        folder / "plots", config.name, [curve_of(point, session.progress.evaluations)], entry["target_accuracy"]
    )
