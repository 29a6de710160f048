"""Where the files of data sets are: the data folder, and the layouts that are looked for in it.

The folder is the one given to ``set_data_dir`` (``--data-dir``), else ``DEFEDAVG_DATA``, else ``defedavg`` in the
user's cache.
"""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ...errors import UserError
from .dataset import DataSet

VARIABLE: Final = "DEFEDAVG_DATA"

_chosen: list[Path] = []  # at most one: the folder that the command line names


def set_data_dir(folder: Path | str | None) -> None:
    """Look for data sets in this folder, whatever the environment says; None restores the default."""
    _chosen[:] = [] if folder is None else [Path(folder)]


def data_dir() -> Path:
    """Return the folder in which data sets are looked for; it need not exist."""
    try:
        if _chosen:
            return _chosen[0].expanduser().absolute()
        if named := os.environ.get(VARIABLE):
            return Path(named).expanduser().absolute()
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (cache if cache.is_absolute() else Path.home() / ".cache") / "defedavg"
    except (RuntimeError, OSError) as error:
        raise UserError(f"the folder of data sets is not known: {error}; name one with --data-dir") from None


def fetch_command(name: str) -> str:
    """Return the command that downloads a data set into the data folder."""
    return f"defedavg data fetch {name}" + (f" --data-dir {shlex.quote(str(_chosen[0]))}" if _chosen else "")


def how_to_get(dataset: DataSet) -> str:
    """Return the command that makes a data set available, or an empty string if none is needed."""
    if dataset.package is not None:
        return f"pip install {dataset.package[0]}"
    return fetch_command(dataset.name) if dataset.download is not None else ""


def locate(dataset: DataSet, root: Path) -> tuple[Path, ...]:
    """Return the files of a data set in the order of its layout; nothing is read yet."""
    if dataset.package is not None:
        return (_packaged(dataset.name, *dataset.package),)
    incomplete: tuple[Path, list[str]] | None = None
    for below, names in dataset.layouts:
        folder = root / below
        found = [_present(folder, spellings) for spellings in names]
        paths = tuple(path for path in found if path is not None)
        if len(paths) == len(names):
            return paths
        if paths and incomplete is None:
            incomplete = folder, [names[0] for names, path in zip(names, found, strict=True) if path is None]
    if not dataset.layouts:
        return ()
    raise _missing(dataset, root, incomplete)


def _missing(dataset: DataSet, root: Path, incomplete: tuple[Path, list[str]] | None) -> UserError:
    get = how_to_get(dataset)
    if incomplete is not None:
        folder, names = incomplete
        remedy = f"; get it with '{get}'" if get else "; add the missing files"
        return UserError(
            f"the data set {dataset.name!r} in {folder} is not complete: {', '.join(names)} missing{remedy}"
        )
    remedy = f"; get it with '{get}', or name" if get else "; name"
    return UserError(
        f"the data set {dataset.name!r} is not in {root}{remedy} a folder that has it with --data-dir or {VARIABLE}"
    )


def _packaged(name: str, package: str, file: str) -> Path:
    """Return a file of an installed package without importing the package."""
    spec = find_spec(package)
    roots = (spec and spec.submodule_search_locations) or []
    path = next((path for path in (Path(root, file) for root in roots) if path.is_file()), None)
    if path is None:
        raise UserError(f"the data set {name!r} comes with {package}, which is not installed; pip install {package}")
    return path


def _present(folder: Path, spellings: tuple[str, ...]) -> Path | None:
    try:
        return next((path for path in (folder / name for name in spellings) if path.is_file()), None)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be read: {error.strerror or error}; make it readable") from None
