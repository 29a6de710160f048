"""Errors in the words of a command line, such as an unknown option: one line that says what to do."""

from __future__ import annotations

import click
from click.exceptions import BadOptionUsage, BadParameter, MissingParameter, NoSuchOption


def usage_line(error: click.UsageError) -> str:
    """Return what is wrong with a command line, what to write instead, and which page of help explains it."""
    if isinstance(error, BadOptionUsage):  # Click does not say of which command
        return _wrong_use(error)
    context = error.ctx
    if context is None:
        return _clause(error.format_message())
    text = _wrong(error, context)
    page = f"`{context.command_path} --help` {_content(error, context)}"
    return f"{text} {page}" if text.endswith("?") else f"{text}; {page}"


def _wrong(error: click.UsageError, context: click.Context) -> str:
    if isinstance(error, NoSuchOption):
        return _unknown_option(error, context)
    if isinstance(error, MissingParameter) and error.param is not None:
        shown = error.param.make_metavar(context)
        if isinstance(error.param, click.Option):
            return f"an option is missing; add {error.param.opts[0]} {shown}"
        return f"the argument {shown} is missing; write `{_usage(context)}`"
    if isinstance(error, BadParameter) and error.param is not None:
        name = error.param.opts[0] if isinstance(error.param, click.Option) else error.param.make_metavar(context)
        return f"{name} needs another value: {_clause(error.message).removesuffix(' range')}"
    if isinstance(context.command, click.Group):
        return _clause(error.format_message())
    return f"{_clause(error.format_message())}; write `{_usage(context)}`"  # too many arguments


def _wrong_use(error: BadOptionUsage) -> str:
    """Return that an option lacks a value, or has one although it takes none."""
    text, name = _clause(error.message), error.option_name
    return f"{text}; write {name} alone" if "does not take" in text else f"{text}; write {name} VALUE"


def _unknown_option(error: NoSuchOption, context: click.Context) -> str:
    text = f"unknown option {error.option_name!r}"
    if error.possibilities:
        return f"{text}; did you mean {' or '.join(error.possibilities)}?"
    if isinstance(context.command, click.Group):
        return f"{text}; write the options of a command after its name"
    return text


def _content(error: click.UsageError, context: click.Context) -> str:
    """Return what the page of help does for this error."""
    if isinstance(context.command, click.Group):
        return "lists the commands"
    return "lists the options" if isinstance(error, NoSuchOption) else "explains it"


def _usage(context: click.Context) -> str:
    return " ".join([context.command_path, *context.command.collect_usage_pieces(context)])


def _clause(message: str) -> str:
    """Return a sentence of Click as the start of a line in the style of this package."""
    message = message.strip().removesuffix(".").replace(". Did you mean", "; did you mean")
    return message[:1].lower() + message[1:]
