"""The command line: assembles the commands, and turns errors and warnings into one line each.

Commands are thin: each calls a function that Python code can call as well. Results go to standard output; progress,
notes and errors go to standard error. An error that the user can fix is one line and exit code 2; one that was not
foreseen is one line and exit code 1, and its details are in a file. Ctrl-C is exit code 130, SIGTERM 143, and
everything evaluated so far is kept.
"""

from __future__ import annotations

import errno
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

try:
    import click
    import typer
    from click.exceptions import NoArgsIsHelpError
    from typer import Option
    from typer.core import TyperGroup

    from .. import __version__
    from ..errors import UserError, printable
    from .consoles import discard_output, flush_output
    from .crash_report import is_debugging, is_out_of_memory, memory_line, unforeseen_line
    from .options import CommandWithOldNames, err, out, print_note
    from .stop_signals import stop_on_signals, stopped_by, stopped_code
    from .usage_errors import usage_line
except KeyboardInterrupt:  # Ctrl-C in the first moment, while these are loaded: end without a traceback
    sys.exit(130)

COMMANDS: Mapping[str, Mapping[str, str]] = {
    "Explore": {
        "settings": "settings_command:settings",
        "algorithms": "algorithms_command:algorithms",
        "plan": "plan_command:plan",
    },
    "Train": {
        "run": "run_command:run",
        "tune": "tune_command:tune",
        "advise": "advise_command:advise",
        "suite": "suite_command:app",
    },
    "Inspect": {
        "report": "report_command:report",
        "view": "view_command:view",
        "runs": "runs_command:app",
        "data": "data_command:app",
        "split": "split_command:split",
        "traces": "traces_command:app",
    },
    "Deploy": {"deploy": "deploy_command:app", "replay": "replay_command:replay"},
    "Study the paper": {"theory": "theory_command:app", "paper": "paper_readings_command:app"},
    "Try this machine": {"bench": "bench_command:bench", "demo": "demo_command:demo"},
}
"""The commands by panel of ``defedavg --help``, in the order in which a newcomer needs them, each with its module and
the name of its function or group in it. A command is imported when it is called, or listed."""

_PANELS = {name: panel for panel, commands in COMMANDS.items() for name in commands}


@contextmanager
def _usage_in_one_line() -> Iterator[None]:
    """Turn an error about the words of the command line into one line; Typer would print a box of several lines."""
    try:
        yield
    except NoArgsIsHelpError:  # its message is the page of help
        raise
    except click.UsageError as error:
        raise UserError(usage_line(error)) from None


class CommandsInOrder(TyperGroup):
    """Lists the commands in the order of ``COMMANDS``; Typer would list groups after commands."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Parse the command line."""
        with _usage_in_one_line():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _usage_in_one_line():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:  # Typer would end without a word
                print_note(stopped_by())
                raise typer.Exit(stopped_code()) from None

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (the signature is Click's)
        """Return the names of the commands."""
        return list(_PANELS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is called; for an unknown name, suggest a group that has a command of this name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            groups = [name for name, each in self.commands.items() if args[0] in getattr(each, "commands", ())]
            if groups:
                error.message = f"No such command {args[0]!r}. Did you mean '{groups[0]} {args[0]}'?"
            raise

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (see above)
        """Return a command; import it if this has not happened yet. For an unknown name, others can be suggested."""
        for name in (cmd_name,) if cmd_name in _PANELS else _PANELS:
            if name not in self.commands:
                self.commands[name] = load_command(name)
        return self.commands.get(cmd_name)


def load_command(name: str) -> click.Command:
    """Import a command of ``COMMANDS``, and make it one of Click."""
    panel = _PANELS[name]
    module, _, attribute = COMMANDS[panel][name].partition(":")
    command = getattr(import_module(f".{module}", __package__), attribute)
    parent = typer.Typer(rich_markup_mode="markdown", add_completion=False)
    parent.callback()(lambda: None)  # so that Typer makes a group of one command
    if isinstance(command, typer.Typer):
        parent.add_typer(command, name=name, rich_help_panel=panel)
    else:
        parent.command(name, cls=CommandWithOldNames, rich_help_panel=panel)(command)
    group = typer.main.get_command(parent)
    assert isinstance(group, click.Group)
    return group.commands[name]


app = typer.Typer(
    name="defedavg",
    cls=CommandsInOrder,
    help="Plan, compare and deploy asynchronous federated learning.\n\n"
    "A first study: `defedavg settings > my.toml`, `defedavg plan my.toml`, `defedavg run my.toml`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)


def _version(show: bool) -> None:
    if show:
        out.print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def print_own_warnings() -> None:
    """Print every warning that this package defines (a renamed setting, data of another type) once, in one line."""
    package, default = __name__.partition(".")[0], warnings.showwarning
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **stream: Any) -> None:
        if category.__module__.partition(".")[0] != package:
            default(message, category, *where, **stream)
        elif str(message) not in shown:
            shown.add(str(message))
            print_note(f"defedavg: {message}")

    warnings.showwarning = show


def main() -> None:
    """Run the command line; an error is one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Greek letters still prints its tables
    print_own_warnings()
    stop_on_signals()
    try:
        try:
            app()
        finally:
            flush_output()
    except UserError as error:
        _exit(str(error), 2)
    except KeyboardInterrupt:
        print_note(stopped_by())
        sys.exit(stopped_code())
    except BrokenPipeError:
        discard_output()  # the reader of the pipe has closed it
        sys.exit(1)
    except Exception as error:  # the last handler: nothing else catches what was not foreseen
        discard_output()
        if is_debugging():
            traceback.print_exception(error)
        _exit(*_line_and_code(error))


def _line_and_code(error: Exception) -> tuple[str, int]:
    if is_out_of_memory(error):
        return memory_line(error), 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # Typer's own output: a page of help
        return f"standard output cannot be written: {error.strerror}", 2
    return unforeseen_line(error), 1


def _exit(line: str, code: int) -> NoReturn:
    """Print an error in one line, and exit."""
    text = f"defedavg: {printable(line)}"
    err.print(text, style="red" if err.is_terminal else None, markup=False, soft_wrap=True)
    sys.exit(code)
