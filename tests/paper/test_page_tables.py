"""``defedavg paper page``: which tables it writes again, and what it says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from defedavg.paper import page_tables as page_tables_module
from defedavg.paper.page_tables import page_tables
from defedavg.paper.result_files import ResultFiles
from helpers.command_line import call, refuse

RESULTS = Path(__file__).parents[2] / "results" / "paper"
END = "<!-- end of the table -->"


def test_only_marked_tables_with_stored_results_are_written_again(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "table1", tmp_path / "results" / "table1")
    page = tmp_path / "page.md"
    page.write_text(f"a\n<!-- table: table1 -->\nold\n{END}\nb\n<!-- table: rounds -->\nkept\n{END}\n")
    done = call("paper", "page", page, "--out", "results", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == f"{page}: table1 changed\n"
    assert done.stderr == "rounds keeps its content: its results are not stored in results\n"
    table = (RESULTS / "table1" / "table1.md").read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8") == (
        f"a\n<!-- table: table1 -->\n\n{table}\n{END}\nb\n<!-- table: rounds -->\nkept\n{END}\n"
    )
    assert call("paper", "page", page, "--out", "results", cwd=tmp_path).stdout == f"{page}: no table changed\n"


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("| a |\n")
    refuse(call("paper", "page", "page.md", cwd=tmp_path), "page.md has no marked table; `defedavg paper page --help`")


@pytest.mark.parametrize("words", [(), ("nosuch.md",)])
def test_a_page_that_does_not_exist_is_one_line_with_a_remedy(tmp_path: Path, words: tuple[str, ...]) -> None:
    missing = words[0] if words else "docs/reproduction.md"
    line = f"there is no page {missing}; name one, as in `defedavg paper page FILE`"
    refuse(call("paper", "page", *words, cwd=tmp_path), line)
    refuse(call("paper", "page", ".", cwd=tmp_path), ". is a folder; name a file, such as reproduction.md")


def test_a_damaged_search_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "infer").mkdir()
    (tmp_path / "infer" / "infer.json").write_text('{"stages": 3}')
    (tmp_path / "page.md").write_text(f"<!-- table: search -->\n{END}\n")
    refuse(call("paper", "page", "page.md", "--out", tmp_path, cwd=tmp_path), "is not the outcome of a search")


def test_a_folder_without_results_has_no_tables(tmp_path: Path) -> None:
    assert page_tables(tmp_path) == {}


def test_a_search_that_missed_the_target_has_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResultFiles, "results", lambda *_: [{"first_hit_seconds": None}])
    first, *_ = page_tables_module._scalings(tmp_path).splitlines()[2:]
    assert first.startswith("| iid | fedavg |  | not reached | ")
