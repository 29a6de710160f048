"""Advice from a deployment log: the clients that it measured are the fleet of a study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..config.settings import ClientSettings
from ..config.study import Study
from ..deploy.replay import Replay
from ..errors import UserError
from ..fileio import write_whole

FLEET = "fleet.csv"


def study_of_log(found: Replay, study: Study, folder: Path) -> Study:
    """Return the study with the clients of a log; their measured speeds are written to a trace in the folder.

    The study, which the user names, says what is trained: a log is untrusted and cannot name code to execute.
    """
    trace = found.fleet.trace
    if trace is None or not found.measured_clients:
        raise UserError("the log measured no client, so there is no fleet to advise for; deploy for some rounds first")
    columns = (trace.step_seconds.tolist(), trace.up_mbps.tolist(), trace.down_mbps.tolist())
    rows = [f"{i},{step!r},{up!r},{down!r}" for i, (step, up, down) in enumerate(zip(*columns, strict=True))]
    path = folder.resolve() / FLEET
    write_whole(path, ("\n".join(["client,step_seconds,up_mbps,down_mbps", *rows]) + "\n").encode())
    defaults = ClientSettings()
    clients = {name: getattr(defaults, name) for name in study.tables["clients"]}
    clients |= {
        "trace": str(path),
        "num_clients": found.fleet.num_clients,
        "model_megabytes": found.fleet.model_megabytes,
        "upload": found.fleet.upload,
    }
    return replace(study, tables={**study.tables, "clients": clients})
