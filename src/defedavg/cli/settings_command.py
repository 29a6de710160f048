"""``defedavg settings``: print every setting as a TOML file that can be edited and run."""

from __future__ import annotations

from ..report import tables
from .options import Json, Plugin, out, print_json


def settings(_plugin: Plugin = None, as_json: Json = False) -> None:
    """Print every setting with its default and its meaning, as a study that you can edit and run.

    Example: `defedavg settings > my.toml`, then `defedavg plan my.toml`
    """
    rows = tables.setting_rows()
    if as_json:
        print_json(rows)
        return
    out.print('name = "first"\nalgorithms = ["fedavg", "defedavg-niid"]\nseeds = [0, 1, 2]', markup=False)
    for table, keys in rows.items():
        out.print(f"\n[{table}]", markup=False)
        for name, setting in keys.items():
            # A value that the profile sets is printed as a comment, so that the profile still sets it.
            value = ("# " if setting["by_profile"] else "") + f"{name} = {setting['toml']}"
            out.print(f"{value:<34} # {setting['help']}", markup=False)
