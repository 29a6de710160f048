"""Errors in the words of a command line: one line that says what to do, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from typer.testing import CliRunner

from defedavg.cli.main import app
from defedavg.cli.usage_errors import usage_line
from helpers.command_line import call, refuse

LINES = [
    (
        "run a.toml --sed 3",
        "unknown option '--sed'; did you mean --set or --seconds? `defedavg run --help` lists the options",
    ),
    ("demo --zzz", "unknown option '--zzz'; `defedavg demo --help` lists the options"),
    ("demo -x", "unknown option '-x'; `defedavg demo --help` lists the options"),
    (
        "runs --out x list",
        "unknown option '--out'; write the options of a command after its name; `defedavg runs --help` lists the "
        "commands",
    ),
    (
        "run",
        "the argument CONFIG.toml is missing; write `defedavg run [OPTIONS] CONFIG.toml`; `defedavg run --help` "
        "explains it",
    ),
    (
        "plan --rounds none",
        "--rounds needs another value: 'none' is not a valid integer; `defedavg plan --help` explains it",
    ),
    ("plan --rounds 0", "--rounds needs another value: 0 is not in the range x>=1; `defedavg plan --help` explains it"),
    ("plan --rounds", "option '--rounds' requires an argument; write --rounds VALUE"),
    ("plan --json=3", "option '--json' does not take a value; write --json alone"),
    (
        "demo one two",
        "got unexpected extra arguments (one two); write `defedavg demo [OPTIONS]`; `defedavg demo --help` explains it",
    ),
    ("runs tabl", "no such command 'tabl'; did you mean 'table'? `defedavg runs --help` lists the commands"),
    ("zzzz", "no such command 'zzzz'; `defedavg --help` lists the commands"),
]


@pytest.mark.parametrize(("words", "line"), LINES, ids=[words for words, _ in LINES])
def test_an_error_in_the_words_is_one_line_that_says_what_to_do(tmp_path: Path, words: str, line: str) -> None:
    done = call(*words.split(), cwd=tmp_path, COLUMNS="80")
    refuse(done)
    assert done.stderr == f"defedavg: {line}\n"


def test_a_missing_option_is_named_with_its_value() -> None:
    command = click.Command("try", params=[click.Option(["--size"], type=int, required=True)])
    with pytest.raises(click.UsageError) as caught:
        command.make_context("try", [])
    assert usage_line(caught.value) == "an option is missing; add --size INTEGER; `try --help` explains it"


def test_an_error_without_a_command_is_its_message() -> None:
    assert usage_line(click.UsageError("Too many words.")) == "too many words"


def test_a_group_without_a_command_prints_its_help() -> None:
    result = CliRunner().invoke(app, ["runs"])
    assert result.exit_code == 2
    assert "Usage: " in result.output
    assert "compare" in result.output
