"""Checkpoints of a study: what is saved, when, and what must be unchanged to resume it.

    checkpoints/000042.safetensors
        header   format, format_version, sha256, and state: everything except tensors, as JSON
        tensors  versions and updates of the runs in progress

Loading a checkpoint executes nothing. The checksum covers the state and the name, type, shape and bytes of every
tensor. The newest two checkpoints are kept; if the newest is damaged, the other is used.

Results are bit-identical only in the same environment. A resumed study refuses another executor, device or precision;
it restores the number of threads and the batch limits; it reports other hardware or library versions in one line.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..config.study import Study, stored_study
from ..errors import UserError, first_line
from ..fileio import open_regular, replacing, writing
from ..jsonio import is_count, is_whole
from ..plugins import plugin_hashes
from ..runstore.journal import JournalPosition
from ..runstore.provenance import processor_name
from ..training import RunState
from .compute import ComputeConfig

FORMAT = "defedavg-checkpoint"
FORMAT_VERSION = 1
SUFFIX = ".safetensors"
KEPT = 2

INTERVAL = 60.0  # real seconds between checkpoints
MAX_SHARE = 0.05  # of the real time may go into checkpoints, unless the user sets the interval


class DamagedError(Exception):
    """A checkpoint file differs from what was written."""


def _digest(state: str, tensors: Mapping[str, Tensor]) -> str:
    digest = sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_checkpoint(path: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint atomically; a failure raises ``UserError`` and leaves the old file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    copies: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        # A state vector can be the same tensor as a version or another state vector, which the format refuses.
        copies[name] = copy.clone() if copy.data_ptr() in places else copy
        places.add(copy.data_ptr())
    text = json.dumps(state, allow_nan=False)
    header = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "sha256": _digest(text, copies), "state": text}
    with writing(path):
        try:
            with replacing(path) as scratch:
                save_file(copies, scratch, header)
        except SafetensorError as error:
            raise UserError(f"{path} cannot be written: {first_line(error)}") from None


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state and the tensors; raise ``DamagedError`` if they are not what was written."""
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()  # a pipe would wait forever
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise DamagedError("it is not a checkpoint")
            _check_version(path, header.get("format_version", ""))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise DamagedError(first_line(error)) from None
    if _digest(header.get("state", ""), tensors) != header.get("sha256"):
        raise DamagedError("its checksum is wrong")
    try:
        state = json.loads(header["state"])
    except (ValueError, KeyError, RecursionError):
        raise DamagedError("the state is not JSON") from None
    if not isinstance(state, dict):
        raise DamagedError("the state is not a JSON object")
    return state, tensors


def _check_version(path: Path, text: str) -> None:
    if not text.isdecimal():
        raise DamagedError(f"its format version is {text[:20]!r}")
    if int(text) > FORMAT_VERSION:
        raise UserError(
            f"the checkpoint {path} has format version {int(text)}, but this program reads up to {FORMAT_VERSION}; "
            "update defedavg"
        )


class CheckpointDir:
    """The numbered checkpoints of a run folder; the newest few are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: dict[Path, str] = {}  # with the reason

    def paths(self) -> list[Path]:
        """Return the checkpoint files, newest first."""
        files = [path for path in self.folder.glob(f"*{SUFFIX}") if path.stem.isdecimal()]
        return sorted(files, key=lambda path: int(path.stem), reverse=True)

    def newest(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the newest undamaged checkpoint; None if there are no checkpoints."""
        for path in self.paths():
            try:
                return read_checkpoint(path)
            except DamagedError as reason:
                self.damaged[path] = str(reason)
        if self.damaged:
            path, why = next(iter(self.damaged.items()))
            raise UserError(f"no checkpoint can be used ({path}: {why}); start again with --force")
        return None

    def save(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the next checkpoint and remove old and damaged ones."""
        present = self.paths()
        index = int(present[0].stem) + 1 if present else 1
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        write_checkpoint(self.folder / f"{index:06d}{SUFFIX}", state, tensors)
        good = [path for path in present if path not in self.damaged]
        self._remove([*self.damaged, *good[KEPT - 1 :], *self._incomplete()])

    def clear(self) -> None:
        """Remove all checkpoints: the runs have ended."""
        self._remove([*self.paths(), *self._incomplete()])
        with suppress(OSError):
            self.folder.rmdir()

    def _incomplete(self) -> list[Path]:
        """Return files that a killed process was writing; safetensors has scratch names of its own."""
        return [path for path in self.folder.glob("*") if path.suffix == ".part" or path.name.startswith(".tmp")]

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            with suppress(OSError):  # a file that cannot be removed does no harm
                path.unlink()


# The environment and the study must be those of the first session.


def environment(compute: ComputeConfig, python_files: Sequence[str] = ()) -> dict[str, Any]:
    """Return the environment: all that the bits of results depend on, besides the settings."""
    if compute.device == "cuda":
        hardware = torch.cuda.get_device_name()
    else:
        hardware = f"{processor_name()} ({torch.backends.cpu.get_cpu_capability()})"
    return {
        "executor": compute.executor,
        "device": compute.device,
        "precision": compute.precision,
        "threads": torch.get_num_threads(),
        "hardware": hardware,
        "torch": torch.__version__,
        "defedavg": __version__,
        "python_files": plugin_hashes(python_files),
    }


def check_environment(folder: Path, before: Mapping[str, Any], compute: ComputeConfig, study: Study) -> list[str]:
    """Restore the number of threads, refuse what the user must change, and return notes about the rest."""
    now = environment(compute, study.python_files())
    if chosen := other_options(before, now):
        raise UserError(f"{folder} was started with {chosen}; give the same options, or use another name")
    for path, digest in now["python_files"].items():
        if before.get("python_files", {}).get(path) != digest:
            raise UserError(f"{path} has changed since {folder} was started; restore it, or start again with --force")
    notes = []
    threads = before.get("threads")
    if isinstance(threads, int) and 0 < threads <= 4096 and threads != now["threads"]:
        torch.set_num_threads(threads)
        notes.append(f"computing with {threads} threads, as in the first session")
    return notes + changed_hardware(before, now)


def other_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the options of an earlier session if they differ from those of this one; empty if they do not."""
    names = ("executor", "device", "precision")
    same = all(before.get(name) == now[name] for name in names)
    return "" if same else " ".join(f"--{name} {before.get(name)}" for name in names)


def changed_hardware(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a note if hardware or versions have changed, with which results may differ in the last bits."""
    changed = [
        f"{name}: {before.get(name)} → {now[name]}"
        for name in ("hardware", "torch", "defedavg")
        if before.get(name) != now[name]
    ]
    return [f"results may differ in the last bits from an uninterrupted run ({'; '.join(changed)})"] if changed else []


def check_study(folder: Path, old: str, study: Study) -> None:
    """Raise ``UserError`` if a study, as TOML, is not the one in the folder."""
    try:
        stored = stored_study(tomllib.loads(old), folder=folder)
    except (ValueError, UserError):
        raise UserError(f"{folder / 'config.toml'} cannot be read; start again with --force") from None
    before, now = (dict(_flat(tomllib.loads(each.to_toml()))) for each in (stored, study))
    differences = [
        f"{name}: {before.get(name, 'not set')} → {now.get(name, 'not set')}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    if differences:
        shown = "; ".join(differences[:5]) + ("; …" if len(differences) > 5 else "")
        raise UserError(f"{folder} was started with another study ({shown}); use its settings, or another name")


def _flat(tables: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    flat = []
    for name, value in tables.items():
        flat += _flat(value, f"{above}{name}.") if isinstance(value, dict) else [(above + name, value)]
    return flat


# The record.


@dataclass(frozen=True)
class SavedSession:
    """The state of a study at a checkpoint; the default is a study that has not started.

    ``runs`` are the runs in progress by their position in the study, ``batch_limits`` those of their sweep. ``search``
    is the state of a search for rates; None for a study.
    """

    metrics: JournalPosition = field(default_factory=JournalPosition)
    entries: Sequence[Mapping[str, Any]] = ()
    runs: Mapping[int, RunState] = field(default_factory=dict)
    batch_limits: Sequence[int] | None = None
    search: Mapping[str, Any] | None = None

    def save(self, directory: CheckpointDir, study: Study, compute: ComputeConfig) -> None:
        """Write a checkpoint."""
        state = {
            "study": study.to_toml(),
            "circumstances": environment(compute, study.python_files()),
            "metrics": asdict(self.metrics),
            "entries": list(self.entries),
            "open": [{"number": position, **run.to_json()} for position, run in self.runs.items()],
            "fit": self.batch_limits,
            **({} if self.search is None else {"search": self.search}),
        }
        tensors = {f"{at}/{name}": tensor for at, run in self.runs.items() for name, tensor in run.tensors()}
        directory.save(state, tensors)

    @classmethod
    def load(
        cls, directory: CheckpointDir, study: Study, compute: ComputeConfig
    ) -> tuple[SavedSession | None, list[str]]:
        """Return the newest undamaged session and notes for the user; None if there is no checkpoint."""
        folder = directory.folder.parent
        newest = directory.newest()
        notes = [f"{path.name} is damaged ({why}); the one before is used" for path, why in directory.damaged.items()]
        if newest is None:
            return None, notes
        state, tensors = newest
        try:
            check_study(folder, state["study"], study)
            notes += check_environment(folder, state["circumstances"], compute, study)
            runs = {}
            for record in state["open"]:
                position = int(record["number"])
                prefix = f"{position}/"
                own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
                runs[position] = RunState.from_json(record, own)
            limits = None if state["fit"] is None else tuple(map(_limit, state["fit"]))
            metrics, entries = _position(**state["metrics"]), list(state["entries"])
            return cls(metrics, entries, runs, limits, state.get("search")), notes
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError):
            raise UserError(f"the checkpoint in {folder} is not valid; start again with --force") from None


def _position(size: Any, sha256: Any) -> JournalPosition:
    if not is_count(size):
        raise ValueError("not a size")
    return JournalPosition(size, sha256)


def _limit(stored: Any) -> int:
    if not is_whole(stored) or stored < 1:
        raise ValueError("not a limit of a batch")
    return int(stored)


class CheckpointInterval:
    """Says when a checkpoint is due: after a number of real seconds.

    None: a minute, or more if checkpoints would take more than a twentieth of the time.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._last = time.monotonic()
        self._cost = 0.0

    @property
    def due(self) -> bool:
        """Whether the interval has passed."""
        interval = max(INTERVAL, self._cost / MAX_SHARE) if self._seconds is None else self._seconds
        return time.monotonic() - self._last >= interval

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long a checkpoint takes; the next interval begins afterwards."""
        began = time.monotonic()
        yield
        self._last = time.monotonic()
        self._cost = self._last - began


class CheckpointWriter:
    """Writes a checkpoint whenever its interval has passed."""

    def __init__(self, directory: CheckpointDir, study: Study, interval: float | None) -> None:
        if interval is not None and not interval >= 0:
            raise UserError(f"--checkpoint-every is {interval}; it must be zero or more seconds")
        self._directory = directory
        self._study = study
        self._interval = CheckpointInterval(interval)

    @property
    def due(self) -> bool:
        """Whether the interval has passed."""
        return self._interval.due

    def save(self, session: Callable[[], SavedSession], compute: ComputeConfig) -> None:
        """Write a checkpoint of a session, which is collected now."""
        with self._interval.saving():
            session().save(self._directory, self._study, compute)
