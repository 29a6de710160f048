"""The documentation: every command and snippet is run, links resolve, and the site builds without a warning.

Commands run in this process, line by line, each page in its own folder. A command that needs a network or hours is
parsed down to its last option instead; ``PARSED_ONLY`` lists these with the reason.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer

from defedavg.cli import main as cli
from defedavg.config import study as config
from defedavg.config.examples import FIRST
from defedavg.experiments import demo

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
LINKED = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", ROOT / "benchmarks" / "RESULTS.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PARSED_ONLY = {
    "defedavg data fetch": "downloads",
    "defedavg run study.toml --set task.data=hf:": "downloads",
    "defedavg paper table": "hours, and data that must be downloaded",
    "defedavg paper rounds": "a minute; tests/paper runs it for one cell",
    "defedavg paper page": "a page with marks; tests/paper has some",
    "defedavg paper infer": "data that must be downloaded; tests/paper has a search",
    "defedavg plan phones.toml": "half a minute; tests/test_planning_page.py runs these",
    "defedavg plan --num-clients 1000000": "minutes",
    "defedavg plan --num-clients 100000 ": "a minute",
    "defedavg traces convert": "needs a file of another project",
    "defedavg run study.toml --executor ray": "a cluster; tests/experiments/ray has one",
    "defedavg tune study.toml --executor ray": "a cluster; tests/experiments/ray has one",
    "defedavg deploy local": "processes; tests/deploy has them",
    "defedavg replay": "a deployment; tests/deploy has logs",
    "defedavg run slow_": "minutes",
    "defedavg runs compare": "two runs; tests/runstore has them",
    "defedavg runs remove": "asks for confirmation; tests/runstore answers",
    "defedavg suite --quick": "minutes; tests/suite computes smaller cells",
    "defedavg suite run": "hours",
    "defedavg suite check": "needs results; tests/suite has some",
    "defedavg theory speedup": "two minutes",
    "defedavg view": "runs until Ctrl-C; tests/report/dashboard runs it",
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
"""The content of my.toml and study.toml where a page does not show it; small, so that its commands are cheap."""


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Return language, file name and text of every code block."""
    yield from BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(text: str) -> Iterator[str]:
    """Return the lines of a block without their comments."""
    for line in text.replace("\\\n", "").splitlines():
        words = re.sub(r"\s+#.*$", "", line).strip()
        if words and not words.startswith("#"):
            yield words


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Change the working directory within this block."""
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
        if not rest:  # a group that is also a command
            assert command.invoke_without_command
            return
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def run(line: str, page: Path) -> None:
    """Run one command of a page."""
    kind, _, rest = line.partition(" ")
    if kind == "make":
        assert re.search(rf"^{rest.split()[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        return
    if kind == "pip":
        for extra in re.findall(r"\[(\w+)\]", rest):
            assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), line
        return
    if kind == "ray":  # would start a cluster; tests/experiments/ray does
        assert rest.split()[0] in ("start", "stop"), line
        return
    assert kind == "defedavg", f"{page.name}: {line!r} is not a command of make, pip, ray or defedavg"
    command, _, file = rest.partition(" > ")
    words = shlex.split(command)
    if line.startswith(tuple(PARSED_ONLY)):
        parse(words)
        return
    if page.stem == "extending":  # plugins must not register anything in this process
        python("-m", "defedavg", *words)
        return
    with Path(file or os.devnull).open("w", encoding="utf-8") as out, redirect_stdout(out):
        assert cli.app(words, standalone_mode=False) in (None, 0), line
    if file == "my.toml":  # the page has shown how it is made; the following commands use a small one
        assert len(config.load(file).points()) == 6
        Path(file).write_text(SMALL, encoding="utf-8")


def python(*words: str, **env: str) -> str:
    """Run Python, which must succeed without a warning; return what it printed."""
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=whole, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def check_study(file: str, page: Path) -> None:
    """Check that a study of a page is valid."""
    if page.stem == "extending":
        python("-m", "defedavg", "plan", file, "--rounds", "2")
    else:
        assert config.load(file).points()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_and_snippet_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("defedavg.tasks.set_data_dir", lambda folder: None)  # must not affect other tests
    examples = {path.read_text(encoding="utf-8") for path in EXAMPLES}  # another test runs these
    for name in ("study.toml", "my.toml"):
        (tmp_path / name).write_text(SMALL, encoding="utf-8")
    with inside(tmp_path):
        for language, title, text in blocks(page):
            if language == "bash":
                for line in commands(text):
                    run(line, page)
            elif language == "python":
                file = tmp_path / (title or "snippet.py")
                file.write_text(text, encoding="utf-8")
                if page.name != "README.md" and text not in examples:  # tests/test_readme.py runs that of the README
                    python(str(file))
            elif language == "toml":
                (tmp_path / (title or "untitled.toml")).write_text(text, encoding="utf-8")
                check_study(title or "untitled.toml", page)
            else:
                assert language in ("", "text"), f"{page.name}: no test runs {language}"
                assert not re.search(r"^(\$ )?(defedavg|make|pip|python) ", text, re.MULTILINE), f"{page.name}: {text}"


@pytest.mark.parametrize("line", re.findall(r"^\| `(defedavg [^`]+)` \|", PAGES[0].read_text("utf-8"), re.MULTILINE))
def test_every_command_in_the_table_of_the_readme_can_be_parsed(line: str) -> None:
    parse(shlex.split(line)[1:])


def test_the_tour_shows_the_study_that_settings_prints() -> None:
    ((_, _, text),) = [block for block in blocks(ROOT / "docs" / "tour.md") if block[0] == "toml"]
    assert config.study(tomllib.loads(text)) == config.study(FIRST)


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


def test_the_study_of_flights_is_that_of_the_example() -> None:
    shown = {title: text for _, title, text in blocks(ROOT / "docs" / "data.md")}
    assert (ROOT / "examples" / "flights.toml").read_text(encoding="utf-8") == shown["flights.toml"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_and_print_a_result(path: Path, tmp_path: Path) -> None:
    with inside(tmp_path):
        printed = python(str(path))
    assert len(printed.splitlines()) >= 2
    best = [float(share) for share in re.findall(r"best ([\d.]+)%", printed)]
    assert all(share > 80 for share in best)
    assert list(tmp_path.iterdir()) == []
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


def test_every_example_is_named_in_the_documentation() -> None:
    assert len(EXAMPLES) == 6
    text = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"examples/{path.name}" in text for path in EXAMPLES)


@pytest.mark.parametrize(
    ("page", "example"),
    [
        ("algorithm", "own_algorithm"),
        ("own-task", "own_model_and_data"),
        ("own-task", "text_task"),
        ("planning", "what_if"),
    ],
)
def test_the_code_of_a_page_is_that_of_the_example(page: str, example: str) -> None:
    shown = [text for language, _, text in blocks(ROOT / "docs" / f"{page}.md") if language == "python"]
    assert (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8") in shown


def test_the_page_of_measurements_is_that_of_the_benchmarks() -> None:
    text = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    assert text == (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8"), "copy benchmarks/RESULTS.md"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_links_lead_somewhere_on_a_code_host_too(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    assert "--8<--" not in text
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


IDENTICAL = re.compile(
    r"bit[- ]for[- ]bit|(?<!may not be )bit[- ]?(?:identical|exact)|bitwise|identical (?:results|weights|numbers)",
    re.IGNORECASE,
)
"""Claims that two runs give the same bits; they hold under conditions only."""
CONDITIONS = ("device", "precision", "executor", "version")
SCOPE = re.compile(r"#reproducing-numbers|on (?:any|every) device|on the same device|in the same environment")
"""A link to the conditions, or words that say where a claim holds: keyed draws are integers, and equal everywhere."""


def claims(text: str) -> Iterator[str]:
    """Return the paragraphs, list items and table rows that claim identical results without conditions."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) ?)", text):
        words = " ".join(paragraph.split())
        conditional = SCOPE.search(words) or all(condition in words for condition in CONDITIONS)
        if IDENTICAL.search(words) and not conditional:
            yield words


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_a_page_states_the_conditions_of_identical_results(page: Path) -> None:
    assert list(claims(BLOCK.sub("", page.read_text(encoding="utf-8")))) == []


def test_docstrings_and_help_texts_state_the_conditions_of_identical_results() -> None:
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert list(claims(node.value)) == [], path.name


def test_a_claim_without_conditions_would_be_found() -> None:
    text = "Fast.\n\nResults are bit for bit\nthe same.\n- bit-identical [here](files.md#reproducing-numbers)"
    assert list(claims(text)) == ["Results are bit for bit the same."]
    assert list(claims("| a | bit-identical |\n| b | on any device |")) == ["| a | bit-identical |"]
    assert not list(claims("identical results with one device, precision, executor and library version"))


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site is built by `make docs`, with the extra docs")
    with inside(ROOT):
        python("-m", "mkdocs", "build", "-sqd", str(tmp_path / "site"), NO_MKDOCS_2_WARNING="1")
    made = {page.stem for page in (tmp_path / "site").glob("*.html")}
    assert {page.stem for page in DOCS} <= made
    named = re.findall(r": ([\w-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(page.stem for page in DOCS), "every page is in the navigation"
    text = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert "make_simulator" in text
    assert (tmp_path / "site" / "search" / "search_index.json").exists()
    for page in (tmp_path / "site").glob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text(encoding="utf-8")
        )
        assert loaded == [], f"{page.name} loads from another server"


def test_the_demo_ends_with_a_table_and_one_line_that_names_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo is the first command that a newcomer runs; here with few clients and rounds."""
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
    assert not list(tmp_path.rglob("*.png"))
    cli.app(["demo", "--out", str(tmp_path), "--plots"], standalone_mode=False)
    picture = tmp_path / "demo" / "accuracy.png"
    assert capsys.readouterr().out.strip().splitlines()[-2:] == [f"curves: {picture}", lines[-1]]
    assert picture.read_bytes().startswith(b"\x89PNG")
