"""What all commands share: where they print, and the options that mean the same everywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..jsonio import finite

out = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """To standard output, with null for what is no number."""
    sys.stdout.write(json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def renamed_option(old: str, new: str) -> Any:
    """Return a hidden option with an old name: it prints one line with the new name and passes its value on.

    A command declares it as a parameter with a leading underscore and the default None (False for a flag), and does
    not read it. The value becomes the default of the new option, so a new option that is also given takes precedence.
    """

    def pass_on(context: typer.Context, value: Any) -> None:
        if value is not None and value is not False:
            err.print(f"{old} is now {new}; the old name will be removed", markup=False, soft_wrap=True)
            name = next(parameter.name for parameter in context.command.params if new in parameter.opts)
            context.default_map = {**(context.default_map or {}), str(name): value}

    return typer.Option(old, hidden=True, is_eager=True, expose_value=False, callback=pass_on)


OldMaxBatchJobs = Annotated[str | None, renamed_option("--width", "--max-batch-jobs")]

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override a setting; a list is swept. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a run of the same name.")]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where run folders are made.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
MaxBatchJobs = Annotated[
    int | None, typer.Option("--max-batch-jobs", help="Jobs in one batch at most; 64 on the CPU, 192 on CUDA.")
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="What may be used, as 800M or 12G; a share of what is free if not given."),
]
Precision = Annotated[
    str, typer.Option(help="Of products: float32, or on CUDA tf32 or bf16; auto is tf32 on CUDA, float32 elsewhere.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where this study was broken off, to the same numbers bit for bit.")
]
Every = Annotated[
    float | None,
    typer.Option(
        "--checkpoint-every",
        metavar="SECONDS",
        help="Real seconds from one checkpoint to the next; a minute, or more if they are large. inf: none.",
    ),
]
Executor = Annotated[
    str,
    typer.Option(help="batched: many clients in one step; reference: one job after the other; ray: over a cluster."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Of a Ray cluster, or auto; RAY_ADDRESS if not given, else this machine alone."
    ),
]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Also write logs for TensorBoard, beside the other results.")
]
