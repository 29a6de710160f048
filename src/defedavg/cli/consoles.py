"""The consoles of the command line: text from outside cannot act as a command to the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..errors import UserError, printable


class SafeConsole(Console):
    """A console that shows control characters as escapes, and parses no markup unless asked to."""

    def __init__(self, *, stderr: bool = False, width_of_files: int | None = None) -> None:
        stream = sys.stderr if stderr else sys.stdout
        is_file = stream is None or not stream.isatty()  # Python sets a closed stream to None
        super().__init__(
            stderr=stderr,
            highlight=False,
            markup=False,
            soft_wrap=is_file and width_of_files is not None,
            width=width_of_files if is_file else None,
        )

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments to print; what rich itself tells the terminal is in control segments."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text, keep="\n\t")
            yield segment if text is segment.text or text == segment.text else Segment(text, segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; raise ``UserError`` if standard output cannot be written, and ignore a full standard error."""
        if self.stderr:
            with suppress(OSError):
                super().print(*objects, **options)
        else:
            with writing_output():
                super().print(*objects, **options)


@contextmanager
def writing_output() -> Iterator[None]:
    """Turn a failure to write to standard output into a ``UserError``; a closed pipe stays a ``BrokenPipeError``."""
    try:
        yield
    except BrokenPipeError:
        discard_output()
        raise
    except OSError as error:
        discard_output()
        raise UserError(f"standard output cannot be written: {error.strerror or error}") from None


def discard_output() -> None:
    """Let what is still to be written to standard output, at the exit too, go nowhere."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_text(text: str) -> None:
    """Write text to standard output as it is, except that control characters are shown as escapes."""
    if sys.stdout is not None:
        with writing_output():
            sys.stdout.write(printable(text, keep="\n\t"))


def flush_output() -> None:
    """Write what is buffered, while an error can still be reported."""
    if sys.stdout is not None:
        with writing_output():
            sys.stdout.flush()
