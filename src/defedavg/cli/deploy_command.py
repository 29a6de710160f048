"""``defedavg deploy``."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..algorithms import ALGORITHMS
from ..config import study as config
from ..config.task_module import absolute_spec
from ..deploy.transport import check_installed
from ..errors import UserError, unknown
from ..fileio import launch_lock, read_regular, write_whole
from ..runstore.layout import RunFiles
from ..runstore.reader import read_run
from .deploy_stream_command import Clients, Sets, join, keys, print_results, serve, study_settings
from .options import (
    CommandWithOldNames,
    Force,
    Json,
    Out,
    Plugin,
    err,
    print_line,
    print_note,
)
from .stop_signals import stopped_by, stopped_code

if TYPE_CHECKING:
    from ..deploy.deploy_config import DeployConfig
    from ..deploy.grpc.local_clients import LocalClients
    from ..deploy.local_progress import OnLine

app = typer.Typer(
    help="Run on a real network, over gRPC or Flower, with the algorithms, tasks and run folders of a simulation.",
    no_args_is_help=True,
)

Algorithm = Annotated[str, typer.Option(help="The algorithm; `defedavg algorithms` lists them.")]
NoWarmWorkers = Annotated[
    bool,
    typer.Option(
        "--no-warm-workers",
        help="End a client's process after every message, as plain Flower does; the next one loads PyTorch again.",
    ),
]


LocalStudy = Annotated[
    Path | None,
    typer.Argument(
        metavar="[STUDY.toml]",
        help="A study with single values, as for serve, such as advised.toml.",
        show_default="the settings of a small deployment",
    ),
]
LocalAlgorithm = Annotated[str | None, typer.Option(help="Default: that of the study or app, or defedavg-iid.")]
LocalClientCount = Annotated[
    int | None,
    typer.Option(min=1, max=1000, help="The number of clients. Default: that of the study or app, or 6."),
]
AppFolder = Annotated[
    Path | None,
    typer.Option("--app", metavar="FOLDER", help="An app from `defedavg deploy init`, with its settings and task."),
]


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested tables under names such as ``training.local_steps``."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= {f"{name}.{word}": item for word, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _with_changes(flat: dict[str, Any], given: list[str] | None) -> dict[str, Any]:
    flat = dict(flat)
    for name, value in _flat(config.override({}, tuple(given or ()))).items():
        if name not in flat:
            raise unknown("setting", name, flat)
        flat[name] = config.single(name, value, type(flat[name]))
    if "algorithm" in flat and flat["algorithm"] not in ALGORITHMS:
        raise unknown("algorithm", flat["algorithm"], ALGORITHMS)
    return flat


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="MY_APP", help="The folder to create; the app gets its name.")],
    algorithm: Algorithm = "defedavg-iid",
    clients: Clients = 6,
    given: Sets = None,
) -> None:
    """Write a Flower app with its settings in pyproject.toml, and the model and the data in task.py.

    Edit task.py, try the app with `defedavg deploy local --app MY_APP`, then start it on a SuperLink with `flwr run`.
    """
    check_installed("flower")
    from ..deploy.deploy_config import default_settings, read_deploy_config
    from ..deploy.flower.app_template import write_app

    flat = _with_changes(default_settings(algorithm, clients), given)
    read_deploy_config(flat)
    write_app(folder, flat)
    print_line(f"created {folder}: put your model and data into {folder / folder.name / 'task.py'}, then try it with")
    print_line(f"  defedavg deploy local --app {folder}")


@app.command(cls=CommandWithOldNames)
def local(
    file: LocalStudy = None,
    algorithm: LocalAlgorithm = None,
    clients: LocalClientCount = None,
    name: Annotated[str, typer.Option(help="The name of the run and of its folder.")] = "deployment",
    given: Sets = None,
    app_folder: AppFolder = None,
    folder: Out = Path("runs"),
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The port of the server. Default: a free port.")
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            help="grpc: direct streams; flower: Flower's processes. Default: deploy.transport, which is grpc."
        ),
    ] = None,
    no_warm_workers: NoWarmWorkers = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run of this name that was interrupted.")] = False,
    force: Force = False,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Run a complete deployment on this machine: a server, a process for every client, and one run.

    Clients have different speeds: a local step lasts clients.step_seconds times the client's slowness. The run folder
    has the files of a simulation, and the event log for `defedavg replay`. All processes end with the run.
    """
    from ..deploy.ports import check_port
    from ..deploy.server.deployment_folder import no_other_processes

    files = RunFiles(folder / name)
    flat, run_config = None, None
    if not resume:
        if file is None:
            flat = _with_user_code(_new_settings(app_folder, name, algorithm, clients, given), plugin)
        else:
            flat = _settings_of_study(file, app_folder, name, algorithm, clients, given, plugin)
        flat, run_config = _chosen(flat, transport, resume=False)
    else:
        changed = any(each is not None for each in (file, algorithm, clients))
        _check_resume(files, changed=bool(given or force) or changed)
    if port is not None:
        check_port(port)
    with launch_lock(files.folder), ExitStack() as created:
        started = _started_clients(created, transport, run_config)
        if flat is None or run_config is None:
            with no_other_processes(files.folder, print_note):
                flat, app_folder = _interrupted_run(files, app_folder)
            flat, run_config = _chosen(flat, transport, resume=True)
        else:
            _create_run(created, run_config, files, app_folder, force=force)
        with _progress(run_config, files) as on_line:
            if run_config.deploy.transport == "flower" or started is None:
                _run_flower(app_folder, run_config, flat, files, on_line, port, warm=not no_warm_workers)
            else:
                from ..deploy.grpc.local_streams import run_local_streams

                run_local_streams(started, run_config, flat, files.folder, on_line, app=app_folder, port=port or 0)
    print_results(files, as_json=as_json)


def _check_resume(files: RunFiles, *, changed: bool) -> None:
    if changed:
        raise UserError(
            "--resume keeps the settings of the run; omit the study, --set, --algorithm, --clients and --force"
        )
    if not files.folder.is_dir():
        raise UserError(f"there is no run to resume in {files.folder}")


def _chosen(flat: dict[str, Any], transport: str | None, *, resume: bool) -> tuple[dict[str, Any], DeployConfig]:
    """Return the settings of a run with the transport of the command line, and check that it is installed."""
    from ..deploy.deploy_config import read_deploy_config

    flat = flat | ({} if transport is None else {"deploy.transport": transport})
    run_config = read_deploy_config({**flat, "deploy.resume": resume})
    check_installed(run_config.deploy.transport)
    return flat, run_config


def _started_clients(created: ExitStack, transport: str | None, run_config: DeployConfig | None) -> LocalClients | None:
    """Start the process of clients over gRPC: it loads PyTorch while this process does."""
    chosen = transport if run_config is None else run_config.deploy.transport
    if chosen == "flower":
        return None
    from ..deploy.grpc.local_clients import local_clients

    return created.enter_context(local_clients())


def _create_run(
    created: ExitStack, run_config: DeployConfig, files: RunFiles, app_folder: Path | None, *, force: bool
) -> None:
    from ..deploy.server.deployment_folder import new_run_folder

    created.enter_context(new_run_folder(run_config, files.folder, force=force, log_line=print_note))
    if app_folder is not None:
        write_whole(files.app_path, os.fsencode(f"{app_folder.absolute()}\n"))


def _new_settings(
    app_folder: Path | None, name: str, algorithm: str | None, clients: int | None, given: list[str] | None
) -> dict[str, Any]:
    """Return the settings of a new run: those of the app or the defaults, changed by the command line."""
    from ..deploy.deploy_config import default_settings

    if app_folder is None:
        return {**_with_changes(default_settings(algorithm or "defedavg-iid", clients or 6), given), "name": name}
    options = {"algorithm": algorithm, "clients.num_clients": clients}
    chosen = {key: value for key, value in options.items() if value is not None}
    return _with_changes(_app_settings(app_folder) | chosen, given)


def _settings_of_study(
    file: Path,
    app_folder: Path | None,
    name: str,
    algorithm: str | None,
    clients: int | None,
    given: list[str] | None,
    plugins: list[Path] | None,
) -> dict[str, Any]:
    """Return the settings of a study, changed by the command line."""
    if app_folder is not None:
        raise UserError("give a study or --app, not both; an app has settings of its own")
    from ..deploy.deploy_config import default_settings

    # Flower lets a command change only the settings that its app names.
    server = {key: value for key, value in default_settings().items() if key.startswith("deploy.")}
    options = [] if clients is None else [f"clients.num_clients={clients}"]
    return {**server, **study_settings(file, [*(given or []), *options], algorithm, plugins), "name": name}


def _with_user_code(flat: dict[str, Any], plugins: list[Path] | None) -> dict[str, Any]:
    """Add plugins, and make the path of a task module absolute: the processes of a deployment run in other folders."""
    if plugins:
        flat = {**flat, "plugins": os.pathsep.join(str(path.resolve()) for path in plugins)}
    if flat.get("task.module"):
        flat = {**flat, "task.module": absolute_spec(str(flat["task.module"]), Path.cwd())}
    return flat


def _run_flower(
    app_folder: Path | None,
    run_config: DeployConfig,
    flat: dict[str, Any],
    files: RunFiles,
    on_line: OnLine,
    port: int | None,
    *,
    warm: bool,
) -> None:
    from ..deploy.flower.app_template import write_app
    from ..deploy.flower.local_deployment import run_local

    if app_folder is None:
        app_folder = files.app
        if not app_folder.exists():
            write_app(app_folder, flat)
    app_settings = _app_settings(app_folder)
    changes = {key: value for key, value in flat.items() if value != app_settings.get(key, value)}
    run_local(app_folder, run_config, files.folder, on_line, changes, port=port or 0, warm=warm)


@contextmanager
def _progress(run_config: DeployConfig, files: RunFiles) -> Iterator[OnLine]:
    """Show the progress of a run; after Ctrl-C, print how to continue it."""
    from ..deploy.local_progress import progress_display

    run_folder = files.folder
    try:
        resumed = run_folder if run_config.deploy.resume else None
        with progress_display(err, run_config.settings.clients.num_clients, resumed) as on_line:
            yield on_line
    except KeyboardInterrupt:
        command = f"defedavg deploy local --name {run_folder.name}"
        command += f" --out {run_folder.parent}" if run_folder.parent != Path("runs") else ""
        begun = files.event_log.exists()
        then = f"continue with: {command} --resume" if begun else "it had not started; start it again with --force"
        print_note(f"{stopped_by()}; {then}")
        raise typer.Exit(stopped_code()) from None


def _interrupted_run(files: RunFiles, app_folder: Path | None) -> tuple[dict[str, Any], Path | None]:
    from ..deploy.engine import event_log as logs
    from ..deploy.server.deployment_folder import recover

    recover(files.folder)
    if not files.event_log.exists():
        raise UserError(f"there is no run to resume in {files.folder}")
    if read_run(files.folder).finished:
        raise UserError(f"the run in {files.folder} is finished; start another run")
    recorded = files.app_path
    own_app = Path(os.fsdecode(read_regular(recorded)).strip()) if recorded.exists() else None
    return logs.read(files.event_log).settings, app_folder or own_app


def _app_settings(folder: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(read_regular(folder / "pyproject.toml").decode())
        return _flat(content["tool"]["flwr"]["app"]["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder} is not a Flower app with settings; create one with `defedavg deploy init`") from None


app.command()(keys)
app.command()(serve)
app.command()(join)
