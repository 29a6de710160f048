"""``defedavg bench``: measure how fast this machine trains."""

from __future__ import annotations

import re
from typing import Annotated

from typer import Option

from ..errors import UserError
from ..report import tables
from .options import Device, Json, MaxBatchJobs, Memory, Precision, out, print_json, print_note


def bench(
    model: Annotated[
        str, Option(help="cnn, mlp, softmax, resnet, transformer, char-lstm or char-transformer.")
    ] = "cnn",
    image: Annotated[
        str, Option(metavar="C,H,W", help="Shape of the random images; for a char model, the length of the texts.")
    ] = "1,28,28",
    runs: Annotated[int, Option(help="Seeds that share batches.")] = 3,
    updates: Annotated[int, Option(help="Updates per repeat of the batched executor.")] = 300,
    reference_updates: Annotated[int, Option(help="Updates per repeat of the reference executor.")] = 20,
    repeats: Annotated[int, Option(help="Repeats; medians are reported.")] = 3,
    eval_every_rounds: Annotated[int, Option(help="Rounds between evaluations.")] = 10,
    device: Device = "auto",
    max_batch_jobs: MaxBatchJobs = None,
    memory: Memory = None,
    precision: Precision = "auto",
    as_json: Json = False,
) -> None:
    """Measure this machine: updates per second of the reference and of the batched executor.

    Both train DeFedAvg-IID (N = 100, n = 10, K = 50, batch size 10) on random images or
    texts, so no data set is needed. It takes about half a minute with the defaults.

    Example: `defedavg bench --model mlp --device cpu`
    """
    from ..experiments.bench import BenchLoad
    from ..experiments.bench import bench as measure
    from ..experiments.compute import ComputeConfig

    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", image):
        raise UserError(f"--image {image!r} is not a shape; write it like 1,28,28")
    shape = tuple(int(side) for side in image.split(","))
    load = BenchLoad(model, shape, runs, updates, reference_updates, repeats, eval_every_rounds)
    compute = ComputeConfig.choose("batched", device, max_batch_jobs, memory, precision)
    speeds = measure(load, compute, print_note)
    if as_json:
        print_json(speeds)
    else:
        out.print(tables.bench_table(speeds))
