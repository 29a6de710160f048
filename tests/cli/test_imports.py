"""What the commands load: the large packages only where a command needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = {"torch", "matplotlib", "pandas", "scipy", "pyarrow", "plotly", "flwr", "grpc", "ray", "asyncio"}

LIGHT = """
import sys
from contextlib import redirect_stdout
from io import StringIO
from defedavg.cli.main import app
for words in {commands!r}:
    with redirect_stdout(StringIO()):
        try:
            app(words, standalone_mode=False)
        except SystemExit:
            pass
    print(words, sorted({heavy!r} & set(sys.modules)))
"""

TRAINING = """
import sys
from contextlib import nullcontext
from defedavg.cli import options
from defedavg.cli.main import app
seen = []
options.working = lambda message: seen.append((message, "torch" in sys.modules)) or nullcontext()
app(["run", "study.toml", "--json"], standalone_mode=False)
print(seen[0], sorted({heavy!r} & set(sys.modules)), file=sys.stderr)
"""

STUDY = """
name = "small"
algorithms = ["fedavg"]
task.data = "mnist5k"
task.model = "softmax"
task.normalise = "unit"
clients.num_clients = 4
training.updates_per_round = 2
training.local_steps = 1
stop.max_rounds = 1
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_commands_that_do_not_train_load_no_large_package(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "runs").mkdir()
    commands = [
        ["--help"],
        ["run", "--help"],
        ["settings"],
        ["algorithms"],
        ["plan", "study.toml"],
        ["runs", "list"],
        ["data", "list"],
    ]
    done = run(LIGHT.format(commands=commands, heavy=HEAVY), tmp_path)
    assert done.stdout.splitlines() == [f"{words} []" for words in commands]


def test_a_run_shows_its_first_line_before_it_loads_pytorch_and_draws_nothing(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    done = run(TRAINING.format(heavy=HEAVY - {"asyncio"}), tmp_path)  # PyTorch imports asyncio
    first, _, loaded = done.stderr.splitlines()[-1].partition(") ")
    assert first == "('preparing …', False"
    assert set(loaded.strip("[]").replace("'", "").split(", ")) <= {"torch", "pyarrow"}
    assert (tmp_path / "runs" / "small" / "report.html").exists()
