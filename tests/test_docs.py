"""The documentation: every command and snippet in it is run, and the site is built without a warning.

Commands run in this process, line by line, each page in a folder of its own. What needs a network or hours is parsed to
its last option instead; the few kinds of that are listed here with their reason.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer

from defedavg.cli import main as cli
from defedavg.config import study as config
from defedavg.experiments import demo

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PARSED_ONLY = {
    "defedavg data fetch": "downloads",
    "defedavg run study.toml --set task.data=hf:": "downloads",
    "defedavg paper table": "hours, and data that must be downloaded",
    "defedavg plan --num-clients 1000000": "minutes",
    "defedavg run study.toml --executor ray": "a cluster; tests/test_cluster.py has one",
    "defedavg run my.toml --executor ray": "a cluster; tests/test_cluster.py has one",
    "defedavg tune study.toml --executor ray": "a cluster; tests/test_cluster.py has one",
    "defedavg deploy local": "processes of Flower; tests/test_deploy_flower.py has them",
    "defedavg replay": "a deployment; tests/test_deploy.py has logs",
    "defedavg runs compare": "two runs; tests/test_runs.py has them",
    "defedavg runs remove": "asks; tests/test_runs.py answers",
    "defedavg theory speedup": "five minutes",
    "defedavg theory --config": "minutes on the default study; tests/test_theory.py runs it",
    "defedavg bench": "half a minute; tests/test_cli.py runs it",
    "defedavg view": "runs until Ctrl-C; tests/test_view.py runs it",
    "defedavg run my.toml --device cuda": "a GPU",
}

SMALL = """
name = "first"
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
target_accuracy = 0.2
"""
"""What a page calls my.toml or study.toml without showing it, so that its commands are cheap."""


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Language, file name and text of every block."""
    for language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        included = re.fullmatch(r'--8<-- "([^"]+)"\n', text)
        if included and ROOT / included[1] in EXAMPLES:
            continue  # it is run as an example
        yield language, title, text


def commands(text: str) -> Iterator[str]:
    """The lines of a block without their comments."""
    for line in text.replace("\\\n", "").splitlines():
        words = re.sub(r"\s+#.*$", "", line).strip()
        if words and not words.startswith("#"):
            yield words


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def parse(words: list[str]) -> None:
    """Check a command down to its last option, without running it."""
    command: Any = typer.main.get_command(cli.app)
    context = command.make_context("defedavg", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not rest:  # a group that does something by itself
            assert command.invoke_without_command
            return
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def run(line: str, page: Path) -> None:
    """Carry out one line of a page."""
    kind, _, rest = line.partition(" ")
    if kind == "make":
        assert re.search(rf"^{rest.split()[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        return
    if kind == "pip":
        for extra in re.findall(r"\[(\w+)\]", rest):
            assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), line
        return
    if kind == "ray":  # it would start a cluster; tests/test_cluster.py does
        assert rest.split()[0] in ("start", "stop"), line
        return
    assert kind == "defedavg", f"{page.name}: {line!r} is none of make, pip, ray, defedavg"
    command, _, file = rest.partition(" > ")
    words = shlex.split(command)
    if line.startswith(tuple(PARSED_ONLY)):
        parse(words)
        return
    with Path(file or os.devnull).open("w", encoding="utf-8") as out, redirect_stdout(out):
        assert cli.app(words, standalone_mode=False) in (None, 0), line
    if file == "my.toml":  # the page has shown how it is made; from here on it is small
        assert len(config.load(file).points()) == 2
        Path(file).write_text(SMALL, encoding="utf-8")


def python(*words: str, **env: str) -> str:
    """Run Python to its end; gives what it printed."""
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=whole, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_and_snippet_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("defedavg.tasks.set_data_dir", lambda folder: None)  # a page's choice must not outlive it
    for name in ("study.toml", "my.toml"):
        (tmp_path / name).write_text(SMALL, encoding="utf-8")
    with inside(tmp_path):
        for language, title, text in blocks(page):
            if language == "bash":
                for line in commands(text):
                    run(line, page)
            elif language == "python":
                if page.name != "README.md":  # tests/test_readme.py runs that one and looks at what it prints
                    python("-c", text)
            elif language == "toml":
                (tmp_path / (title or "untitled.toml")).write_text(text, encoding="utf-8")
                assert config.load(tmp_path / (title or "untitled.toml")).points()
            else:
                assert language in ("", "text"), f"{page.name}: nobody runs {language}"
                assert not re.search(r"^(\$ )?(defedavg|make|pip|python) ", text, re.MULTILINE), f"{page.name}: {text}"


def test_what_is_only_parsed_is_in_the_documentation() -> None:
    shown = [
        line for page in PAGES for language, _, text in blocks(page) if language == "bash" for line in commands(text)
    ]
    for start in PARSED_ONLY:
        assert any(line.startswith(start) for line in shown), start


def test_a_wrong_option_would_be_found() -> None:
    parse(["paper", "table1", "--n", "10"])
    for words in (["paper", "table1", "--nn", "10"], ["paper", "table9"], ["run"], ["data", "fetch"]):
        with pytest.raises(Exception, match=r"No such|Missing"):
            parse(words)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_and_print_a_result(path: Path, tmp_path: Path) -> None:
    with inside(tmp_path):
        printed = python(str(path))
    assert len(printed.splitlines()) >= 2
    best = [float(share) for share in re.findall(r"best ([\d.]+)%", printed)]
    assert all(share > 80 for share in best)
    assert list(tmp_path.iterdir()) == []
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


def test_there_are_four_examples_and_each_is_named_in_the_documentation() -> None:
    assert len(EXAMPLES) == 4
    text = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"examples/{path.name}" in text for path in EXAMPLES)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site is built by `make docs`, with the extra docs")
    with inside(ROOT):
        python("-m", "mkdocs", "build", "-sqd", str(tmp_path / "site"), NO_MKDOCS_2_WARNING="1")
    made = {page.stem for page in (tmp_path / "site").glob("*.html")}
    assert {page.stem for page in PAGES[1:]} <= made
    named = re.findall(r": ([\w-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(page.stem for page in PAGES[1:]), "every page is in the navigation"
    text = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert "Run one algorithm from Python" in text
    for page in (tmp_path / "site").glob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text(encoding="utf-8")
        )
        assert loaded == [], f"{page.name} loads from elsewhere"


def test_the_demo_ends_with_a_table_and_one_line_that_names_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first thing a newcomer sees, with few clients and rounds."""
    small = {"clients": {"num_clients": 20}, "task": {"data": "mnist5k", "model": "softmax"}}
    monkeypatch.setattr(demo, "COMMON", {**demo.COMMON, **small})
    halves = {
        title: config.study({**small, "name": study.name, "algorithms": ["fedavg", "defedavg-iid"],
                             "training": {"updates_per_round": 3, "local_steps": 2},
                             "stop": {"max_rounds": 3, "target_accuracy": 0.9}})
        for title, study in demo.studies().items()
    }  # fmt: skip
    monkeypatch.setattr(demo, "studies", lambda: halves)
    cli.app(["demo", "--out", str(tmp_path)], standalone_mode=False)
    lines = capsys.readouterr().out.strip().splitlines()
    assert "time to 90 %" in " ".join(lines)
    page = tmp_path / "demo" / "report.html"
    assert lines[-1] == f"open in a browser: {page}"
    assert page.read_text(encoding="utf-8").count("</html>") == 1
