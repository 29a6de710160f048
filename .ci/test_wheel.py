"""Build the wheel, install it into an empty environment away from the source tree, and use it there.

Run by `make test-wheel`. It fails if a file of the source tree is missing from the wheel, if a dependency is not
declared, or if a command depends on the source tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUDY = """
name = "wheel"
algorithms = ["fedavg", "defedavg-niid"]
[task]
model = "softmax"
[clients]
num_clients = 20
[training]
updates_per_round = 3
local_steps = 2
[stop]
max_rounds = 3
"""
HELP_OF_EVERY_COMMAND = """
import sys
import click
import typer
from typer.testing import CliRunner
import defedavg
from defedavg.cli.main import app

assert sys.prefix in defedavg.__file__, f"{defedavg.__file__} is not the installed package"


def paths(command, path=()):
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from paths(command.get_command(context, name), (*path, name))


count = 0
for path in paths(typer.main.get_command(app)):
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output, (path, result.output)
    count += 1
assert count > 20, count
print(count, "help pages")
"""


def run(*words: str | Path, folder: Path) -> str:
    """Run a command that must succeed without the source tree on its path; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    started = time.monotonic()
    done = subprocess.run([str(word) for word in words], cwd=folder, env=environment, capture_output=True, text=True)
    shown = " ".join([Path(words[0]).name, *map(str, words[1:4])]).splitlines()[0]
    print(f"{time.monotonic() - started:6.1f} s  {shown[:90]}", flush=True)
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def tracked_files() -> list[str]:
    """Return the files under version control that exist, relative to the root of the repository."""
    return [name for name in run("git", "ls-files", folder=ROOT).splitlines() if (ROOT / name).is_file()]


def copy_source(target: Path) -> Path:
    """Copy the tracked files, so that neither `build/` nor untracked files can enter the wheel."""
    for name in tracked_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    return target


def check_contents(wheel: Path) -> None:
    """Refuse a wheel that lacks a file of the package or its licence."""
    names = set(zipfile.ZipFile(wheel).namelist())
    package = [name.removeprefix("src/") for name in tracked_files() if name.startswith("src/defedavg/")]
    missing = [name for name in package if name not in names]
    if missing or not any(name.endswith("licenses/LICENSE") for name in names):
        raise SystemExit(f"missing from {wheel.name}: {missing or 'LICENSE'}; see [tool.setuptools] in pyproject.toml")


def main() -> None:
    """Build, install and use the wheel."""
    with tempfile.TemporaryDirectory(prefix="defedavg-wheel-") as scratch:
        folder = Path(scratch)
        source = copy_source(folder / "source")
        run(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", source, folder=folder)
        (wheel,) = (folder / "dist").glob("*.whl")
        check_contents(wheel)
        run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
        python, defedavg = folder / "venv/bin/python", folder / "venv/bin/defedavg"
        run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, folder=folder)
        work = folder / "work"
        work.mkdir()
        (work / "study.toml").write_text(STUDY, encoding="utf-8")
        print(run(python, "-c", HELP_OF_EVERY_COMMAND, folder=work).strip())
        run(defedavg, "plan", "study.toml", "--rounds", "5", folder=work)
        run(defedavg, "run", "study.toml", folder=work)
        run(defedavg, "report", "runs/wheel", "-o", "page.html", folder=work)
        for page in (work / "page.html", work / "runs/wheel/report.html"):
            text = page.read_text(encoding="utf-8")
            if "Plotly" not in text or not text.rstrip().endswith("</html>"):
                raise SystemExit(f"{page.name} is not a complete page")
        if "wheel" not in run(defedavg, "runs", "list", folder=work):
            raise SystemExit("`defedavg runs list` does not list the run")
        print(f"{wheel.name} works alone")


if __name__ == "__main__":
    main()
