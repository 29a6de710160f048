"""The configuration of a deployment: the tables of a study with single values, and a table [deploy] of its own."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..algorithms import ALGORITHMS, ServerMachine
from ..algorithms import algorithm as find_algorithm
from ..config import study as config
from ..config.build import make_server
from ..config.study import Settings, StopSettings, TaskSettings, TrainingSettings
from ..errors import UserError, unknown
from ..planning.action_checks import refuse
from .engine.engine import Engine

TRANSPORTS = ("grpc", "flower")


def _key(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class DeploySettings:
    """Where the server keeps its files, and how it treats clients that are late, disconnected or faulty."""

    folder: str = _key("", "where the server keeps the run folder with its log and state; an absolute path")
    resume: bool = _key(False, "continue the run in that folder")
    min_clients: int = _key(0, "the run starts when this many clients are connected; 0: all clients")
    wait_seconds: float = _key(120.0, "how long to wait for them, and for any client once all are disconnected")
    job_seconds: float = _key(300.0, "a client that needs longer for a job counts as disconnected")
    norm_bound: float = _key(10.0, "refuse an update whose norm exceeds this factor times the model's (at least 1)")
    poll_seconds: float = _key(0.5, "pause between two polls for replies")
    metrics_port: int = _key(0, "the server answers requests for /metrics (Prometheus) on this port; 0: it does not")
    metrics_host: str = _key("127.0.0.1", "the address for /metrics; any other lets other machines read it")
    nodes: str = _key("", "Flower's numbers of the nodes of clients 0, 1, …, separated by commas; empty: any node")
    transport: str = _key("grpc", "how `deploy local` connects its clients: grpc (direct streams) or flower")
    reconnect_seconds: float = _key(10.0, "a client that loses its gRPC connection keeps its work for this long")
    min_upload_rate: float = _key(10_000.0, "bytes per second; over gRPC, a job whose update arrives slower has failed")
    patience_seconds: float = _key(20.0, "how long a background client waits for its job before it answers 'not yet'")

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise unknown("transport", self.transport, TRANSPORTS)
        for word in (item.name for item in dataclasses.fields(self) if isinstance(item.default, float)):
            value = getattr(self, word)
            if not 0 < value < math.inf:
                raise UserError(f"deploy.{word} is {value}; give a finite number above zero")
        if self.min_clients < 0:
            raise UserError(f"deploy.min_clients is {self.min_clients}; give a number of clients, or 0 for all")
        if not 0 <= self.metrics_port <= 65_535:
            raise UserError(f"deploy.metrics_port is {self.metrics_port}; give a port up to 65535, or 0 for none")
        names = [name.strip() for name in self.nodes.split(",")] if self.nodes.strip() else []
        if not all(name.isdecimal() for name in names) or len(set(names)) < len(names):
            raise UserError(f"deploy.nodes is {self.nodes[:60]!r}; give the numbers of different nodes, such as '17,4'")

    def node_of(self, client: int) -> int | None:
        """Return the only node that may be a client, or None if any node may."""
        names = self.nodes.split(",") if self.nodes.strip() else []
        return int(names[client]) if client < len(names) else None


@dataclass(frozen=True, slots=True)
class DeployConfig:
    """The complete configuration of one deployment."""

    name: str
    settings: Settings
    seed: int
    deploy: DeploySettings
    toml: str


def read_deploy_config(flat: Mapping[str, Any], *, stored: bool = False) -> DeployConfig:
    """Return the configuration from keys such as ``training.local_steps``, as in Flower's run configuration.

    ``plugins`` are paths, separated as in PATH. A ``stored`` configuration, of a log, imports no file that it names.
    """
    tables: dict[str, Any] = {}
    deploy_values: dict[str, Any] = {}
    known = {item.name: item for item in dataclasses.fields(DeploySettings)}
    for name, value in flat.items():
        table, dot, word = name.partition(".")
        if not dot:
            tables[name] = value
        elif table == "deploy":
            if word not in known:
                raise unknown("key in [deploy]", word, known)
            deploy_values[word] = config.single(name, value, type(known[word].default))
        else:
            tables.setdefault(table, {})[word] = value
    algorithm, seed = tables.pop("algorithm", "defedavg-iid"), tables.pop("seed", 0)
    tables["algorithms"], tables["seeds"] = [algorithm], [seed]
    named = tables.pop("plugins", "")
    tables["plugins"] = [path for path in str(named).split(os.pathsep) if path]
    study = (config.stored_study if stored else config.study)(tables)
    kind = find_algorithm(str(algorithm))
    points = study.points()
    if len(points) != 1:
        raise UserError("a deployment runs one setting; give single values instead of lists")
    settings = points[0].settings
    check_deployable(kind, settings.algorithm_settings)
    settings = _with_blocking_uploads(kind, settings)
    deploy, total = DeploySettings(**deploy_values), settings.clients.num_clients
    if deploy.min_clients > total:
        raise UserError(f"deploy.min_clients is {deploy.min_clients}, but there are only {total} clients")
    nodes = len(deploy.nodes.split(",")) if deploy.nodes.strip() else total
    if nodes != total:
        raise UserError(f"deploy.nodes names {nodes} nodes; name one for each of the {total} clients")
    return DeployConfig(study.name, settings, study.seeds[0], deploy, study.to_toml())


def default_settings(algorithm: str = "defedavg-iid", clients: int = 6) -> dict[str, Any]:
    """Return every setting of a deployment with its default, under names such as ``training.local_steps``."""
    flat: dict[str, Any] = {"name": "deployment", "algorithm": algorithm, "seed": 0, "plugins": ""}
    kinds: dict[str, type[Any]] = {
        "task": TaskSettings,
        "training": TrainingSettings,
        "stop": StopSettings,
        "deploy": DeploySettings,
        **{name: kind.settings_type for name, kind in ALGORITHMS.items()},
    }
    for table, kind in kinds.items():
        flat |= {f"{table}.{item.name}": item.default for item in dataclasses.fields(kind)}
    flat |= {"clients.num_clients": clients, "clients.slowness": "uniform(1, 5)", "clients.step_seconds": 0.01}
    return {
        **flat,
        "training.updates_per_round": max(1, clients // 2),
        "training.local_lr": 0.1,
        "stop.max_rounds": 100,
        "stop.max_seconds": 86_400.0,
        "favano.wait_seconds": 5.0,
    }


def _with_blocking_uploads(kind: type[ServerMachine], settings: Settings) -> Settings:
    """Return the settings with uploads as a deployment has them: a client is occupied until its reply has arrived."""
    if not kind.overlaps_uploads(settings.algorithm_settings):
        return settings
    if settings.clients.upload == "background":
        raise UserError(
            "clients.upload is 'background', but in a deployment a client is occupied until its reply has arrived; "
            "remove it, or set it to 'blocking'"
        )
    return dataclasses.replace(settings, clients=dataclasses.replace(settings.clients, upload="blocking"))


def check_deployable(kind: type[ServerMachine], settings: Any) -> None:
    """Refuse an algorithm that only a simulation can run."""
    policy = kind.client_policy(settings)
    if kind.correction:
        refuse(kind.name, "it corrects the gradients of jobs, which clients of a deployment cannot do; simulate it")
    if policy.restart_on_model and not policy.hold_until_requested:
        refuse(
            kind.name,
            "a newer version restarts its clients, but they send updates unrequested; in a deployment this needs "
            "hold_until_requested=True in policy, and a Request to each client",
        )


def make_engine(config: DeployConfig, shares: tuple[float, ...] | None = None) -> Engine:
    """Return the engine of a run before its first event: the run, its resumption and its replay start with it.

    ``shares`` are those of the clients in all training samples, if updates are weighted by them.
    """
    settings = config.settings
    timeout = settings.training.timeout_seconds or config.deploy.job_seconds
    return Engine(make_server(settings, config.seed, timeout, shares), settings.stop.max_rounds)


read_orders = read_deploy_config  # the name that apps use which an earlier version generated
