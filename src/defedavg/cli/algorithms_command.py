"""``defedavg algorithms``: list the algorithms, with their equations and settings."""

from __future__ import annotations

import json

from rich.markup import escape

from ..report import tables
from .options import Json, Plugin, out, print_json


def algorithms(_plugin: Plugin = None, as_json: Json = False) -> None:
    """List the algorithms, each with its update equation, citation, learning rates and settings.

    Algorithms of installed packages and of plugin files are listed too.

    Example: `defedavg algorithms --plugin my_algorithm.py`
    """
    rows = tables.algorithm_rows()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        out.print(f"[bold]{escape(row['name'])}[/bold]  {escape(row['summary'])}", markup=True)
        source = f"{escape(row['citation'])}; rates: {', '.join(row['rates'])}"
        out.print(f"    {escape(row['equation'])}   [dim]{source}[/dim]", markup=True)
        for name, setting in row["settings"].items():
            value = escape(json.dumps(setting["default"]))
            name = escape(f"{row['name']}.{name}")
            out.print(f"    {name} = {value}   [dim]{escape(setting['help'])}[/dim]", markup=True)
    out.print("\nSet them in a table with the algorithm's name, which may also override any key of [training].")
