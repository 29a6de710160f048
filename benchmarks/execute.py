"""Updates per second of the reference and the batched executor, side by side in one run.

This is ``defedavg bench`` for machines where only PyTorch and NumPy are installed:

    python benchmarks/execute.py [--device cpu|cuda] [--model cnn] [--image 1,28,28] [--runs 3] [--updates 300] …
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial

from defedavg.experiments.bench import BenchLoad, bench
from defedavg.experiments.compute import ComputeConfig


def main() -> None:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--image", default="1,28,28")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--max-batch-jobs", type=int)
    parser.add_argument("--memory")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--reference-updates", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eval-every-rounds", type=int, default=10)
    given = parser.parse_args()
    compute = ComputeConfig.choose("batched", given.device, given.max_batch_jobs, given.memory, given.precision)
    load = BenchLoad(
        model=given.model,
        image=tuple(int(side) for side in given.image.split(",")),
        runs=given.runs,
        updates=given.updates,
        reference_updates=given.reference_updates,
        repeats=given.repeats,
        eval_every_rounds=given.eval_every_rounds,
    )
    print(json.dumps(bench(load, compute, partial(print, file=sys.stderr, flush=True)), indent=1))


if __name__ == "__main__":
    main()
