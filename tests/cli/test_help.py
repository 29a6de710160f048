"""Every help page teaches: it starts with a sentence, shows an example, and is in plain technical English."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

from defedavg.cli.main import COMMANDS, app

NOT_PLAIN = re.compile(
    r"so many|anew|broken? off|taken up|under way|goes on|go on|in one stroke|but for|whoever|nobody|anybody|"
    r"is there already|are no |is no |is told|the way back|come true|comes true|by hand|of its own",
    re.IGNORECASE,
)
"""Phrases that read as translated."""


def walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command and group below a command, and itself, with its words."""
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            below = command.get_command(click.Context(command), name)
            assert below is not None
            yield from walk(below, (*path, name))


ALL = list(walk(typer.main.get_command(app)))


@pytest.mark.parametrize(("path", "command"), ALL, ids=["defedavg " + " ".join(path) for path, _ in ALL])
def test_every_help_page_teaches(path: tuple[str, ...], command: click.Command) -> None:
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert result.stderr == ""
    sentence = (command.help or "").split("\n\n")[0].strip()
    assert re.fullmatch(r"[A-Z].+[.]", sentence, re.DOTALL), "the first paragraph is a sentence"
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.stdout).split())
    assert sentence.replace("`", "").split("\n")[0] in shown
    assert not NOT_PLAIN.findall(shown)
    texts = [option.help for option in command.params if isinstance(option, click.Option) and not option.hidden]
    assert all(texts), "every option is explained"


def test_the_commands_are_listed_in_the_order_in_which_they_are_needed() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout
    names = [name for commands in COMMANDS.values() for name in commands]
    assert re.findall(r"^│ ([a-z]+) ", shown, re.MULTILINE) == names
    expected = (
        "settings algorithms plan run tune advise report view runs data split traces deploy replay theory paper "
        "bench demo"
    )
    assert " ".join(names) == expected
    assert re.findall(r"^╭─ ([A-Z][a-z ]+) ─", shown, re.MULTILINE) == ["Options", *COMMANDS]


@pytest.mark.parametrize("name", ["settings", "algorithms", "plan", "run", "tune", "report", "view", "split", "bench"])
def test_help_shows_an_example_that_parses(name: str) -> None:
    command = dict(ALL)[(name,)]
    (example,) = re.findall(rf"^Example: `defedavg {name}(.*?)`", command.help or "", re.MULTILINE)
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", example.partition(">")[0])]
    if "--plugin" not in words:  # the file of the example does not exist
        command.make_context(name, words)
