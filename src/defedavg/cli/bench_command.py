"""``defedavg bench``: measure how fast this machine trains."""

from __future__ import annotations

import re
from typing import Annotated

from typer import Option

from ..errors import UserError
from ..report import tables
from .command_overhead import overhead_seconds
from .options import Device, Json, MaxBatchJobs, Memory, Precision, out, print_json, print_note, working

UPDATES, LOOP_UPDATES = 300, 20
"""The updates of a repeat of the batched and of the reference executor, at most."""
TURN_SECONDS = 8.0
"""A repeat of both executors, unless the updates are given."""
OVERHEAD_REPEATS = 3


def bench(
    model: Annotated[
        str,
        Option(help="cnn, mlp, pooled-mlp, softmax, resnet, transformer, char-mlp, char-lstm or char-transformer."),
    ] = "cnn",
    image: Annotated[
        str, Option(metavar="C,H,W", help="Shape of the random images; for a char model, the length of the texts.")
    ] = "1,28,28",
    runs: Annotated[int, Option(help="Seeds that share batches.")] = 3,
    updates: Annotated[
        int | None, Option(help="Updates per repeat of the batched executor.", show_default=f"at most {UPDATES}")
    ] = None,
    reference_updates: Annotated[
        int | None, Option(help="Updates per repeat of the reference executor.", show_default=f"at most {LOOP_UPDATES}")
    ] = None,
    repeats: Annotated[int, Option(help="Repeats; medians are reported.")] = 3,
    full: Annotated[
        bool, Option("--full", help=f"{UPDATES} and {LOOP_UPDATES} updates in every repeat, however long they take.")
    ] = False,
    eval_every_rounds: Annotated[int, Option(help="Rounds between evaluations.")] = 10,
    device: Device = "auto",
    max_batch_jobs: MaxBatchJobs = None,
    memory: Memory = None,
    precision: Precision = "auto",
    as_json: Json = False,
) -> None:
    """Measure this machine: updates per second of the reference and of the batched executor.

    Both train DeFedAvg-IID (N = 100, n = 10, K = 50, batch size 10) on random images or texts. It takes under a
    minute on two cores: a repeat has as many updates as fit into eight seconds, unless their number or `--full` is
    given. With `--precision bf16`, the reference executor computes in float32, or in TF32 on a CUDA device. The
    overhead is that of `defedavg run` for a tiny study: the command without training and importing PyTorch.

    Example: `defedavg bench --model mlp --device cpu`
    """
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", image):
        raise UserError(f"--image {image!r} is not a shape; write it like 1,28,28")
    shape = tuple(int(side) for side in image.split(","))
    with working("preparing …"):  # shown before PyTorch is loaded
        from ..experiments.bench import BenchLoad
        from ..experiments.bench import bench as measure
        from ..experiments.compute import ComputeConfig
    counts = UPDATES if updates is None else updates, LOOP_UPDATES if reference_updates is None else reference_updates
    seconds = TURN_SECONDS if not full and updates is None and reference_updates is None else None
    load = BenchLoad(model, shape, runs, *counts, repeats, eval_every_rounds, seconds)
    compute = ComputeConfig.choose("batched", device, max_batch_jobs, memory, precision)
    speeds = measure(load, compute, print_note)
    print_note("defedavg run with a tiny study, in fresh processes")
    speeds["overhead_seconds"] = overhead_seconds(compute.device, OVERHEAD_REPEATS if full else 1)
    if as_json:
        print_json(speeds)
    else:
        out.print(tables.bench_table(speeds))
