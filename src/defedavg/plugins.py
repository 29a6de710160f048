"""Plugin files: Python files outside the package that register algorithms, models, partitions or data sets.

A study names them with ``plugins = ["my_algorithm.py"]``, the command line with ``--plugin``. A plugin is one file: it
may import installed packages, but not its neighbours, so that its text is all that another machine needs. Loading a
plugin runs it. Only commands that start a run do that; code that reads stored runs must not.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from .errors import UserError, first_line
from .fileio import read_input
from .registry import registering


class _Loaded(NamedTuple):
    text: str
    sha256: str
    module: ModuleType
    registered: int  # number of entries


_loaded: dict[str, _Loaded] = {}  # by path
_texts: dict[str, str] = {}  # files of another machine, by their path there


def load_plugin(path: str | Path) -> ModuleType:
    """Import a plugin file, once per path and content, and require that it registers something."""
    module = import_file(path)
    name = str(Path(path).absolute())
    if name in _loaded and not _loaded[name].registered:
        raise UserError(
            f"plugin {name} registers nothing; call defedavg.algorithms.register, or register_model, "
            "register_partition or register_dataset of defedavg.tasks"
        )
    return module


def load_plugins(paths: Iterable[str | Path]) -> None:
    """Import several plugin files in order."""
    for path in paths:
        load_plugin(path)


def import_file(path: str | Path) -> ModuleType:
    """Import a Python file under a module name of its own, once per path and content."""
    name = str(Path(path).absolute())
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if main is not None and script is not None and str(Path(script).absolute()) == name:
        return main  # the running script: it must not register everything twice
    text = read_source(name)
    digest = _sha256(text)
    if name not in _loaded or _loaded[name].sha256 != digest:
        _loaded[name] = _import(name, text, digest)
    return _loaded[name].module


def _import(path: str, text: str, digest: str) -> _Loaded:
    stem = "".join(letter if letter.isalnum() else "_" for letter in Path(path).stem)
    module = ModuleType(f"defedavg_plugin_{stem}_{_sha256(path + digest)[:12]}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look up their module while it is being executed
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path  # for tracebacks without the file
    try:
        with failures_in(path), registering(path) as made:
            exec(compile(text, path, "exec", dont_inherit=True), vars(module))  # noqa: S102 (the user names the file)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return _Loaded(text, digest, module, len(made.undo))


@contextmanager
def failures_in(path: str) -> Iterator[None]:
    """Turn what a user's file raises into one line that names the file and the line number."""
    try:
        yield
    except (Exception, SystemExit) as error:
        what = first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        # The line in which the exception arose, or through which it passed last.
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        if isinstance(error, SyntaxError):
            what, lines = f"{type(error).__name__}: {error.msg}", [error.lineno]
        raise UserError(f"{path}, line {lines[-1]}: {what}" if lines and lines[-1] else f"{path}: {what}") from None


# Sources: for provenance, and for processes that do not share a disk.


def read_source(path: str | Path) -> str:
    """Return the text of a Python file, from disk or as another machine sent it."""
    name = str(Path(path).absolute())
    if name in _texts:
        return _texts[name]
    try:
        return read_input(Path(name))
    except FileNotFoundError:
        raise UserError(f"there is no Python file {name}; correct the path in plugins or task.module") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read: {first_line(error)}") from None


def plugin_sources(paths: Iterable[str | Path]) -> dict[str, str]:
    """Return the text of Python files by absolute path, for ``load_sources`` in another process."""
    return {str(Path(path).absolute()): read_source(path) for path in paths}


def loaded_sources() -> dict[str, str]:
    """Return the text of every Python file that this process has imported as a plugin or task module, by path."""
    return {path: loaded.text for path, loaded in _loaded.items()}  # as imported: the file may have changed since


def load_sources(sources: Mapping[str, str]) -> None:
    """Import files from their text; from now on their paths stand for these texts in this process."""
    _texts.update(sources)
    for path in sources:
        import_file(path)


def plugin_hashes(paths: Iterable[str | Path]) -> dict[str, str]:
    """Return the SHA-256 of Python files by absolute path, for provenance and to notice a changed plugin."""
    return {path: _sha256(text) for path, text in plugin_sources(paths).items()}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
