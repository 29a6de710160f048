"""The folder that a deployment leaves: that of a simulation, and beside it the event log and the server's state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from .. import __version__
from ..config import Point
from ..errors import UserError
from ..files import write_whole, writing
from ..profiles import Fleet
from ..report.jsons import finite
from ..runs import curve_of, draw_curves, entry_of, file_name, open_folder
from . import log as logs
from .log import LOG
from .replay import replay
from .session import Session
from .settings import Orders

ERROR = "error.txt"


def open_run(orders: Orders) -> Path:
    """The folder of a run, ready to be written to."""
    if not orders.deploy.folder:
        raise UserError("deploy.folder is empty; give the folder in which the server keeps the run")
    folder = Path(orders.deploy.folder).absolute()
    if orders.deploy.resume:
        if not (folder / LOG).exists():
            raise UserError(f"there is no run to resume in {folder}")
    else:
        if (folder / LOG).exists():
            raise UserError(f"{folder} holds a run already; resume it, or choose another folder")
        with writing(folder):
            (folder / "plans").mkdir(parents=True, exist_ok=True)
            (folder / "plots").mkdir(exist_ok=True)
        write_whole(folder / "config.toml", orders.toml.encode())
        _save_summary(folder, orders.name, [], finished=False)
    (folder / ERROR).unlink(missing_ok=True)
    return folder


def clear(folder: Path, force: bool) -> None:
    """Make room for a run; what an earlier deployment left goes with ``force`` only."""
    open_folder(folder, force)
    for name in ("state", "app", "flower"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (LOG, ERROR, "server.log"):
        (folder / name).unlink(missing_ok=True)


def _save_summary(folder: Path, name: str, entries: list[object], *, finished: bool) -> None:
    whole = {"name": name, "version": __version__, "finished": finished, "runs": entries}
    write_whole(folder / "summary.json", (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())


def finish(session: Session, wall: float) -> None:
    """Plan, summary and plots of a run that is over; the invariants are checked."""
    orders, folder = session.orders, session.folder
    found = replay(logs.read(folder / LOG))
    found.plan.check()
    fleet = Fleet(
        num_clients=found.plan.header.num_clients,
        seed=orders.seed,
        model_megabytes=found.model_bytes * 1e-6,
        trace=found.trace,
    )
    point = Point((), orders.settings)
    merged = sum(update.steps > 0 for record in found.plan.rounds for update, _ in record.merge.updates)
    found.plan.save(folder / "plans" / (file_name(point.label, orders.seed) + ".jsonl.gz"))
    entry = entry_of(point, orders.seed, session.progress, found.plan, fleet, trained=merged, wall=wall)
    _save_summary(folder, orders.name, [finite(entry)], finished=True)
    draw_curves(
        folder / "plots", orders.name, [curve_of(point, session.progress.evaluations)], entry["target_accuracy"]
    )
