"""Convolutions whose operands are 16-bit numbers with a factor for each client, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from defedavg.training.kernels.plain import LayerKernels, LayerWeights, Window
from helpers.convolutions import Convolution, convolutions

if torch.cuda.is_available():
    pytest.skip("benchmarks/kernels.py checks the compiled kernels on a device", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from defedavg.training.kernels.triton_convolutions import TritonConvolutions

# Triton's interpreter converts arrays of one element to numbers, which NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

CLIENTS = 3
ACTIVE = [0, 2]
RATES = torch.tensor([0.5, 0.0, 0.25])  # the second client is not updated
Draw = Callable[..., Tensor]


def whole_numbers(seed: int) -> Draw:
    """Return a function that draws numbers whose sums and products have no rounding error."""
    source = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randint(-3, 4, shape, generator=source).double()


def normal_numbers(seed: int, scale: float = 1.0) -> Draw:
    source = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=source).double() * scale


def step(kernels: LayerKernels, case: Convolution, tensors: list[Tensor], bias: bool = True) -> list[Tensor]:
    """Return outputs, gradient of the images, and gradients of weight and bias, all with a first dimension C."""
    samples, image, outs, window = case
    x, weight, shift, grad = tensors
    clients = len(weight)
    rates = RATES[:clients].to(x.dtype)
    targets = torch.zeros_like(weight), torch.zeros_like(shift)
    params = LayerWeights(weight, shift if bias else None, rates, (True, bias), (targets[0], targets[1]))
    out, saved = kernels.conv(x, params, window)
    grad_x = kernels.conv_backward(grad, saved, x.shape, params, window, True)
    assert grad_x is not None
    assert samples * clients == len(out)
    assert out.shape[-1] == outs
    return [out.view(clients, samples, *out.shape[1:]), grad_x.reshape(clients, samples, *image), *targets[: 1 + bias]]


def drawn(case: Convolution, draws: tuple[Draw, Draw, Draw]) -> list[Tensor]:
    """Return images, weights, bias, and the gradient of the outputs."""
    samples, image, outs, window = case
    images, weights, gradients = draws
    pool = 2 if window.pool else 1
    high, wide = (side // pool for side in window.out(image[0], image[1]))
    n = CLIENTS * samples
    shift = weights(CLIENTS, outs)
    return [images(n, *image), weights(CLIENTS, outs, *window.size, image[2]), shift, gradients(n, high, wide, outs)]


@pytest.mark.no_cover
@examples(max_examples=25)
@given(convolutions(), st.booleans(), st.integers(0, 2**32))
@example((2, (7, 8, 3), 4, Window((3, 3), (2, 2), (0, 0), relu=True)), True, 0)  # lines of patches
@example((2, (9, 7, 32), 40, Window((5, 3), (1, 1), (0, 0), relu=True, pool=True)), True, 0)  # sides that are not even
@example((4, (20, 20, 5), 17, Window((3, 3), (1, 1), (1, 1))), True, 0)  # several parts
def test_whole_numbers_give_equal_results(case: Convolution, bias: bool, seed: int) -> None:
    tensors = drawn(case, (whole_numbers(seed), whole_numbers(seed + 1), whole_numbers(seed + 2)))
    exact = step(LayerKernels(), case, tensors, bias)
    found = step(TritonConvolutions("tf32"), case, [values.float() for values in tensors], bias)
    for a, b in zip(found, exact, strict=True):
        assert torch.equal(a[ACTIVE].double(), b[ACTIVE])
    assert not any(target[1].any() for target in found[2:])


@pytest.mark.no_cover
@examples(max_examples=15)
@given(
    st.integers(0, 2**32), st.sampled_from([1e-20, 1e-6, 1.0, 1e6, 1e12]), st.sampled_from([1e-6, 1.0, 1e6]),
    st.sampled_from([1e-20, 1e-9, 1.0, 1e9]),
)  # fmt: skip
def test_the_scale_of_the_numbers_does_not_matter(seed: int, x: float, weight: float, grad: float) -> None:
    case = 2, (8, 8, 6), 5, Window((3, 3), (1, 1), (1, 1))
    draws = normal_numbers(seed, x), normal_numbers(seed + 1, weight), normal_numbers(seed + 2, grad)
    tensors = drawn(case, draws)
    exact = step(LayerKernels(), case, tensors)
    found = step(TritonConvolutions("tf32"), case, [values.float() for values in tensors])
    for a, b in zip(found, exact, strict=True):
        assert (a[ACTIVE].double() - b[ACTIVE]).norm() <= 5e-4 * b[ACTIVE].norm()  # TF32 has 2⁻¹¹ as well


def test_small_numbers_beside_large_ones_keep_their_digits() -> None:
    """An image with one large pixel: the output of the others is that of small numbers."""
    case = 1, (6, 6, 4), 3, Window((1, 1), (1, 1), (0, 0))
    images, weight, shift, grad = drawn(case, (normal_numbers(0), normal_numbers(1), normal_numbers(2)))
    images[:, 0, 0], shift[:] = 2.0**20, 0
    tensors = [images, weight, shift, grad]
    exact = step(LayerKernels(), case, tensors)[0][ACTIVE][..., 1:, :, :]
    found = step(TritonConvolutions("tf32"), case, [values.float() for values in tensors])[0][ACTIVE][..., 1:, :, :]
    assert (found - exact).norm() <= 5e-4 * exact.norm()


def test_results_of_a_client_do_not_depend_on_the_others() -> None:
    case = 2, (9, 9, 3), 8, Window((3, 3), (1, 1), (0, 0), relu=True, pool=True)
    draws = normal_numbers(0), normal_numbers(1), normal_numbers(2)
    tensors = [values.float() for values in drawn(case, draws)]
    together = step(TritonConvolutions("tf32"), case, tensors)
    alone = step(TritonConvolutions("tf32"), case, [values[: len(values) // CLIENTS] for values in tensors])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(together, alone, strict=True))
    for values in tensors:
        values.view(CLIENTS, -1)[2].fill_(torch.nan)
    beside = step(TritonConvolutions("tf32"), case, tensors)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(together, beside, strict=True))
    assert all(values[2].isnan().any() for values in beside)


def test_an_evaluation_has_float32_operands() -> None:
    """It has no rates: its operands would have to be stored for versions with thousands of samples."""
    x, weight = torch.randn(4, 6, 6, 2), torch.randn(2, 8, 3, 3, 2)
    window, params = Window((3, 3), (1, 1), (1, 1), relu=True, pool=True), LayerWeights(weight, None, None)
    outputs = [TritonConvolutions(precision).conv(x, params, window) for precision in ("tf32", "float32")]
    assert torch.equal(outputs[0][0], outputs[1][0])  # the interpreter has no TF32
    assert not any(values.dtype == torch.float16 for values in outputs[0][1])
