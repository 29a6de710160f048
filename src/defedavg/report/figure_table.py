"""The table of a paper: every figure of every setting, mean ± sample standard deviation over seeds.

Times and rounds to the target are means over the seeds that reached it; the column "reached" states how many did.
Where another figure is unknown for some seeds, the cell states how many have it. LaTeX and Markdown omit a column whose
figure no setting has; CSV and JSON keep it.
"""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from rich.table import Table

from ..errors import unknown
from ..runstore.metrics import common_metric
from ..runstore.reader import RunFolder
from .figure_columns import CLIENT_CAPTION, CLIENT_COLUMNS, COLUMNS, Column, for_terminal
from .seed_figures import Record, SeedFigure, over_seeds, over_seeds_caption, record_of, values
from .tables import grouped, make

UNKNOWN = "–"
TO_TARGET = ("first_hit_seconds", "rounds_to_target")
COSTS = 3 + [column.key for column in COLUMNS].index("rounds")  # where the second table of a terminal begins
CLIENTS = 3 + len(COLUMNS)  # where the third begins


@dataclass(frozen=True, slots=True)
class FigureRow:
    """The figures of one setting of one run, one per column; ``reached`` is None without a target.

    ``metric`` names what all rows of the table have in common; accuracies are percentages, another metric is not.
    """

    run: str
    label: str
    algorithm: str
    seeds: int
    reached: int | None
    metric: str
    columns: tuple[Column, ...]
    figures: tuple[SeedFigure, ...]


def figure_rows(runs: Iterable[RunFolder]) -> list[FigureRow]:
    """Return one row per setting of every run."""
    found, runs = [], list(runs)
    metric = common_metric(entry.metric for run in runs for entry in run.runs)
    columns = _columns([record_of(entry) for run in runs for entry in run.runs], metric)
    for run in runs:
        for label, entries in grouped(run.runs, lambda entry: entry.label).items():
            records = [record_of(entry) for entry in entries]
            figures = tuple(over_seeds(records, column.key, column.factor) for column in columns)
            name, label, algorithm = map(_one_line, (run.name, label, entries[0].algorithm))
            found.append(FigureRow(name, label, algorithm, len(records), _reached(records), metric, columns, figures))
    return found


def _columns(records: Sequence[Record], metric: str) -> tuple[Column, ...]:
    """Return the columns of a table: those of all runs, and those of clients that some run has."""
    own = [column for column in CLIENT_COLUMNS if values(records, column.key)]
    return tuple(column.in_metric(metric) for column in (*COLUMNS, *own))


def with_columns(rows: Sequence[FigureRow], names: Sequence[str]) -> list[FigureRow]:
    """Return rows with some of their figures, in this order; names are those of the CSV without "_mean"."""
    places = {column.name: place for place, column in enumerate(rows[0].columns)}
    for name in names:
        if name not in places:
            raise unknown("column", name, places)
    chosen = [places[name] for name in dict.fromkeys(names)]
    return [
        replace(row, columns=tuple(row.columns[i] for i in chosen), figures=tuple(row.figures[i] for i in chosen))
        for row in rows
    ]


def _headings(rows: Sequence[FigureRow]) -> list[str]:
    return ["setting", "seeds", "reached", *(column.heading for column in rows[0].columns)]


def _caption(rows: Sequence[FigureRow]) -> str:
    shown = any(row.reached for row in rows) and any(column.key in TO_TARGET for column in rows[0].columns)
    to_target = " To target: over the seeds that reached it." if shown else ""
    return f"{over_seeds_caption(rows[0].metric)}{to_target}"


def _one_line(text: str) -> str:
    """Return text without line breaks and control characters."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _reached(records: Sequence[Record]) -> int | None:
    has_target = any(record["target_accuracy"] for record in records)
    return len(values(records, "first_hit_seconds")) if has_target else None


def _cells(rows: Sequence[FigureRow]) -> Iterator[tuple[str, ...]]:
    """Yield the texts of every row; a label has its run in front where there are several runs."""
    several = len({row.run for row in rows}) > 1
    for row in rows:
        name = f"{row.run}: {row.label}" if several else row.label
        reached = UNKNOWN if row.reached is None else f"{row.reached} of {row.seeds}"
        pairs = zip(row.columns, row.figures, strict=True)
        yield name, str(row.seeds), reached, *(_cell(row, *pair) for pair in pairs)


def _cell(row: FigureRow, column: Column, figure: SeedFigure) -> str:
    expected = row.reached if column.key in TO_TARGET else row.seeds  # "reached" is beside the former
    some = f" ({figure.count} of {expected})" if 0 < figure.count < (expected or 0) else ""
    return figure.text(column.alone) + some


def _known_columns(rows: Sequence[FigureRow]) -> list[list[str]]:
    """Return the headings and the cells of every row, without the columns in which every cell is unknown."""
    settings, *figures = zip(_headings(rows), *_cells(rows), strict=True)
    known = [column for column in figures if any(cell != UNKNOWN for cell in column[1:])]
    return [list(line) for line in zip(settings, *known, strict=True)]


def terminal_tables(rows: Sequence[FigureRow]) -> list[Table]:
    """Return tables with the same rows, since a terminal is narrower than all figures: results, costs, and clients."""
    cells, names = list(_cells(rows)), _headings(rows)
    columns = rows[0].columns
    if [column.key for column in columns[: len(COLUMNS)]] != [column.key for column in COLUMNS]:  # chosen ones
        return [make("figures", names, cells, _caption(rows))]
    results = make("results", names[:COSTS], [row[:COSTS] for row in cells], _caption(rows))
    costs = make("costs", (names[0], *names[COSTS:CLIENTS]), [(row[0], *row[COSTS:CLIENTS]) for row in cells])
    if len(names) == CLIENTS:
        return [results, costs]
    chosen = [0, *(3 + columns.index(column) for column in for_terminal(columns[len(COLUMNS) :]))]
    own = [[row[i] for i in chosen] for row in cells]
    return [results, costs, make("clients", [names[i] for i in chosen], own, CLIENT_CAPTION)]


def to_json(rows: Sequence[FigureRow]) -> str:
    """Return a list of objects with mean, sample standard deviation and number of seeds of every figure."""
    objects = [
        {
            **{name: getattr(row, name) for name in ("run", "label", "algorithm", "seeds", "reached", "metric")},
            **{column.name: asdict(figure) for column, figure in zip(row.columns, row.figures, strict=True)},
        }
        for row in rows
    ]
    return json.dumps(objects, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(rows: Sequence[FigureRow]) -> str:
    """Return CSV with mean, sample standard deviation and number of seeds of every figure; unknown is empty."""
    figures = [f"{column.name}_{part}" for column in rows[0].columns for part in ("mean", "sd", "n")]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("run", "label", "algorithm", "seeds", "reached", "metric", *figures))
    for row in rows:
        numbers = [part for figure in row.figures for part in (figure.mean, figure.sd, figure.count)]
        writer.writerow((row.run, row.label, row.algorithm, row.seeds, row.reached, row.metric, *numbers))
    return out.getvalue()


def to_markdown(rows: Sequence[FigureRow]) -> str:
    """Return a Markdown table whose columns are aligned in the text too."""
    lines = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in line] for line in _known_columns(rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        for line in lines
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in (padded[0], rule, *padded[1:])) + f"\n{_caption(rows)}\n"


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", '"': "''", "|": r"\textbar{}", "`": r"\`{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "η̄": r"$\bar{\eta}$", "η": r"$\eta$", "±": r"$\pm$", "−": "$-$", "–": "--", "…": r"\ldots{}",
}  # fmt: skip
_ACCENTS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327"
_LATEX_PATTERN = re.compile("|".join(map(re.escape, _LATEX)))


def latex_text(text: str) -> str:
    """Return text for LaTeX: special characters are escaped, and characters that pdfLaTeX lacks are named by code."""
    parts, signs = _LATEX_PATTERN.split(text), _LATEX_PATTERN.findall(text)
    plain = ["".join(sign if _in_latex(sign) else f"[U+{ord(sign):04X}]" for sign in part) for part in parts]
    return "".join(before + _LATEX.get(sign, "") for before, sign in zip(plain, [*signs, ""], strict=True))


def _in_latex(sign: str) -> bool:
    """Return whether pdfLaTeX has a character without a package: ASCII, and letters with the accents of OT1."""
    parts = unicodedata.normalize("NFD", sign)
    return (parts[0].isascii() and all(mark in _ACCENTS for mark in parts[1:])) or sign in "ßæÆœŒøØłŁ"


def to_latex(rows: Sequence[FigureRow]) -> str:
    """Return a tabular in the style of the package booktabs."""
    body = _known_columns(rows)
    header, *lines = [" & ".join(map(latex_text, cells)) + r" \\" for cells in body]
    return "\n".join(
        (
            r"% \usepackage{booktabs}",
            f"% {_caption(rows)}",
            rf"\begin{{tabular}}{{l{'r' * (len(body[0]) - 1)}}}",
            r"\toprule",
            header,
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        )
    )


FORMATS: dict[str, Callable[[Sequence[FigureRow]], str]] = {
    "latex": to_latex,
    "markdown": to_markdown,
    "csv": to_csv,
    "json": to_json,
}
ENDINGS = {".tex": "latex", ".md": "markdown", ".csv": "csv"}
