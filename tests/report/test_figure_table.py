"""``defedavg runs table``: every figure against values computed by hand, in every format."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from defedavg.report.figure_columns import COLUMNS
from defedavg.report.figure_table import figure_rows, latex_text, to_latex
from defedavg.runstore.reader import read_run
from helpers.command_line import call, refuse
from helpers.run_folders import metrics_line

FIGURES = {
    "status": "target", "target_accuracy": 0.8, "diverged_at": None, "rounds": 20, "seconds": 8.0,
    "updates_trained": 200, "updates_started": 210, "staleness_mean": 1.5, "uplink_bytes": 4.4e6,
    "downlink_bytes": 8.8e6, "wall_seconds": 3.0, "swept": {},
}  # fmt: skip


def make_run(root: Path, name: str, entries: list[dict[str, Any]], finished: bool = True) -> Path:
    """Write a run folder with these results; every run is evaluated at rounds 0, 10 and 20."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'name = "{name}"\nalgorithms = ["fedavg", "asysg"]\n')
    whole = [{"algorithm": entry["label"].split()[0], **FIGURES, **entry} for entry in entries]
    summary = {"name": name, "finished": finished, "provenance": {}, "runs": whole}
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "metrics.jsonl").open("w") as out:
        for entry in whole:
            accuracies = (0.1, 0.5, 0.9) if entry["first_hit_seconds"] else (0.1, 0.5, 0.6)
            for round_, seconds, accuracy in zip((0, 10, 20), (0.0, 2.0, 4.0), accuracies, strict=True):
                seconds = entry["first_hit_seconds"] if round_ == 20 and entry["first_hit_seconds"] else seconds
                out.write(metrics_line(entry["algorithm"], entry["label"], entry["seed"], round_, seconds, accuracy))
    return folder


def seed(number: int, hit: float | None, best: float, label: str = "fedavg", **more: Any) -> dict[str, Any]:
    return {
        "label": label,
        "seed": number,
        "first_hit_seconds": hit,
        "best_accuracy": best,
        "final_accuracy": best,
    } | more


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run with four settings: all seeds hit, some, none, and one seed alone."""
    entries = [
        seed(0, 4.0, 0.80), seed(1, 5.0, 0.82), seed(2, 6.0, 0.87),
        *(seed(i, hit, 0.7, "asysg n=1") for i, hit in enumerate((2.5, None, 3.5, None, 3.0))),
        *(seed(i, None, 0.5, "asysg n=2", status="max_rounds") for i in range(5)),
        seed(0, 3.25, 0.81, "asysg n=3"),
    ]  # fmt: skip
    make_run(tmp_path / "runs", "one", entries)
    return tmp_path


def table(runs: Path) -> dict[str, dict[str, str]]:
    """Return the CSV of the run by label."""
    result = call("runs", "table", "one", "--csv", cwd=runs)
    assert result.returncode == 0, result.stderr
    return {row["label"]: row for row in csv.DictReader(io.StringIO(result.stdout))}


def figure(row: dict[str, str], name: str) -> tuple[Any, Any, int]:
    mean, sd, count = (row[f"{name}_{part}"] for part in ("mean", "sd", "n"))
    return float(mean) if mean else None, float(sd) if sd else None, int(count)


def test_the_figures_are_those_computed_by_hand(runs: Path) -> None:
    rows = table(runs)
    assert list(rows) == ["fedavg", "asysg n=1", "asysg n=2", "asysg n=3"]
    every = rows["fedavg"]
    assert (every["seeds"], every["reached"]) == ("3", "3")
    assert figure(every, "time_to_target_s") == (5.0, 1.0, 3)  # (1 + 0 + 1) / (3 - 1)
    assert figure(every, "rounds_to_target") == (20.0, 0.0, 3)
    assert figure(every, "best_accuracy_percent") == (pytest.approx(83.0), pytest.approx(13**0.5), 3)
    assert figure(every, "uplink_mb") == (pytest.approx(4.4), pytest.approx(0.0), 3)
    assert figure(every, "staleness") == (1.5, 0.0, 3)
    some = rows["asysg n=1"]
    assert (some["seeds"], some["reached"]) == ("5", "3")
    assert figure(some, "time_to_target_s") == (3.0, 0.5, 3)  # over the three that reached it
    none = rows["asysg n=2"]
    assert (none["seeds"], none["reached"]) == ("5", "0")
    assert figure(none, "time_to_target_s") == figure(none, "rounds_to_target") == (None, None, 0)
    alone = rows["asysg n=3"]
    assert figure(alone, "time_to_target_s") == (3.25, None, 1)


def test_the_markdown_table_is_aligned(runs: Path) -> None:
    result = call("runs", "table", "one", "--markdown", cwd=runs)
    lines = result.stdout.splitlines()
    assert lines[0].split("|")[1:4] == [" setting   ", " seeds ", " reached "]
    assert len({len(line) for line in lines[:6]}) == 1
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:6]}
    assert cells["fedavg"][:5] == ["3", "3 of 3", "5.0 ± 1.0", "20 ± 0", "83.0 ± 3.6"]
    assert cells["asysg n=1"][:3] == ["5", "3 of 5", "3.00 ± 0.50"]
    assert cells["asysg n=2"][:4] == ["5", "0 of 5", "–", "–"]
    assert cells["asysg n=3"][:5] == ["1", "1 of 1", "3.25", "20", "81.0"]
    assert "sample standard deviation" in lines[-1]


def test_the_terminal_shows_every_figure(runs: Path) -> None:
    result = call("runs", "table", "one", cwd=runs)
    assert result.returncode == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "fedavg 3 3 of 3 5.0 ± 1.0 20 ± 0 83.0 ± 3.6 83.0 ± 3.6" in words
    assert "asysg n=2 5 0 of 5 – –" in words
    assert "fedavg 20 ± 0 8 ± 0 200 ± 0 210 ± 0 1.50 ± 0 4.4 ± 0 8.8 ± 0 3 ± 0" in words


def test_latex_has_the_rules_of_booktabs_and_escapes(runs: Path) -> None:
    result = call("runs", "table", "one", "--latex", cwd=runs)
    lines = [line for line in result.stdout.splitlines() if not line.startswith("%")]
    assert lines[0] == r"\begin{tabular}{l" + "r" * (len(COLUMNS) + 2) + "}"
    assert [line for line in lines if line.startswith("\\") and "{" not in line] == [
        r"\toprule", r"\midrule", r"\bottomrule",
    ]  # fmt: skip
    rows = [line for line in lines if line.endswith(r" \\")]
    assert len(rows) == 5
    assert all(len(re.split(r"(?<!\\)&", row)) == len(COLUMNS) + 3 for row in rows)
    assert r"best accuracy (\%)" in rows[0]
    assert rows[1].startswith(r"fedavg & 3 & 3 of 3 & 5.0 $\pm$ 1.0 & 20 $\pm$ 0 & 83.0 $\pm$ 3.6 ")
    assert rows[3].startswith("asysg n=2 & 5 & 0 of 5 & -- & -- & ")


def test_columns_without_a_figure_are_omitted_for_readers_and_kept_for_programs(tmp_path: Path) -> None:
    unknown = {"target_accuracy": None, "uplink_bytes": None, "downlink_bytes": None}
    entries = [seed(0, None, 0.4), seed(0, None, 0.5, "asysg", staleness_mean=None)]
    make_run(tmp_path / "runs", "one", [entry | unknown for entry in entries])
    latex = call("runs", "table", "one", "--latex", cwd=tmp_path).stdout
    markdown = call("runs", "table", "one", "--markdown", cwd=tmp_path).stdout
    headings = [
        "setting", "seeds", "best accuracy (%)", "final accuracy (%)", "rounds", "simulated time (s)",
        "updates trained", "updates started", "staleness", "real time (s)",
    ]  # fmt: skip
    assert [cell.strip() for cell in markdown.splitlines()[0].split("|")[1:-1]] == headings
    (row,) = [line for line in latex.splitlines() if line.startswith("asysg")]
    assert row == r"asysg & 1 & 50.0 & 50.0 & 20 & 8 & 200 & 210 & -- & 3 \\", "another row has a staleness"
    assert r"\begin{tabular}{l" + "r" * (len(headings) - 1) + "}" in latex
    assert "To target" not in latex + markdown
    assert len(table(tmp_path)["asysg"]) == 6 + 3 * len(COLUMNS)


def test_a_table_may_have_some_figures_only(runs: Path) -> None:
    def chosen(names: str, *options: str) -> str:
        result = call("runs", "table", "one", "--columns", names, *options, cwd=runs)
        assert result.returncode == 0, result.stderr
        return result.stdout

    latex = chosen("best_accuracy_percent, staleness", "--latex")
    assert r"setting & seeds & reached & best accuracy (\%) & staleness \\" in latex
    assert r"fedavg & 3 & 3 of 3 & 83.0 $\pm$ 3.6 & 1.50 $\pm$ 0 \\" in latex
    assert "To target" not in latex
    found = json.loads(chosen("time_to_target_s", "--json"))
    assert set(found[0]) == {"run", "label", "algorithm", "seeds", "reached", "metric", "time_to_target_s"}
    words = " ".join(chosen("rounds,time_to_target_s").split())
    assert "fedavg 3 3 of 3 20 ± 0 5.0 ± 1.0" in words
    assert "costs" not in words
    refuse(call("runs", "table", "one", "--columns", "accuracy", cwd=runs), "unknown column 'accuracy'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("local_steps=5 & 10%", r"local\_steps=5 \& 10\%"),
        ("a\\b{c}$#~^", r"a\textbackslash{}b\{c\}\$\#\textasciitilde{}\textasciicircum{}"),
        ("fedavg η=1 η̄=0.1", r"fedavg $\eta$=1 $\bar{\eta}$=0.1"),
        ("Zürich ± 中 ð ß", r"Zürich $\pm$ [U+4E2D] [U+00F0] ß"),  # ð needs the encoding T1
        ('"quoted" <`>', r"''quoted'' \textless{}\`{}\textgreater{}"),
    ],
)
def test_latex_escapes(text: str, expected: str) -> None:
    assert latex_text(text) == expected


def test_a_hostile_label_stays_in_its_cell(tmp_path: Path) -> None:
    label = "fed|avg\n\x1b[31m\\input{/etc/passwd} & \\\\ \\hline"
    make_run(tmp_path / "runs", "one", [seed(0, 4.0, 0.8, label)])
    rows = figure_rows([read_run(tmp_path / "runs" / "one")])
    (row,) = [line for line in to_latex(rows).splitlines() if line.startswith("fed")]
    assert r"\input" not in row
    assert r"\hline" not in row
    assert len(re.split(r"(?<!\\)&", row)) == len(COLUMNS) + 3
    shown = call("runs", "table", "one", "--markdown", cwd=tmp_path).stdout
    assert "\x1b" not in shown
    assert "fed\\|avg" in shown
    assert len(shown.splitlines()) == 5
    assert "\x1b" not in call("runs", "table", "one", "--csv", cwd=tmp_path).stdout


def test_the_ending_of_the_file_or_an_option_chooses_the_format(runs: Path) -> None:
    for name, start in (("t.tex", "% \\usepackage"), ("t.md", "| setting"), ("t.csv", "run,label")):
        result = call("runs", "table", "one", "-o", name, cwd=runs)
        assert (result.returncode, result.stdout) == (0, ""), result.stderr
        assert (runs / name).read_text().startswith(start)
    assert call("runs", "table", "one", "--latex", "-o", "t.txt", cwd=runs).returncode == 0
    assert (runs / "t.txt").read_text() == (runs / "t.tex").read_text()
    refuse(call("runs", "table", "one", "-o", "t.docx", cwd=runs), ".tex, .md or .csv")
    refuse(call("runs", "table", "one", "--latex", "--csv", cwd=runs), "give one of --latex, --markdown, --csv")
    refuse(call("runs", "table", "none", cwd=runs), "no run 'none'")
    refuse(call("runs", "table", "one", "-o", "no/t.tex", cwd=runs), "cannot be written")
    found = json.loads(call("runs", "table", "one", "--json", cwd=runs).stdout)
    assert found[0]["time_to_target_s"] == {"count": 3, "mean": 5.0, "sd": 1.0}
    assert set(found[0]) == {
        "run",
        "label",
        "algorithm",
        "seeds",
        "reached",
        "metric",
        *(column.name for column in COLUMNS),
    }


def test_several_runs_share_a_table_and_an_unfinished_one_is_named(runs: Path) -> None:
    entries = [seed(0, None, 0.4, target_accuracy=None, uplink_bytes=1e6), seed(1, None, 0.5, target_accuracy=None)]
    del entries[1]["final_accuracy"]
    make_run(runs / "runs", "two", entries, finished=False)
    result = call("runs", "table", "one", "two", "--markdown", cwd=runs)
    assert result.stderr.strip() == "two is unfinished: the figures are those so far"
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("| two: fedavg")]
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells[:5] == ["2", "–", "–", "–", "45.0 ± 7.1"]
    assert cells[5] == "40.0 (1 of 2)"  # one seed has no final accuracy
    (runs / "runs" / "none").mkdir()
    (runs / "runs" / "none" / "config.toml").write_text('name = "none"\n')
    refuse_lines = call("runs", "table", "none", cwd=runs)
    assert refuse_lines.returncode == 2
    assert "no run has a result yet" in refuse_lines.stderr
