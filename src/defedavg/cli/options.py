"""What the commands share: consoles, option types, old option names, and the one function that loads a study."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer
from typer import Argument, Option
from typer.core import TyperCommand

from ..config import study as config
from ..config.study import Study
from ..config.unused_settings import unused_settings
from ..durations import parse_duration
from ..errors import UNSAFE, UserError
from ..fileio import is_standard_output
from ..jsonio import finite
from .consoles import SafeConsole, print_text
from .stop_signals import stopped_by, stopped_code

out = SafeConsole(width_of_files=160)
err = SafeConsole(stderr=True)


def print_line(text: str) -> None:
    """Print one line of a result on standard output, as it is."""
    out.print(text, markup=False, soft_wrap=True)


def print_note(text: str) -> None:
    """Print one line for the user on standard error, as it is."""
    err.print(text, markup=False, soft_wrap=True)


def print_notes(notes: list[str]) -> None:
    """Print the notes of a library call on standard error, and clear them."""
    while notes:
        print_note(notes.pop(0))


def print_json(value: Any) -> None:
    """Print a value as strict JSON on standard output; NaN and infinity become null."""
    text = json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False)
    # JSON has its own escapes, from which a reader gets the characters back.
    print_text(UNSAFE.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text) + "\n")


def print_written(line: str, file: Path) -> None:
    """Print that a file was written; on standard error if the file is standard output."""
    (print_note if is_standard_output(file) else print_line)(line)


def require_file(path: Path, example: str) -> None:
    """Refuse a folder where a file is to be written."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file, such as {path / example}")


def working(message: str) -> AbstractContextManager[object]:
    """Show a message on a terminal while a block runs that may take more than two seconds."""
    return err.status(message) if err.is_terminal else nullcontext()


def exit_if_stopped(finished: bool, advice: str = "") -> None:
    """Exit after one line of explanation, unless the command finished."""
    if not finished:
        print_note(f"{stopped_by()}; every evaluation so far is kept" + (f"; {advice}" if advice else ""))
        raise typer.Exit(stopped_code())


def exit_unchanged() -> NoReturn:
    """Exit after Ctrl-C before a run had results: a run that it would have replaced is as it was."""
    print_note(f"{stopped_by()} before the first round; no run was replaced")
    raise typer.Exit(stopped_code())


def load_study(
    file: Path, overrides: Sequence[str] | None, plugins: Sequence[Path] | None, seconds: float | None = None
) -> Study:
    """Read a study with its overrides; ``plugins`` are added to those that the file names."""
    return reported(read_study(file, overrides, plugins, seconds))


def read_study(
    file: Path, overrides: Sequence[str] | None, plugins: Sequence[Path] | None, seconds: float | None = None
) -> Study:
    """Read a study as ``load_study`` does, and print nothing."""
    return config.load(file, tuple(overrides or ()), plugins=tuple(plugins or ()), seconds=seconds)


def horizon(seconds: str | None) -> float | None:
    """Return the simulated seconds that ``--seconds`` names, if it is given."""
    return None if seconds is None else parse_duration(seconds, "--seconds")


def reported(study: Study) -> Study:
    """Print one line for every setting of a study that has no effect, and return the study."""
    print_notes([f"defedavg: {line}" for line in unused_settings(study)])
    return study


# Former names of options, which a ``CommandWithOldNames`` accepts for one version.
RENAMED_OPTIONS = {
    "--width": "--max-batch-jobs",
    "--measure-rounds": "--eval-every-rounds",
    "--beyond": "--time-limit-factor",
    "--cold": "--no-warm-workers",
}

READING_OPTIONS = {"--normalise": "normalise", "--sampling": "sampling"}
"""Former options of ``paper``, whose values are now readings."""


def current_words(args: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the words of a command line with the present names of options; each former name prints a note."""
    words = iter(current_name(word, options) for word in args)
    current = []
    for word in words:
        option, equals, value = word.partition("=")
        reading = READING_OPTIONS.get(option) if "--reading" in options else None
        if reading is None:
            current.append(word)
            continue
        given = value if equals else next(words, "")
        print_note(f"defedavg: {option} is now --reading {reading}=VALUE; the old name works in this version only")
        current += ["--reading", f"{reading}={given}"]
    return current


def current_name(word: str, options: Collection[str]) -> str:
    """Return a word of the command line; replace the former name of one of the ``options``, with a note."""
    old, equals, value = word.partition("=")
    new = RENAMED_OPTIONS.get(old)
    if new is None or new not in options or old in options:
        return word
    print_note(f"defedavg: {old} is now {new}; the old name works in this version only")
    return f"{new}{equals}{value}"


class CommandWithOldNames(TyperCommand):
    """A command that accepts the former names of its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of the command line, with the present names of options."""
        options = {name for parameter in self.params for name in parameter.opts}
        return super().parse_args(ctx, current_words(args, options))


def _load_plugins(files: list[Path] | None) -> list[Path] | None:
    if files:
        from ..plugins import load_plugins

        load_plugins([file.resolve() for file in files])
    return files


def _check_tensorboard(wanted: bool) -> bool:
    if wanted:
        from ..runstore.tensorboard import summary_writer

        summary_writer()  # raises before anything is computed if the writer is not installed
    return wanted


StudyFile = Annotated[
    Path, Argument(metavar="CONFIG.toml", help="The study, a TOML file; `defedavg settings` prints a first one.")
]
Set = Annotated[
    list[str] | None,
    Option("--set", metavar="TABLE.KEY=VALUE", help="Override a setting; a list is swept. Repeatable."),
]
Seconds = Annotated[
    str | None,
    Option(
        "--seconds",
        metavar="TIME",
        help="Simulated time, the same for all algorithms: 90 (seconds), 15m, 6h or 1d. For run it is "
        "stop.max_seconds, and stop.max_rounds is a limit only if the study sets it; plan ignores stop.max_rounds.",
        show_default=False,
    ),
]
Plugin = Annotated[
    list[Path] | None,
    Option(
        "--plugin",
        metavar="FILE.py",
        callback=_load_plugins,
        is_eager=True,  # plugins may register what the other options name
        help="Load a Python file that registers algorithms, models, partitions or data sets. Repeatable.",
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Force = Annotated[bool, Option("--force", help="Replace an existing run of the same name.")]
Out = Annotated[Path, Option("--out", metavar="FOLDER", help="The folder that holds run folders.")]
Device = Annotated[str, Option(help="auto, cpu or cuda; auto uses CUDA if available.")]
MaxBatchJobs = Annotated[
    int | None, Option("--max-batch-jobs", help="Jobs per batch, at most.", show_default="64 on the CPU, 256 on CUDA")
]
Memory = Annotated[
    str | None,
    Option(metavar="SIZE", help="Memory limit, such as 800M or 12G.", show_default="a share of the free memory"),
]
Precision = Annotated[
    str, Option(help="Of products: float32; bf16 (CUDA, AVX512-BF16); tf32 (CUDA). auto: tf32 on CUDA, else float32.")
]
Resume = Annotated[
    bool,
    Option(
        "--resume",
        help="Continue this study from its last checkpoint; results are bit-identical in the same environment "
        "(executor, device, precision, library versions).",
    ),
]
CheckpointEvery = Annotated[
    float | None,
    Option(
        "--checkpoint-every",
        metavar="SECONDS",
        help="Real seconds between checkpoints; inf: no checkpoints.",
        show_default="60, or more if checkpoints are large",
    ),
]
Executor = Annotated[
    str, Option(help="batched: many clients per step; reference: one job after another; ray: a Ray cluster.")
]
RayAddress = Annotated[
    str | None,
    Option(
        metavar="HOST:PORT",
        help="Address of a Ray cluster, or auto.",
        show_default="RAY_ADDRESS, else a cluster on this machine",
    ),
]
Plots = Annotated[bool, Option("--plots", help="Also draw figures into the run folder, as PNG and PDF.")]
TensorBoard = Annotated[
    bool, Option("--tensorboard", callback=_check_tensorboard, help="Also write TensorBoard logs to the run folder.")
]
