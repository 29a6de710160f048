"""``defedavg deploy keys``, ``serve`` and ``join``: a deployment over gRPC, with one process on every machine."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import study as config
from ..deploy.transport import check_installed
from ..errors import UserError, first_line
from ..fileio import launch_lock, read_input, read_text
from ..report import tables
from ..runstore.layout import RunFiles
from .options import Force, Json, Out, Plugin, err, out, print_json, print_line, print_note
from .stop_signals import stopped_by, stopped_code

if TYPE_CHECKING:
    from ..deploy.deploy_config import DeployConfig

Clients = Annotated[int, typer.Option(min=1, max=1000, help="The number of clients.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Plain text without keys; only on loopback addresses, to try things out.")
]

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="Change a setting of the study or of the table deploy, such as deploy.job_seconds=60. Repeatable.",
    ),
]


def keys(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to create.")],
    clients: Clients = 6,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A host name or address of the server, for its certificate. Repeatable. Default: this machine."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="If the folder exists, keep its keys and do nothing.")] = False,
) -> None:
    """Create the files of a secure deployment: a private CA, a server certificate, and a certificate for every client.

    Keep ca.key offline. The server needs ca.crt, server.crt and server.key, and client N needs the folder client-N. The
    number in a certificate is the identity of its client. To revoke one while a server runs, write a line client-N, or
    the SHA-256 fingerprint of one certificate, into revoked.txt in the server's folder.
    """
    check_installed("grpc")
    from ..deploy.tls_keys import make_keys

    if keep and folder.is_dir():
        print_line(f"kept the keys in {folder}")
        return
    made = make_keys(folder, clients, tuple(host or ("127.0.0.1", "localhost")))
    print_line(f"wrote {len(made)} files to {folder}; give client N the folder client-N, and no other file")


def _read_study(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_input(file))
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {file}") from None
    except UnicodeDecodeError:
        raise UserError(f"the configuration {file} is not UTF-8; save it as UTF-8") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the configuration {file} cannot be read: {first_line(error)}") from None


def study_settings(
    file: Path, given: list[str] | None, algorithm: str | None, plugins: list[Path] | None
) -> dict[str, Any]:
    """Return the settings of a deployment from a study with single values and perhaps a table [deploy]."""
    found = _read_study(file)
    merged = config.override(found, tuple(given or ()))
    deploy = merged.pop("deploy", {})
    if not isinstance(deploy, dict):
        raise UserError("deploy is a key, not a table; write the settings of the server under [deploy]")
    if algorithm is not None:
        merged["algorithms"] = [algorithm]
    study = config.study(
        merged, folder=file.parent, fallback_name=file.stem, plugins=tuple(plugins or ()), other_tables=("deploy",)
    )
    if len(study.algorithms) != 1 or len(study.seeds) != 1 or len(study.points()) != 1:
        raise UserError(
            f"a deployment runs one algorithm, one seed and one setting, but {file} has several; choose with "
            "--algorithm, --set seeds=0 and --set TABLE.KEY=VALUE"
        )
    flat: dict[str, Any] = {"name": study.name, "algorithm": study.algorithms[0], "seed": study.seeds[0]}
    flat["plugins"] = os.pathsep.join(study.plugins)
    for table, values in study.tables.items():
        flat |= {f"{table}.{name}": value for name, value in values.items()}
    flat |= {f"deploy.{name}": value for name, value in deploy.items()}
    return _finite(flat)


def _finite(flat: dict[str, Any]) -> dict[str, Any]:
    """Return settings without infinity, or refuse them."""
    if flat["stop.max_seconds"] == math.inf:
        del flat["stop.max_seconds"]  # the default; JSON, in which settings are logged and sent, has no infinity
    for name, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} is {value}; a deployment needs a finite number")
    return flat


def serve(
    file: Annotated[
        Path, typer.Argument(metavar="STUDY.toml", help="A study with single values; a table [deploy] is allowed.")
    ],
    keys: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The server's keys, from `defedavg deploy keys`.")
    ] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = "0.0.0.0:9092",
    insecure: Insecure = False,
    algorithm: Annotated[str | None, typer.Option(help="The algorithm, if the study names several.")] = None,
    name: Annotated[str | None, typer.Option(help="The name of the run folder. Default: that of the study.")] = None,
    given: Sets = None,
    folder: Out = Path("runs"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run of this name that was interrupted.")] = False,
    force: Force = False,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Run the server of a deployment: wait for clients, train, and write the run folder.

    Clients connect with `defedavg deploy join HOST:PORT --keys client-3/`, from any machine that reaches this address,
    in any order, and again after a lost connection. After a crash or Ctrl-C, --resume continues the run.
    """
    check_installed("grpc")
    from ..deploy.deploy_config import read_deploy_config
    from ..deploy.grpc.join import task_of_settings
    from ..deploy.grpc.run_server import Listening, ServerLog, run_server
    from ..deploy.server.deployment_folder import new_run_folder, no_other_processes, recover

    listening = Listening(listen, keys)
    if insecure != (keys is None):
        raise UserError("give --keys FOLDER (see `defedavg deploy keys`), or --insecure to try things out on loopback")
    listening.check()
    flat = study_settings(file, given, algorithm, plugin)
    flat |= {} if name is None else {"name": name}
    run_config = read_deploy_config({**flat, "deploy.resume": resume})
    run_folder = folder / run_config.name
    files = RunFiles(run_folder)
    log_line = ServerLog(run_folder, lambda line: err.print(line, markup=False, highlight=False, soft_wrap=True))
    if resume and not run_folder.is_dir():
        raise UserError(f"there is no run to resume in {run_folder}")
    with launch_lock(run_folder), ExitStack() as created, _resumable(files):
        if resume:
            with no_other_processes(run_folder, print_note):
                recover(run_folder)
        else:
            created.enter_context(new_run_folder(run_config, run_folder, force=force, log_line=print_note))
        with _progress(run_config, run_folder):
            run_server(
                run_config,
                flat,
                lambda: task_of_settings(flat, None),
                run_folder,
                listening,
                log_line=log_line,
                on_listening=lambda port: log_line(f"listening at {listen.rpartition(':')[0]}:{port}"),
            )
    print_results(files, as_json=as_json)


@contextmanager
def _progress(run_config: DeployConfig, run_folder: Path) -> Iterator[None]:
    """Show the progress of a run while its server runs; the server itself prints what clients do."""
    from ..deploy.local_progress import followed, progress_display
    from ..runstore.deployment_status import LogTail

    resumed, total = run_config.deploy.resume, run_config.settings.clients.num_clients
    tail = LogTail(run_folder, from_end=resumed)
    with (
        progress_display(err, total, run_folder if resumed else None, faults=False) as on_line,
        followed(tail, on_line),
    ):
        yield


@contextmanager
def _resumable(files: RunFiles) -> Iterator[None]:
    """After Ctrl-C, print how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        begun = files.event_log.exists()
        then = "continue with the same command and --resume" if begun else "the run had not started"
        print_note(f"{stopped_by()}; {then}")
        raise typer.Exit(stopped_code()) from None


def print_results(files: RunFiles, *, as_json: bool) -> None:
    """Print the summary of a deployment that has ended."""
    entries = json.loads(read_text(files.summary))["runs"]
    if as_json:
        print_json(entries)
    else:
        out.print(tables.result_table(files.folder.name, entries, clock="seconds of the run"))
        print_line(f"\nresults: {files.folder}")
        if files.page.exists():
            print_line(f"open in a browser: {files.page}")


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the server listens.")],
    keys: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="This client's own folder from `defedavg deploy keys`.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="The function that makes this client's task, with its own data."),
    ] = None,
    step_seconds: Annotated[
        float, typer.Option(min=0.0, help="A local step lasts at least this long, to imitate a slower device.")
    ] = 0.0,
    retry_seconds: Annotated[
        float, typer.Option(min=0.0, help="Give up after this time without a connection; 0: never.")
    ] = 600.0,
    insecure: Insecure = False,
    client: Annotated[
        int | None, typer.Option(min=0, help="The number of this client, with --insecure; keys contain it.")
    ] = None,
    plugin: Plugin = None,  # noqa: ARG001 (loaded by its callback)
) -> None:
    """Run one client of a deployment until the run is over; after a lost connection, connect again.

    The client's number is in its certificate. The settings come from the server; code and data come from this machine
    alone. A task of your own has a function make(config, client), as for a simulation.
    """
    check_installed("grpc")
    from ..config.task_module import absolute_spec, file_of
    from ..deploy.grpc.identities import check_keys, check_loopback, client_credentials, host_and_port
    from ..deploy.grpc.join import run_client

    host_and_port(address)
    if insecure != (keys is None) or insecure != (client is not None):
        raise UserError("give --keys FOLDER of this client, or --insecure and --client N to try things out on loopback")
    if keys is None:
        check_loopback(address)
    else:
        check_keys(keys, "client")
    spec = None if task is None else absolute_spec(task, Path.cwd())
    if spec is not None and file_of(spec) and not Path(file_of(spec)).is_file():
        raise UserError(f"there is no Python file {file_of(spec)}; correct the path in --task")
    try:
        run_client(
            address,
            None if keys is None else client_credentials(keys),
            client=client,
            task=spec,
            step_seconds=step_seconds,
            retry_seconds=retry_seconds,
            log_line=lambda line: err.print(line, markup=False, highlight=False, soft_wrap=True),
        )
    except KeyboardInterrupt:
        print_note(f"{stopped_by()}; the server continues with the other clients")
        raise typer.Exit(stopped_code()) from None
    print_line("the run is over")
