"""``defedavg settings``: print every setting as a TOML file that can be edited and run."""

from __future__ import annotations

import json
from typing import Any

from ..config.examples import FIRST
from ..report import tables
from .options import Json, Plugin, print_json, print_line


def settings(_plugin: Plugin = None, as_json: Json = False) -> None:
    """Print every setting with its meaning, as a first study that runs in about a minute; edit it for your own.

    Where the study differs from a default, the comment states the default. `--json` prints the defaults.

    Example: `defedavg settings > my.toml`, then `defedavg run my.toml`
    """
    rows = tables.setting_rows()
    if as_json:
        print_json(rows)
        return
    print_line("# A first study: six algorithms on 5,000 digits, about a minute on two cores.")
    for name in ("name", "algorithms", "seeds"):
        print_line(f"{name} = {json.dumps(FIRST[name])}")
    for table in dict.fromkeys([*rows, *(name for name, value in FIRST.items() if isinstance(value, dict))]):
        given = FIRST.get(table, {})
        print_line(f"\n[{table}]")
        for name, setting in rows.get(table, {}).items():
            print_line(_line(name, setting, given))
        for name in given:
            if name not in rows.get(table, {}):
                print_line(
                    f"{f'{name} = {json.dumps(given[name])}':<34} # overrides training.{name} for this algorithm"
                )


def _line(name: str, setting: dict[str, Any], given: dict[str, Any]) -> str:
    # A value that the profile sets is printed as a comment, so that the profile still sets it.
    mark = "# " if setting["by_profile"] else ""
    value = json.dumps(given[name]) if name in given else setting["toml"]
    default = f" (default: {setting['toml']})" if value != setting["toml"] else ""
    return f"{f'{mark}{name} = {value}':<34} # {setting['help']}{default}"
