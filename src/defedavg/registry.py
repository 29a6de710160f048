"""Registries: the extension points of the package, each a mapping from a name to an implementation.

A registry holds what this package brings, what ``register`` adds in this process (a plugin file calls it), and what
installed packages offer through an entry point group of ``importlib.metadata``. Entry points are loaded when a name
is not found or when all names are listed, so a study that uses built-in parts never imports a third-party package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import EntryPoint, entry_points
from types import FrameType
from typing import Generic, TypeVar

from .errors import UserError, first_line, unknown

T = TypeVar("T")

_loading: list[Registrations] = []  # the plugin files that are being loaded, innermost last


@dataclass(slots=True)
class Registrations:
    """What a plugin file registers while it is loaded: for each entry, the function that undoes it."""

    source: str
    undo: list[Callable[[], None]] = field(default_factory=list)


def note_registration(undo: Callable[[], None]) -> None:
    """Tell the plugin that is being loaded, if any, that it registered something."""
    if (plugin := _current_plugin()) is not None:
        plugin.undo.append(undo)


def _current_plugin() -> Registrations | None:
    """Return the plugin that registers; a plugin may also import a module of this package, which then registers."""
    frame: FrameType | None = sys._getframe() if _loading else None
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    built_in = frame is not None and str(frame.f_globals.get("__name__")).startswith(f"{__package__}.")
    return _loading[-1] if _loading and not built_in else None


@contextmanager
def registering(source: str) -> Iterator[Registrations]:
    """Record what is registered in this block as entries of a plugin file; undo them if the block fails."""
    made = Registrations(source)
    _loading.append(made)
    try:
        yield made
    except BaseException:
        for undo in reversed(made.undo):
            undo()
        raise
    finally:
        _loading.remove(made)


class Registry(Mapping[str, T], Generic[T]):
    """Implementations by name; ``kind`` names one of them in error messages, ``group`` is the entry point group."""

    def __init__(self, kind: str, group: str, check: Callable[[str, T], None]) -> None:
        self.kind = kind
        self.group = group
        self._check = check
        self._known: dict[str, T] = {}
        self._sources: dict[str, str | None] = {}  # name -> the plugin file that registered it

    def register(self, name: str, value: T) -> T:
        """Add an implementation; refuse a name that belongs to another one, except to a plugin that was edited."""
        self._check(name, value)
        plugin = _current_plugin()
        source = None if plugin is None else plugin.source
        if name in self._known and self._known[name] is not value and (not source or self._sources[name] != source):
            raise UserError(f"{self.kind} {name!r} already exists; give yours another name")
        note_registration(partial(self._reset, self._known.copy(), self._sources.copy()))
        self._known[name], self._sources[name] = value, source
        return value

    def _reset(self, known: dict[str, T], sources: dict[str, str | None]) -> None:
        self._known, self._sources = known, sources

    def find(self, name: str) -> T:
        """Return the implementation of that name, or raise ``UserError`` with the nearest known name."""
        if name not in self:
            raise unknown(self.kind, name, self)
        return self[name]

    def __getitem__(self, name: str) -> T:
        if name not in self._known:
            self._load(self._points[name])
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._points

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._known, *self._points]))

    def __len__(self) -> int:
        return len(self._known.keys() | self._points.keys())

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def _load(self, point: EntryPoint) -> None:
        try:
            value = point.load()
        except Exception as error:  # whatever a third-party package raises when it is imported
            raise UserError(
                f"{self.kind} {point.name!r} of the entry point {point.value!r} cannot be imported: "
                f"{first_line(error)}; update or uninstall that package"
            ) from None
        self.register(point.name, value)
