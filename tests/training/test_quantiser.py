"""The quantiser of messages: unbiased, keyed, and as coarse as its number of bits says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from defedavg.algorithms.quafl import QuaflSettings
from defedavg.errors import UserError
from defedavg.planning.transforms import MAX_BITS, parse_transform
from defedavg.rng import key
from defedavg.training.state_vectors import quantised
from helpers.small_runs import batched_run, final_versions, how, reference, task_of

VALUES = torch.tensor([0.0, 1.0, -1.0, 0.3, -0.3, 1e-4, -0.77777, 0.5, 1 / 3], dtype=torch.float64)


def one_quantised(values: Tensor, bits: int, start: int) -> Tensor:
    return quantised(values.unsqueeze(0), bits, [start])[0]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_mean_over_many_keys_is_the_value(bits: int) -> None:
    draws = quantised(VALUES.expand(4_000, -1), bits, [key(0, "test", i) for i in range(4_000)])
    unit = 1.0 / (2 ** (bits - 1) - 1)
    error = (draws.mean(dim=0) - VALUES).abs()
    # A rounding has a deviation of at most half a unit; five deviations of the mean.
    assert float(error.max()) < 5 * 0.5 * unit / np.sqrt(len(draws))
    assert float((draws - VALUES).abs().max()) <= unit + 1e-12


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_are_whole_multiples_of_the_largest_over_the_levels(bits: int) -> None:
    levels = 2 ** (bits - 1) - 1
    for number in range(50):
        multiples = one_quantised(3.0 * VALUES, bits, key(1, "test", number)) * levels / 3.0
        np.testing.assert_allclose(multiples, multiples.round(), atol=1e-9)
        assert float(multiples.abs().max()) <= levels + 1e-9


def test_equal_keys_give_equal_roundings_and_elements_are_independent() -> None:
    many = torch.full((10_000,), 0.4, dtype=torch.float64)
    many[0] = 1.0
    one, again, other = (one_quantised(many, 2, key(0, "test", number)) for number in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert abs(float((one[1:] == 1.0).double().mean()) - 0.4) < 0.03


def test_zero_remains_zero() -> None:
    assert not bool(one_quantised(torch.zeros(5), 8, key(0, "test", 0)).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_very_many_bits_change_nothing_but_rounding(dtype: torch.dtype) -> None:
    values = VALUES.to(dtype)
    found = one_quantised(values, MAX_BITS, key(0, "test", 0))
    assert found.dtype == dtype
    torch.testing.assert_close(found, values, rtol=4 * torch.finfo(dtype).eps, atol=1e-15)


@pytest.mark.parametrize("bits", [2, 8, 32, 52])
def test_both_executors_round_alike(bits: int) -> None:
    task = task_of("mlp")
    chosen = dataclasses.replace(how("quafl"), algorithm_settings=QuaflSettings(bits=bits))
    expected = reference(chosen, task, 50)
    for width in (1, 64):
        (found,) = final_versions([batched_run(chosen, task, 50)], task, width)
        assert float((found - expected).norm() / expected.norm()) < 1e-10


@pytest.mark.parametrize("text", ["quantise(1)", "quantise(53)", "quantise", "quantise(8", "round(8)"])
def test_an_unknown_transform_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"write quantise\(bits\) with 2 to 52 bits"):
        parse_transform(text)
