"""``defedavg deploy`` and ``defedavg replay``."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..algorithms import ALGORITHMS
from ..config import study as config
from ..errors import UserError, unknown
from ..report import tables
from .options import CommandWithOldNames, Force, Json, Out, err, out, print_json

app = typer.Typer(
    help="Run on a real network with Flower: the same machines, the same tasks, the same run folders.",
    no_args_is_help=True,
)

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="A setting, as in a study or of [deploy]. Repeatable."),
]


def _need_flower() -> None:
    if importlib.util.find_spec("flwr") is None or importlib.util.find_spec("safetensors") is None:
        raise UserError("Flower is not installed here; run: pip install 'defedavg[flower]'")


def _settings(algorithm: str, clients: int, given: list[str] | None) -> dict[str, Any]:
    from ..deploy.flower.app_template import defaults

    return _changed(defaults(algorithm, clients), given)


def _changed(flat: dict[str, Any], given: list[str] | None) -> dict[str, Any]:
    """Settings with others in their place."""
    flat = dict(flat)
    for table, values in config.override({}, tuple(given or ())).items():
        for word, value in values.items() if isinstance(values, dict) else ((None, values),):
            name = table if word is None else f"{table}.{word}"
            if name not in flat:
                raise unknown("setting", name, flat)
            kind = type(flat[name])
            flat[name] = config.single(name, value, kind)
    if "algorithm" in flat and flat["algorithm"] not in ALGORITHMS:
        raise unknown("algorithm", flat["algorithm"], ALGORITHMS)
    return flat


Algorithm = Annotated[str, typer.Option(help="See `defedavg algorithms`.")]
Clients = Annotated[int, typer.Option(min=1, max=1000, help="How many.")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="MY_APP", help="The folder to make; the app is named after it.")],
    algorithm: Algorithm = "defedavg-iid",
    clients: Clients = 6,
    given: Sets = None,
) -> None:
    """Write a Flower app: settings in pyproject.toml, the model and the data in task.py; `flwr run` accepts it."""
    _need_flower()
    from ..deploy.deploy_config import read_orders
    from ..deploy.flower.app_template import write_app

    flat = _settings(algorithm, clients, given)
    read_orders(flat)
    write_app(folder, flat)
    out.print(
        f"{folder} is ready: put your model and data into {folder / folder.name / 'task.py'}, then try it with\n"
        f"  defedavg deploy local --app {folder}",
        markup=False,
    )


@app.command(cls=CommandWithOldNames)
def local(
    algorithm: Annotated[
        str | None, typer.Option(help="See `defedavg algorithms`; if not given, the app's, or defedavg-iid.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, max=1000, help="How many; if not given, as the app has, or 6.")
    ] = None,
    name: Annotated[str, typer.Option(help="The run's folder is named after it.")] = "deployment",
    given: Sets = None,
    app_folder: Annotated[
        Path | None, typer.Option("--app", metavar="FOLDER", help="An app of your own, with its settings.")
    ] = None,
    folder: Out = Path("runs"),
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of the SuperLink; a free one if not given.")
    ] = None,
    no_warm_workers: Annotated[
        bool, typer.Option("--no-warm-workers", help="Keep no worker between messages; each then loads PyTorch anew.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run of this name.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """A whole deployment on this machine: SuperLink, SuperNodes of uneven slowness, a run; then all is stopped again.

    A step of a client lasts clients.step_seconds times its slowness. The run folder is like a simulation's, with the
    event log beside it.
    """
    _need_flower()
    from ..deploy.deploy_config import read_orders
    from ..deploy.engine.event_log import LOG
    from ..deploy.flower.app_template import write_app
    from ..deploy.flower.local_deployment import run_local, showing
    from ..deploy.flower.processes import check_port
    from ..deploy.server.deployment_folder import make_room

    place = folder / name
    if resume:
        if given or algorithm is not None or clients is not None or force:
            raise UserError("--resume goes on as the run began; leave out --set, --algorithm, --clients and --force")
        flat, app_folder = _before(place, app_folder)
    elif app_folder is not None:
        asked = {"algorithm": algorithm, "clients.num_clients": clients}
        flat = _changed(_of_app(app_folder) | {key: value for key, value in asked.items() if value is not None}, given)
    else:
        flat = {**_settings(algorithm or "defedavg-iid", clients or 6, given), "name": name}
    orders = read_orders({**flat, "deploy.resume": resume})
    if port is not None:
        check_port(port)
    if not resume:
        make_room(orders, place, force)
        if app_folder is None:
            app_folder = place / "app"
            write_app(app_folder, flat)
        else:
            (place / "app.txt").write_text(f"{app_folder.absolute()}\n", encoding="utf-8")
    assert app_folder is not None
    own = _of_app(app_folder)
    try:
        with showing(err, orders.settings.clients.num_clients) as watch:
            changes = {key: value for key, value in flat.items() if value != own.get(key, value)}
            run_local(app_folder, orders, place, watch, changes, port=port, warm=not no_warm_workers)
    except KeyboardInterrupt:
        words = f"defedavg deploy local --name {name}" + (f" --out {folder}" if folder != Path("runs") else "")
        then = f"go on with: {words} --resume" if (place / LOG).exists() else "it had not begun; use --force to begin"
        err.print(f"stopped by Ctrl-C; {then}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    entries = json.loads((place / "summary.json").read_text())["runs"]
    if as_json:
        print_json(entries)
    else:
        out.print(tables.result_table(name, entries, clock="seconds of the run"))
        out.print(f"\nresults: {place}", markup=False)


def _before(place: Path, app_folder: Path | None) -> tuple[dict[str, Any], Path]:
    """The settings and the app of a run that is to be resumed."""
    from ..deploy.engine import event_log as logs
    from ..deploy.engine.event_log import LOG
    from ..deploy.server.deployment_folder import is_finished

    if not (place / LOG).exists():
        raise UserError(f"there is no run to resume in {place}")
    if is_finished(place):
        raise UserError(f"the run in {place} is finished; begin another")
    told = place / "app.txt"
    own = Path(told.read_text(encoding="utf-8").strip()) if told.exists() else place / "app"
    head = logs.read(place / LOG).head.get("settings")
    if not isinstance(head, dict):
        raise UserError(f"the log in {place} does not say with which settings it was made")
    return head, app_folder or own


def _of_app(folder: Path) -> dict[str, Any]:
    try:
        whole = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        tree = whole["tool"]["flwr"]["app"]["config"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder} is no Flower app with settings; make one with `defedavg deploy init`") from None
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{word}": item for word, item in value.items()}
        else:
            flat[name] = value
    return flat


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to make.")],
    clients: Clients = 6,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address of the server, for its certificate. Repeatable.")
    ] = None,
) -> None:
    """Make what a secure deployment needs: a CA, a server certificate, and a key pair for every client."""
    _need_flower()
    from ..deploy.flower.tls_keys import make_keys

    made = make_keys(folder, clients, tuple(host or ("127.0.0.1", "localhost")))
    out.print(
        f"{len(made)} files are in {folder}; give every client its own key and ca.crt, and nothing else", markup=False
    )


def replay(
    file: Annotated[Path, typer.Argument(metavar="LOG", help="events.jsonl of a deployment, or its run folder.")],
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,…",
            help="Plan anew for the clients that were measured: updates_per_round=5,10, local_steps=…, algorithm=…",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Merges that a what-if plans.")] = 100,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan (.jsonl or .jsonl.gz).")] = None,
    as_json: Json = False,
) -> None:
    """Rebuild the plan of a deployment from its log, check every invariant, and plan what other settings would do."""
    from ..deploy.engine import event_log as logs
    from ..deploy.engine.event_log import LOG
    from ..deploy.replay import replay as rebuild
    from ..deploy.whatif import plans_of
    from ..planning.devices import Fleet
    from ..planning.plan_stats import summarise

    found = rebuild(logs.read(file / LOG if file.is_dir() else file))
    found.plan.check()
    if save is not None:
        found.plan.save(save)
    fleet = Fleet(
        num_clients=found.plan.header.num_clients, model_megabytes=found.model_bytes * 1e-6, trace=found.trace
    )
    plans, refused = plans_of(found, tuple(what_if or ()), rounds)
    rows = [(label, summarise(plan, fleet)) for label, plan in (("as it was", found.plan), *plans)]
    for line in refused:
        err.print(line, markup=False, soft_wrap=True)
    if as_json:
        named = [{"setting": label, **tables.stats_json([stats], [{}])[0]} for label, stats in rows]
        print_json({"refused": len(found.refused), "quarantined": list(found.quarantined), "plans": named})
        return
    out.print(tables.plan_table([label for label, _ in rows], [[stats] for _, stats in rows], len(found.plan.rounds)))
    out.print(
        f"\nevery invariant holds; {len(found.plan.rounds)} merges as logged; {len(found.refused)} updates refused, "
        f"{len(found.quarantined)} clients quarantined; speeds of {len(found.measured)} of "
        f"{found.plan.header.num_clients} clients measured",
        markup=False,
    )
