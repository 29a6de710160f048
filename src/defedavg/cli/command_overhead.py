"""The time of a command beyond its computing: what a user waits for a tiny study besides training and PyTorch.

A fresh process trains a study of five algorithms for five rounds, and another one imports PyTorch, in turn. The runs
share batches, so the longest run is the time of training.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import UserError

STUDY = """\
name = "tiny"
algorithms = ["fedavg", "fedbuff", "favano", "defedavg-iid", "defedavg-niid"]
[task]
data = "mnist5k"
model = "mlp"
split = "classes"
[clients]
num_clients = 20
[training]
updates_per_round = 5
local_steps = 5
[stop]
max_rounds = 5
"""
LOAD = ("-c", "import torch")


@dataclass(frozen=True, slots=True)
class CommandTimes:
    """Real seconds of a command, of its training, and of importing PyTorch in another process."""

    command: float
    training: float
    torch: float

    @property
    def overhead(self) -> float:
        """The command without training and without importing PyTorch."""
        return self.command - self.training - self.torch


def overhead_seconds(device: str, repeats: int) -> float:
    """Return the median overhead of a tiny study; one more run comes first, which may have to cache the data set."""
    with TemporaryDirectory() as folder:
        times = [measure(Path(folder), device) for _ in range(repeats + 1)]
    return statistics.median(each.overhead for each in times[1:])


def measure(folder: Path, device: str, environment: Mapping[str, str] | None = None) -> CommandTimes:
    """Run the study in a folder once, and import PyTorch once, each in a fresh process."""
    file = folder / "tiny.toml"
    file.write_text(STUDY, encoding="utf-8")
    words = ("run", str(file), "--out", str(folder / "runs"), "--force", "--device", device, "--json")
    command, printed = _timed(("-m", "defedavg", *words), environment)
    torch, _ = _timed(LOAD, environment)
    return CommandTimes(command, max(run["wall_seconds"] for run in json.loads(printed)), torch)


def _timed(words: Sequence[str], environment: Mapping[str, str] | None) -> tuple[float, str]:
    env = {**os.environ, **(environment or {})}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=env)
    spent = time.perf_counter() - start
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1].removeprefix("defedavg: ")
        raise UserError(f"the overhead of a command cannot be measured: {reason}")
    return spent, done.stdout
