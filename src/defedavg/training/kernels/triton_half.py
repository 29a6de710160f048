"""Triton kernels that store the operands of a convolution as 16-bit numbers, scaled by a power of two for each client.

With the largest magnitude of a client between 2¹³ and 2¹⁴, numbers down to 2⁻²⁸ of it have eleven binary digits, as
many as TF32 has; smaller ones have an error of at most 2⁻³⁹ of it. The tensor cores multiply such numbers at twice the
rate of TF32, and a load brings twice as many. Sums are in float32.

A first kernel finds the largest magnitude of each of PARTS parts of a client's values, a second one stores the values.
The results of a client depend on its own numbers only; kernels skip clients with learning rate zero.
"""

# Triton's language has no types that a checker knows, and its arguments are named as in the formulas. Functions that
# kernels call are inlined by Triton's compiler.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import _magnitude_bits, _output_gradient, _sgd_update

_EXPONENT = tl.constexpr(13)  # of the largest magnitude


@triton.jit
def _powers_of(bits):
    """Return the power of two that brings a magnitude with these bits to 2¹³ … 2¹⁴, and its inverse."""
    # Of a float, 127 + exponent is in the bits from 23 on. Both powers must be finite and not zero.
    raised = tl.minimum(tl.maximum(254 + _EXPONENT - (bits >> 23), 1), 253)
    return (raised << 23).to(tl.float32, bitcast=True), ((254 - raised) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _powers(maxima, c, PARTS: tl.constexpr):
    """Return the power of two that brings a client's largest magnitude to 2¹³ … 2¹⁴, and its inverse."""
    return _powers_of(tl.max(tl.load(maxima + c * PARTS + tl.arange(0, PARTS)), 0))


@triton.jit
def _power_with_scale(maxima, scales, c, PARTS: tl.constexpr):
    """Return the power of a client, and store what its 16-bit numbers must be multiplied by."""
    power, inverse = _powers(maxima, c, PARTS)
    if tl.program_id(0) == 0:
        tl.store(scales + c, inverse)
    return power


@triton.jit
def find_maxima(x, rates, maxima, each, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the bits of the largest magnitude in each part of every client's values."""
    c = tl.program_id(1).to(tl.int64)
    if tl.load(rates + c) == 0.0:
        return
    x += c * each
    largest = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(tl.program_id(0) * BLOCK, each, PARTS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, _magnitude_bits(tl.load(x + at, mask=at < each, other=0.0)))
    tl.store(maxima + c * PARTS + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def store_half(x, rates, maxima, out, scales, each, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Store values as 16-bit numbers, and what those of a client must be multiplied by."""
    c = tl.program_id(1).to(tl.int64)
    if tl.load(rates + c) == 0.0:
        return
    power = _power_with_scale(maxima, scales, c, PARTS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + c * each + at, mask=at < each, other=0.0)
    tl.store(out + c * each + at, (values * power).to(tl.float16), mask=at < each)


@triton.jit
def store_half_rows(x, rates, maxima, out, scales, columns, W: tl.constexpr, I: tl.constexpr, OW: tl.constexpr,
                    SW: tl.constexpr, ROW: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Do the same for the lines of patches, as ``patch_rows`` stores them."""
    c = tl.program_id(1).to(tl.int64)
    if tl.load(rates + c) == 0.0:
        return
    power = _power_with_scale(maxima, scales, c, PARTS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = at // OW * (W * I) + at % OW * (SW * I)
    j = tl.arange(0, WIDE)
    inside = (at < columns)[:, None]
    x += c * (columns // OW) * (W * I)
    values = tl.load(x + start[:, None] + j[None, :], mask=inside & (j < ROW)[None, :], other=0.0)
    to = out + (c * columns + at)[:, None] * WIDE + j[None, :]
    tl.store(to, (values * power).to(tl.float16), mask=inside & (j < WIDE)[None, :])


@triton.jit
def find_gradient_maxima(grad, out, which, rates, maxima, sums, pixels, O: tl.constexpr, POOL: tl.constexpr,
                         RELU: tl.constexpr, PARTS: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """Store the same for the gradient before ReLU and pooling, and the sums of the gradients of every channel.

    ``pixels`` are those of all samples of a client, after pooling.
    """
    c = tl.program_id(1).to(tl.int64)
    if tl.load(rates + c) == 0.0:
        return
    o = tl.arange(0, BO)
    largest = tl.zeros((BP, BO), dtype=tl.int32)
    total = tl.zeros((BP, BO), dtype=tl.float32)
    for start in range(tl.program_id(0) * BP, pixels, PARTS * BP):
        pixel = start + tl.arange(0, BP)
        at = (c * pixels + pixel)[:, None] * O + o[None, :]
        mask = (pixel < pixels)[:, None] & (o < O)[None, :]
        if POOL == 2:
            value = tl.load(grad + at, mask=mask, other=0.0)
            value = tl.where(tl.load(which + at, mask=mask, other=4) == 4, 0.0, value)
        else:
            value = _output_gradient(grad, out, at, mask, RELU)
        largest = tl.maximum(largest, _magnitude_bits(value))
        total += value
    part = c * PARTS + tl.program_id(0)
    tl.store(maxima + part, tl.max(tl.max(largest, 1), 0))
    tl.store(sums + part * O + o, tl.sum(total, 0), mask=o < O)


@triton.jit
def scale_gradient(maxima, sums, bias, rates, scales, O: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
                   BO: tl.constexpr):  # fmt: skip
    """Store what the 16-bit gradient of a client must be multiplied by, and update the bias."""
    c = tl.program_id(0).to(tl.int64)
    rate = tl.load(rates + c)
    if rate == 0.0:
        return
    _, inverse = _powers(maxima, c, PARTS)
    tl.store(scales + c, inverse)
    if BIAS:
        o = tl.arange(0, BO)
        at = (c * PARTS + tl.arange(0, PARTS))[:, None] * O + o[None, :]
        _sgd_update(bias + c * O + o, tl.sum(tl.load(sums + at, mask=(o < O)[None, :], other=0.0), 0), rate, o < O)


@triton.jit
def spread_pooled(grad, which, rates, scales, out, each, O: tl.constexpr, PW: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Store the 16-bit gradient before ReLU and pooling of images with even sides: one of four pixels has it."""
    c = tl.program_id(1).to(tl.int64)
    if tl.load(rates + c) == 0.0:
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < each
    value = tl.load(grad + c * each + at, mask=mask, other=0.0)
    pixel = tl.load(which + c * each + at, mask=mask, other=4)
    half = (value * (1.0 / tl.load(scales + c))).to(tl.float16)  # a power of two
    # The upper left one of the four pixels; a line of the pooled image is a pair of lines.
    to = out + c * each * 4 + at // (PW * O) * (4 * PW * O) + at // O % PW * (2 * O) + at % O
    for number in tl.static_range(4):
        spread = tl.where(pixel == number, half, 0.0)
        tl.store(to + number // 2 * (2 * PW * O) + number % 2 * O, spread, mask=mask)
