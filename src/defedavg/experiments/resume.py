"""Taking up a study that was broken off: what is kept of it now and then, and what must be as it was to go on.

Bits are the same only if all that they depend on is the same. What a user chose is refused if it is another now
(executor, device, precision); the number of threads and the width of batches are taken over; what cannot be changed
here (hardware, versions of libraries) is said in one line.
"""

from __future__ import annotations

import json
import platform
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config.study import Study
from ..errors import UserError
from ..fileio import read_text
from ..training import Evaluation, RunState
from .checkpoints import CheckpointDir
from .journal import JournalPosition
from .sweep import ComputeConfig, Sweep

EVERY = 60.0  # real seconds
SHARE = 0.05  # of the time may go into checkpoints, unless a user says how often

CHOSEN = ("executor", "device", "precision")


def environment(means: ComputeConfig) -> dict[str, Any]:
    """All that bits depend on besides the study."""
    if means.device == "cuda":
        hardware = torch.cuda.get_device_name()
    else:
        hardware = f"{_processor()} ({torch.backends.cpu.get_cpu_capability()})"
    return {
        "executor": means.executor,
        "device": means.device,
        "precision": means.precision,
        "threads": torch.get_num_threads(),
        "hardware": hardware,
        "torch": torch.__version__,
        "defedavg": __version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def differences(old: str, new: str) -> list[str]:
    """What two studies, written as TOML, do not share: "table.key: old → new"."""
    before, now = (dict(_flat(tomllib.loads(text))) for text in (old, new))
    names = dict.fromkeys([*before, *now])
    return [
        f"{name}: {before.get(name, 'not there')} → {now.get(name, 'not there')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _flat(tables: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in tables.items():
        found += _flat(value, f"{above}{name}.") if isinstance(value, dict) else [(above + name, value)]
    return found


def check_study(folder: Path, old: str, study: Study) -> None:
    """Refuse to go on with another study than was begun."""
    try:
        found = differences(old, study.to_toml())
    except ValueError:
        raise UserError(f"{folder / 'config.toml'} cannot be read; begin anew with --force") from None
    if found:
        shown = "; ".join(found[:5]) + ("; …" if len(found) > 5 else "")
        raise UserError(f"{folder} was begun with another study ({shown}); use its settings, or another name")


def check_environment(folder: Path, before: Mapping[str, Any], means: ComputeConfig) -> list[str]:
    """Make things as they were, refuse what a user must mend, and say what cannot be mended."""
    now = environment(means)
    other = [f"--{name} {before.get(name)}" for name in CHOSEN if before.get(name) != now[name]]
    if other:
        raise UserError(f"{folder} was begun with {' '.join(other)}; give the same, or use another name")
    notes = []
    threads = before.get("threads")
    if isinstance(threads, int) and 0 < threads <= 4096 and threads != now["threads"]:
        torch.set_num_threads(threads)
        notes.append(f"computing with {threads} threads, as it was begun")
    changed = [
        f"{name}: {before.get(name)} → {now[name]}"
        for name in ("hardware", "torch", "defedavg")
        if before.get(name) != now[name]
    ]
    if changed:
        notes.append(f"the last bits may differ from an unbroken run ({'; '.join(changed)})")
    return notes


@dataclass(frozen=True)
class SavedSession:
    """How an earlier sitting ended."""

    mark: JournalPosition  # in the metrics
    entries: list[dict[str, Any]]  # of the runs that are over
    open: dict[int, RunState]  # of those under way, by their number in the study
    fit: tuple[int, int] | None


def load(
    folder: Path, shelf: CheckpointDir, study: Study, means: ComputeConfig
) -> tuple[SavedSession | None, list[str]]:
    """The newest sitting that is whole, and what a user should know; None if nothing was kept."""
    found = shelf.newest()
    notes = [f"{path.name} is damaged ({why}); the one before is used" for path, why in shelf.damaged.items()]
    if found is None:
        return None, notes
    state, tensors = found
    try:
        check_study(folder, state["study"], study)
        notes += check_environment(folder, state["circumstances"], means)
        standings = {}
        for entry in state["open"]:
            number = int(entry["number"])
            own = {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith(f"{number}/")}
            standings[number] = RunState.from_json(entry, own)
        fit = state["fit"] and (int(state["fit"][0]), int(state["fit"][1]))
        return SavedSession(JournalPosition(**state["metrics"]), list(state["entries"]), standings, fit), notes
    except (KeyError, TypeError, ValueError, IndexError):
        raise UserError(f"the checkpoint in {folder} cannot be understood; begin anew with --force") from None


def finished_entries(summary: Path) -> list[dict[str, Any]] | None:
    """The runs of a study that is finished; None if it is not."""
    try:
        known = json.loads(read_text(summary)) if summary.exists() else {}
        return [dict(entry) for entry in known["runs"]] if known.get("finished") is True else None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{summary} cannot be understood; begin anew with --force") from None


class CheckpointWriter:
    """Keeps where a study stands, every so many real seconds."""

    def __init__(self, shelf: CheckpointDir, study: Study, every: float | None) -> None:
        if every is not None and not every >= 0:
            raise UserError(f"--checkpoint-every is {every}; it must be zero or more seconds")
        self._shelf = shelf
        self._study = study
        self._every = every
        self._last = time.monotonic()
        self._cost = 0.0

    @property
    def due(self) -> bool:
        """Whether the time has come."""
        wait = max(EVERY, self._cost / SHARE) if self._every is None else self._every
        return time.monotonic() - self._last >= wait

    def keep(
        self, sweep: Sweep, numbers: Mapping[Any, int], mark: JournalPosition, entries: Sequence[Mapping[str, Any]]
    ) -> None:
        """Save now."""
        began = time.monotonic()
        standings = {numbers[item]: standing for item, standing in sweep.standings().items()}
        state = {
            "study": self._study.to_toml(),
            "circumstances": environment(sweep.means),
            "metrics": asdict(mark),
            "entries": list(entries),
            "open": [{"number": number, **standing.to_json()} for number, standing in standings.items()],
            "fit": sweep.fit,
        }
        tensors = {
            f"{number}/{name}": tensor for number, standing in standings.items() for name, tensor in standing.tensors()
        }
        self._shelf.save(state, tensors)
        self._last = time.monotonic()
        self._cost = self._last - began


def evaluation(line: Mapping[str, Any]) -> Evaluation:
    """A measurement, read back from its line in the metrics; what was no number is none again."""
    nan = float("nan")
    values = {name: line[name] for name in Evaluation.__dataclass_fields__}
    return Evaluation(**{**values, "loss": nan if values["loss"] is None else values["loss"]})
