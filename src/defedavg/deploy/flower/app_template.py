"""``defedavg deploy init``: a Flower app that ``flwr run`` accepts, with the task in a file of the user's own."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import tomli_w

from ...algorithms import ALGORITHMS
from ...config.study import StopSettings, TaskSettings, TrainingSettings
from ...errors import UserError
from ...fileio import write_whole, writing
from ..deploy_config import DeploySettings

SERVER = '''"""The server: waits for clients, trains, and leaves a run folder (see `[tool.flwr.app.config.deploy]`)."""

from defedavg.deploy.flower.server_app import server_app

app = server_app("{package}.task:make")
'''

CLIENT = '''"""A client: trains on its own data when it is asked to. Nothing is imported here that costs time."""

from defedavg.deploy.flower.client_app import client_app

app = client_app("{package}.task:make")
'''

TASK = '''"""What is learned: the same task as in a simulation.

This one is named by `[tool.flwr.app.config.task]` in pyproject.toml, and every machine loads the whole data set, of
which a client uses its own share. With data of your own, return for a client a task that holds just its data:

    from defedavg import make_task

    def make(config, client):
        train = load_my_rows() if client is not None else one_row()
        return make_task(model=MyModel, train=train, test=load_test_rows(), clients=[range(len(train[0]))])

On the server (client is None) only the model, the loss and the test data are used. The model must be the same
everywhere.
"""

from collections.abc import Mapping
from typing import Any

from defedavg import Task
from defedavg.deploy.deploy_config import read_orders
from defedavg.config.build import build_task


def make(config: Mapping[str, Any], client: int | None) -> Task:
    """The task; `config` is the run's configuration, `client` this client's number, or None on the server."""
    orders = read_orders(config)
    return build_task(orders.settings, orders.seed)
'''

README = """# {package}

A Flower app made by `defedavg deploy init`. Settings are in `pyproject.toml` under `[tool.flwr.app.config]`; the model
and the data in `{package}/task.py`.

Try it on this machine:

    defedavg deploy local --app .

Run it on a SuperLink that is up, with a SuperNode for every client (`--node-config "client=0"`, 1, …):

    flwr run . NAME --run-config 'deploy.folder="/srv/runs/first"'
"""


def defaults(algorithm: str = "defedavg-iid", clients: int = 6) -> dict[str, Any]:
    """Every setting of an app with its default, by names like ``training.local_steps``."""
    flat: dict[str, Any] = {"name": "deployment", "algorithm": algorithm, "seed": 0}
    kinds: dict[str, type[Any]] = {
        "task": TaskSettings,
        "training": TrainingSettings,
        "stop": StopSettings,
        "deploy": DeploySettings,
        **{name: kind.settings_type for name, kind in ALGORITHMS.items()},
    }
    for table, kind in kinds.items():
        flat |= {f"{table}.{item.name}": item.default for item in dataclasses.fields(kind)}
    flat |= {"clients.num_clients": clients, "clients.slowness": "uniform(1, 5)", "clients.step_seconds": 0.02}
    return {
        **flat,
        "training.updates_per_round": max(1, clients // 2),
        "training.local_lr": 0.1,
        "stop.max_rounds": 100,
        "stop.max_seconds": 86_400.0,
        "favano.wait_seconds": 5.0,
    }


def pyproject(package: str, flat: dict[str, Any]) -> str:
    """The app's pyproject.toml with its whole configuration."""
    settings: dict[str, Any] = {}
    for name, value in flat.items():
        table, dot, word = name.partition(".")
        if dot:
            settings.setdefault(table, {})[word] = value
        else:
            settings[name] = value
    components = {"serverapp": f"{package}.server:app", "clientapp": f"{package}.client:app"}
    whole = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": package.replace("_", "-"),
            "version": "1.0.0",
            "description": "Asynchronous federated learning with defedavg on Flower",
            "license": "Apache-2.0",
            "dependencies": ["defedavg[flower]"],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {"app": {"publisher": "defedavg", "components": components, "config": settings}},
        },
    }
    return tomli_w.dumps(whole)


def write_app(folder: Path, flat: dict[str, Any]) -> None:
    """Write an app into a folder that is not there yet; its package is named after it."""
    package = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,49}", package):
        raise UserError(f"{package!r} cannot be the name of an app; use small letters, digits and '_'")
    if folder.exists():
        raise UserError(f"{folder} is there already; choose another name, or remove it")
    with writing(folder):
        (folder / package).mkdir(parents=True)
    files = {"server": SERVER, "client": CLIENT, "task": TASK}
    for name, text in files.items():
        write_whole(folder / package / f"{name}.py", text.replace("{package}", package).encode())
    write_whole(folder / package / "__init__.py", b"")
    write_whole(folder / "README.md", README.replace("{package}", package).encode())
    write_whole(folder / "pyproject.toml", pyproject(package, flat).encode())
