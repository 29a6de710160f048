"""Plugin files: Python files outside the package that register algorithms, models, partitions or data sets.

A study names them with ``plugins = ["my_algorithm.py"]``, the command line with ``--plugin``. A plugin is one file: it
may import installed packages, but not its neighbours, so that its text is all that another machine needs. Loading a
plugin runs it. Only commands that start a run do that; code that reads stored runs must not.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from .errors import UserError, first_line
from .registry import registering


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A file that was imported, and how many entries it registered."""

    sha256: str
    module: ModuleType
    registered: int


_loaded: dict[str, _Loaded] = {}  # by path
_texts: dict[str, str] = {}  # files of another machine, by their path there


class _TextLoader(SourceLoader):
    """Import a module from its text; the path is for tracebacks only."""

    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002 (the signature is importlib's)
        """Return the path of the file."""
        return self._path

    def get_data(self, path: str) -> bytes:  # noqa: ARG002 (the signature is importlib's)
        """Return the text of the file."""
        return self._text.encode()


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
    if main is not None and _same_file(getattr(main, "__file__", None), name):
        return main  # the running script: it must not register everything twice
    text = read_source(name)
    digest = _sha256(text)
    found = _loaded.get(name)
    if found is None or found.sha256 != digest:
        found = _loaded[name] = _import(name, text, digest)
    return found.module


def _same_file(script: str | None, path: str) -> bool:
    return script is not None and Path(script).absolute() == Path(path)


def _import(path: str, text: str, digest: str) -> _Loaded:
    stem = "".join(letter if letter.isalnum() else "_" for letter in Path(path).stem)
    module_name = f"defedavg_plugin_{stem}_{_sha256(path + digest)[:12]}"
    spec = spec_from_file_location(module_name, path, loader=_TextLoader(path, text))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their module while it is being executed
    try:
        with failures_in(path), registering(path) as made:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return _Loaded(digest, module, len(made))


@contextmanager
def failures_in(path: str) -> Iterator[None]:
    """Turn what a user's file raises into one line that names the file and the line number."""
    try:
        yield
    except (Exception, SystemExit) as error:
        line = error.lineno if isinstance(error, SyntaxError) else _line_in(path, error)
        what = first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {_message(error)}"
        raise UserError(f"{path}, line {line}: {what}" if line else f"{path}: {what}") from None


def _message(error: BaseException) -> str:
    return str(error.msg) if isinstance(error, SyntaxError) else first_line(error)


def _line_in(path: str, error: BaseException) -> int | None:
    """Return the line of a file in which an exception arose, or through which it passed last."""
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return frames[-1] if frames else None


# Sources: for provenance, and for processes that do not share a disk.


def read_source(path: str | Path) -> str:
    """Return the text of a Python file, from disk or as another machine sent it."""
    name = str(Path(path).absolute())
    if name in _texts:
        return _texts[name]
    try:
        return Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no Python file {name}; correct the path in plugins or task.module") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read: {first_line(error)}") from None


def plugin_sources(paths: Iterable[str | Path]) -> dict[str, str]:
    """Return the text of Python files by absolute path, for ``load_sources`` in another process."""
    return {str(Path(path).absolute()): read_source(path) for path in paths}


def loaded_sources() -> dict[str, str]:
    """Return the text of every Python file that this process has imported as a plugin or task module, by path."""
    return plugin_sources(_loaded)


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
