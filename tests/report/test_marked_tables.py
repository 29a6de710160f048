"""Marked tables of a page: which are replaced, and which names a page has."""

from __future__ import annotations

from defedavg.report.marked_tables import markdown_table, marked_names, with_tables


def test_only_marked_tables_are_replaced() -> None:
    end = "<!-- end of the table -->"
    page = f"a\n<!-- table: order -->\nold\n{end}\nb\n<!-- table: other -->\nkept\n{end}\n"
    made = with_tables(page, {"order": r"| \1 |" + "\n", "unused": "x"})
    assert made.startswith("a\n<!-- table: order -->\n\n| \\1 |\n\n<!-- end of the table -->\nb\n")
    assert "kept" in made
    assert marked_names(made) == ["order", "other"]
    assert with_tables(made, {"order": r"| \1 |" + "\n"}) == made


def test_a_table_has_its_rows_and_columns_whatever_the_cells_contain() -> None:
    assert markdown_table(("a", "b"), [("1", "x|y"), ("2", "two\nlines")]) == (
        "| a | b |\n|---|---|\n| 1 | x\\|y |\n| 2 | two lines |\n"
    )
