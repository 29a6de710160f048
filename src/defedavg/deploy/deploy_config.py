"""[deploy]: what only a deployment is told; everything else is said by the tables that a simulation has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import study as config
from ..config.study import Settings
from ..errors import UserError, unknown


def _key(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class DeploySettings:
    """How the server deals with clients that are late, gone or bad, and where it keeps its files."""

    folder: str = _key("", "where the server keeps the run, its log and its state; give a full path")
    resume: bool = _key(False, "go on with the run in that folder")
    min_clients: int = _key(0, "begin when so many clients are here; 0: all of them")
    wait_seconds: float = _key(120.0, "how long to wait for them, and for any client once all are gone")
    job_seconds: float = _key(300.0, "a job that takes longer is given up")
    norm_bound: float = _key(10.0, "an update longer than this times the model (at least 1) is refused")
    poll_seconds: float = _key(0.5, "between two looks for replies")
    patience_seconds: float = _key(
        20.0, "a background client waits so long for its job before it answers 'nothing yet'"
    )

    def __post_init__(self) -> None:
        for word in ("wait_seconds", "job_seconds", "norm_bound", "poll_seconds", "patience_seconds"):
            value = getattr(self, word)
            if not 0 < value < math.inf:
                raise UserError(f"deploy.{word} is {value}; give a finite number above zero")
        if self.min_clients < 0:
            raise UserError(f"deploy.min_clients is {self.min_clients}; give a number of clients, or 0 for all")


@dataclass(frozen=True, slots=True)
class DeployConfig:
    """Everything a deployment is told."""

    name: str
    settings: Settings
    seed: int
    deploy: DeploySettings
    toml: str


def read_orders(flat: Mapping[str, Any]) -> DeployConfig:
    """From keys like ``training.local_steps``, as Flower's run configuration has them."""
    tables: dict[str, Any] = {}
    own: dict[str, Any] = {}
    known = {item.name: item for item in dataclasses.fields(DeploySettings)}
    for name, value in flat.items():
        table, dot, word = name.partition(".")
        if not dot:
            tables[name] = value
        elif table == "deploy":
            if word not in known:
                raise unknown("key in [deploy]", word, known)
            own[word] = config.single(name, value, type(known[word].default))
        else:
            tables.setdefault(table, {})[word] = value
    algorithm, seed = tables.pop("algorithm", "defedavg-iid"), tables.pop("seed", 0)
    tables["algorithms"], tables["seeds"] = [algorithm], [seed]
    study = config.study(tables)
    points = study.points()
    if len(points) != 1:
        raise UserError("a deployment runs one setting; give single values")
    settings = points[0].settings
    deploy = DeploySettings(**own)
    if deploy.min_clients > settings.clients.num_clients:
        raise UserError(
            f"deploy.min_clients is {deploy.min_clients}, but there are {settings.clients.num_clients} clients"
        )
    return DeployConfig(study.name, settings, study.seeds[0], deploy, study.to_toml())
