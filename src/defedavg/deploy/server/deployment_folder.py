"""The folder that a deployment leaves: that of a simulation, and beside it the event log and the server's state."""

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


def goes_on(folder: Path, run: str) -> bool:
    """Whether the folder holds the beginnings of this very run: then Flower has started its server once more."""
    return (folder / LOG).exists() and logs.read(folder / LOG).head.get("run") == run


def folder_of(orders: DeployConfig) -> Path:
    """Where a run is kept."""
    if not orders.deploy.folder:
        raise UserError("deploy.folder is empty; give the folder in which the server keeps the run")
    return Path(orders.deploy.folder).absolute()


def open_run(orders: DeployConfig, folder: Path, *, resume: bool) -> None:
    """Make the folder of a run ready to be written to."""
    if resume:
        if not (folder / LOG).exists():
            raise UserError(f"there is no run to resume in {folder}")
        _save_summary(folder, orders.name, [], finished=False)
    else:
        if (folder / LOG).exists():
            raise UserError(f"{folder} holds a run already; resume it, or choose another folder")
        _begin(orders, folder)
    (folder / ERROR).unlink(missing_ok=True)


def is_finished(folder: Path) -> bool:
    """Whether the run there came to its end."""
    path = folder / "summary.json"
    return path.exists() and bool(json.loads(path.read_text(encoding="utf-8"))["finished"])


def make_room(orders: DeployConfig, folder: Path, force: bool) -> None:
    """A folder that is seen to be a run's, even if its server never starts; an earlier one goes with ``force`` only."""
    from ...experiments.study_run import open_folder

    open_folder(folder, force)
    _begin(orders, folder)


def _begin(orders: DeployConfig, folder: Path) -> None:
    with writing(folder):
        (folder / "plans").mkdir(parents=True, exist_ok=True)
        (folder / "plots").mkdir(exist_ok=True)
    write_whole(folder / "config.toml", orders.toml.encode())
    _save_summary(folder, orders.name, [], finished=False)


def _save_summary(folder: Path, name: str, entries: list[object], *, finished: bool) -> None:
    made = {**provenance(executor="deployment"), **_asked(folder)}
    whole = {"name": name, "version": __version__, "finished": finished, "provenance": made, "runs": entries}
    write_whole(folder / "summary.json", (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())


def _asked(folder: Path) -> dict[str, str]:
    """When and how the run was first asked for: by a person, not by whoever started the server for them."""
    try:
        made = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["provenance"]
        return {name: made[name] for name in ("started", "command", "folder")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def finish(session: Session, wall: float) -> None:
    """Plan, summary and plots of a run that is over; the invariants are checked."""
    from ...experiments.study_run import (  # half a second that a server need not lose at its start
        curve_of,
        draw_curves,
        entry_of,
    )

    orders, folder = session.orders, session.folder
    found = replay(logs.read(folder / LOG))
    found.plan.check()
    fleet = Fleet(
        num_clients=found.plan.header.num_clients,
        seed=orders.seed,
        model_megabytes=found.model_bytes * 1e-6,
        trace=found.trace,
    )
    point = SweepPoint((), orders.settings)
    merged = sum(update.steps > 0 for record in found.plan.rounds for update, _ in record.merge.updates)
    found.plan.save(folder / "plans" / (file_name(point.label, orders.seed) + ".jsonl.gz"))
    stats = summarise(found.plan, fleet)
    entry = entry_of(point, orders.seed, session.progress, stats, found.plan.hash(), trained=merged, wall=wall)
    _save_summary(folder, orders.name, [finite(entry)], finished=True)
    draw_curves(
        folder / "plots", orders.name, [curve_of(point, session.progress.evaluations)], entry["target_accuracy"]
    )
