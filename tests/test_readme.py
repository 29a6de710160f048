"""The README, CONTRIBUTING.md and the package metadata are correct."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import defedavg
from defedavg.config import study as config

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = TEXT.partition("## ")[0]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_python_example_runs(tmp_path: Path) -> None:
    (code,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    accuracy, seconds, digest = done.stdout.split()
    assert float(accuracy) > 0.8
    assert float(seconds) > 0
    assert len(digest) == 64


def test_the_study_is_valid() -> None:
    (text,) = blocks("toml")
    assert len(config.study(tomllib.loads(text)).points()) == 6


def test_the_first_screen_has_two_commands_and_one_picture() -> None:
    assert len(FIRST_SCREEN.splitlines()) < 35
    assert [line.split()[:2] for line in blocks("bash")[0].splitlines()] == [["make", "demo"], ["make", "test"]]
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", FIRST_SCREEN)
    assert (ROOT / picture).exists()


def test_the_figures_of_the_first_screen_are_those_that_were_measured() -> None:
    planned = [float(seconds) for seconds in re.findall(r"^\S+ +([\d.]+) s ", RESULTS, re.MULTILINE)]
    assert len(planned) == 6
    assert max(planned) <= 0.25
    assert "400 rounds of 100 clients in at most a quarter of a second" in re.sub(r"\s+", " ", FIRST_SCREEN)
    row = r"^\| the paper's CNN, 1×28×28, `--updates 6000` \| ([\d.]+) \| ([\d,]+, [\d,]+, \*\*[\d,]+\*\*) \| (\d+) \|"
    ((loop, turns, ratio),) = re.findall(row, RESULTS, re.MULTILINE)
    updates = sorted(int(each.replace(",", "")) for each in re.findall(r"\d,\d{3}", turns))
    batched = re.findall(r"\*\*(.+)\*\*", turns)[0]
    assert updates[1] == int(batched.replace(",", ""))
    assert abs(updates[1] / float(loop) - int(ratio)) < 2  # the row rounds the plain loop to a decimal
    assert loop in FIRST_SCREEN
    assert batched in FIRST_SCREEN
    assert int(re.findall(r"over (\d+) times faster", FIRST_SCREEN)[0]) < int(ratio)


def test_the_reading_order_names_existing_files_and_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    order = text.partition("## Reading order")[2].partition("\n## ")[0]
    source = ROOT / "src" / "defedavg"
    for step in re.split(r"^\d+\. ", order, flags=re.MULTILINE)[1:]:
        folders = [ROOT / name for name in re.findall(r"`(src/defedavg/[\w/]+/)`", step)]
        assert folders
        for name in re.findall(r"`(\w+\.py|\w+/)`", step.partition("\n\n")[0]):
            assert any((folder / name).exists() for folder in folders), name
    packages = {path.parent.name for path in source.glob("*/__init__.py")}
    assert packages == set(re.findall(r"`src/defedavg/(\w+)/`", order))
    assert all((ROOT / name).exists() for name in re.findall(r"`(src/defedavg/[\w/.]+)`", text))


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "defedavg.__version__"}
    assert re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE) == [
        defedavg.__version__
    ]
    first = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert first == defedavg.__version__


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in extras if name != "hub" for line in extras[name])]
    names = {re.split(r"[\[<>=;~ ]", line)[0].lower() for line in wanted} - {"defedavg"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert names <= {line.split("==")[0].lower() for line in lines}
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)


@pytest.mark.parametrize("pattern", ["*.js", "*.css", "*.html", "*.txt", "py.typed"])
def test_package_data_covers_every_file_that_is_not_python(pattern: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    source = ROOT / "src" / "defedavg"
    covered = {p for glob in project["tool"]["setuptools"]["package-data"]["defedavg"] for p in source.glob(glob)}
    found = set(source.rglob(pattern))
    assert found
    assert found <= covered
