"""A task is checked by its names and numbers before anything is read, without PyTorch."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from inspect import signature

import pytest

from defedavg.tasks import MODELS
from defedavg.tasks.datasets.catalog import NORMALISERS
from defedavg.tasks.partition import OPTIONS, PARTITIONS, check_options
from defedavg.tasks.split_options import OPTION_CHECKS
from defedavg.tasks.task_names import BUILT_IN_MODELS, NORMALISATIONS
from helpers.user_errors import line_of


def test_the_names_that_are_known_without_pytorch_are_those_that_exist() -> None:
    assert set(BUILT_IN_MODELS) <= set(MODELS)
    assert tuple(NORMALISERS) == NORMALISATIONS


def test_every_option_of_a_partition_has_a_check() -> None:
    assert OPTION_CHECKS.keys() == OPTIONS.keys()
    for name, default in OPTIONS.items():
        OPTION_CHECKS[name](default)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_checked_by_the_partitions_that_read_it(option: str) -> None:
    options = {**OPTIONS, option: 0}
    for split in ("iid", "classes", "dirichlet", "shards", "sampled", "natural"):
        if option in signature(PARTITIONS[split]).parameters:
            assert line_of(partial(check_options, split, options)).startswith(f"{option} is 0; ")
        else:
            check_options(split, options)


def test_a_good_task_is_checked_without_pytorch() -> None:
    code = (
        "import sys\nfrom defedavg.tasks.task_names import check_task\n"
        "check_task('hf:any', 'cnn', 'iid', normalise='unit', test_share=0.0, "
        "classes_per_client=2, alpha=0.5, shards_per_client=2, samples_per_client=1, min_samples_per_client=1)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
