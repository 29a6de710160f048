"""Triton kernels of fully connected layers whose updates are added to the weights once in several steps.

``deferred.py`` has the formulas. The first kernel of a pass computes the products with the pending rows, x·Xᵀ or
grad·Gᵀ, once for every client, and keeps the rows of this step. The second one reads the weights.
"""

# Triton's language has no types that a checker knows, and its arguments are named as in the formulas.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import _dot, _output_gradient, _sgd_update

# The largest weight of a row is stored as a number from 2¹² to 2¹³ at first. While it changes, it stays representable
# up to 2¹⁵, and the digits of weights that are 2²⁰ times smaller stay complete down to 2⁸.
_POWER = tl.constexpr(2.0**12)
_LARGEST = tl.constexpr(2.0**15)
_LEAST = tl.constexpr(2.0**8)


@triton.jit
def _pending(step, PERIOD: tl.constexpr, R):
    """Return the number of rows that are pending before this step."""
    return (tl.load(step) % PERIOD).to(tl.int32) * R


@triton.jit(do_not_specialize=["R"])
def keep_inputs(x, inputs, rates, step, products, R, I: tl.constexpr, PERIOD: tl.constexpr, PRECISION: tl.constexpr,
                BK: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Compute x·Xᵀ, and keep the inputs of this step.

    The samples are the rows of the product, of which there are too few for the tensor cores' asynchronous instruction:
    as an operand of that one, ``xs``, which is stored, too, would be overwritten by the loads of a later block while
    the instruction still reads it (Triton 3.6 reserves one buffer too few).
    """
    c = tl.program_id(0).to(tl.int64)
    if tl.load(rates + c) == 0.0:
        return
    pending = _pending(step, PERIOD, R)
    r = tl.arange(0, BR)
    h = tl.arange(0, BH)
    x += c * R * I
    inputs += c * (BH * I)
    acc = tl.zeros((BR, BH), dtype=tl.float32)
    for k0 in range(0, I, BK):
        k = k0 + tl.arange(0, BK)
        mask = (r < R)[:, None] & (k < I)[None, :]
        xs = tl.load(x + r[:, None] * I + k[None, :], mask=mask, other=0.0)
        before = tl.load(inputs + h[None, :] * I + k[:, None], mask=(h < pending)[None, :] & (k < I)[:, None],
                         other=0.0)  # fmt: skip
        acc = _dot(xs, before, acc, PRECISION)
        tl.store(inputs + (pending + r)[:, None] * I + k[None, :], xs, mask=mask)
    tl.store(products + c * (BR * BH) + r[:, None] * BH + h[None, :], acc)


@triton.jit(do_not_specialize=["R"])
def deferred_linear(x, w, scales, gradients, products, bias, rates, step, out, R, I: tl.constexpr, O: tl.constexpr,
                    PERIOD: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
                    BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Compute a fully connected layer: rows are outputs, columns samples."""
    c = tl.program_id(1).to(tl.int64)
    rate = tl.load(rates + c)
    if rate == 0.0:
        return
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    r = tl.arange(0, BR)
    h = tl.arange(0, BH)
    w += c * (O * I)
    x += c * R * I
    acc = tl.zeros((BM, BR), dtype=tl.float32)
    for k0 in range(0, I, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(w + o[:, None] * I + k[None, :], mask=(o < O)[:, None] & (k < I)[None, :], other=0.0)
        b = tl.load(x + r[None, :] * I + k[:, None], mask=(r < R)[None, :] & (k < I)[:, None], other=0.0)
        acc = _dot(a.to(tl.float32), b, acc, PRECISION)
    acc *= tl.load(scales + c * O + o, mask=o < O, other=0.0)[:, None]
    pending = _pending(step, PERIOD, R)
    at = c * (BH * O) + h[None, :] * O + o[:, None]
    g = tl.load(gradients + at, mask=(h < pending)[None, :] & (o < O)[:, None], other=0.0)
    product = tl.load(products + c * (BR * BH) + r[None, :] * BH + h[:, None])
    acc -= rate * _dot(g, product, tl.zeros((BM, BR), dtype=tl.float32), PRECISION)
    if BIAS:
        acc += tl.load(bias + c * O + o, mask=o < O, other=0.0)[:, None]
    if RELU:
        acc = tl.where(acc <= 0, 0.0, acc)
    tl.store(out + c * R * O + r[None, :] * O + o[:, None], acc, mask=(r < R)[None, :] & (o < O)[:, None])


@triton.jit(do_not_specialize=["R"])
def keep_gradients(grad, out, gradients, bias, rates, step, products, R, O: tl.constexpr, PERIOD: tl.constexpr,
                   RELU: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr,
                   BR: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Compute grad·Gᵀ, keep the gradient of this step, and update the bias."""
    c = tl.program_id(0).to(tl.int64)
    rate = tl.load(rates + c)
    if rate == 0.0:
        return
    pending = _pending(step, PERIOD, R)
    r = tl.arange(0, BR)
    h = tl.arange(0, BH)
    grad += c * R * O
    out += c * R * O
    gradients += c * (BH * O)
    acc = tl.zeros((BR, BH), dtype=tl.float32)
    for o0 in range(0, O, BK):
        o = o0 + tl.arange(0, BK)
        mask = (r < R)[:, None] & (o < O)[None, :]
        g = _output_gradient(grad, out, r[:, None] * O + o[None, :], mask, RELU)
        before = tl.load(gradients + h[None, :] * O + o[:, None], mask=(h < pending)[None, :] & (o < O)[:, None],
                         other=0.0)  # fmt: skip
        acc = _dot(g, before, acc, PRECISION)
        tl.store(gradients + (pending + r)[:, None] * O + o[None, :], g, mask=mask)
        if BIAS:
            _sgd_update(bias + c * O + o, tl.sum(g, 0), rate, o < O)
    tl.store(products + c * (BR * BH) + r[:, None] * BH + h[None, :], acc)


@triton.jit(do_not_specialize=["R"])
def deferred_grad_x(w, scales, inputs, gradients, products, rates, step, grad_x, R, I: tl.constexpr, O: tl.constexpr,
                    PERIOD: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                    BR: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Compute the gradient of the inputs, BN columns per program."""
    c = tl.program_id(1).to(tl.int64)
    rate = tl.load(rates + c)
    if rate == 0.0:
        return
    pending = _pending(step, PERIOD, R)
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.arange(0, BR)
    h = tl.arange(0, BH)
    w += c * (O * I)
    gradients += (c * BH + pending) * O
    acc = tl.zeros((BR, BN), dtype=tl.float32)
    for o0 in range(0, O, BM):
        o = o0 + tl.arange(0, BM)
        g = tl.load(gradients + r[:, None] * O + o[None, :], mask=(r < R)[:, None] & (o < O)[None, :], other=0.0)
        scale = tl.load(scales + c * O + o, mask=o < O, other=0.0)
        weights = tl.load(w + o[:, None] * I + i[None, :], mask=(o < O)[:, None] & (i < I)[None, :], other=0.0)
        acc = _dot(g * scale[None, :], weights.to(tl.float32), acc, PRECISION)
    product = tl.load(products + c * (BR * BH) + r[:, None] * BH + h[None, :])
    before = tl.load(inputs + c * (BH * I) + h[:, None] * I + i[None, :],
                     mask=(h < pending)[:, None] & (i < I)[None, :], other=0.0)  # fmt: skip
    acc -= rate * _dot(product, before, tl.zeros((BR, BN), dtype=tl.float32), PRECISION)
    tl.store(grad_x + c * R * I + r[:, None] * I + i[None, :], acc, mask=(r < R)[:, None] & (i < I)[None, :])


@triton.jit(do_not_specialize=["R", "first", "end"])
def add_updates(w, half, scales, inputs, gradients, rates, steps, first, end, R, I: tl.constexpr, O: tl.constexpr,
                PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Add the updates of the steps from ``first`` to ``end`` to the weights, and store these with 16 bits.

    A job that ends before has fewer of these steps. With ``first`` = ``end`` there is no update, and no scale yet.
    """
    c = tl.program_id(1).to(tl.int64)
    rate = tl.load(rates + c)
    pending = (tl.minimum(tl.load(steps + c), end) - first).to(tl.int32) * R
    new = end == first
    if (rate == 0.0) | ((pending <= 0) & (end > first)):
        return
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    h = tl.arange(0, BH)
    w += c * (O * I)
    half += c * (O * I)
    inputs += c * (BH * I)
    at = c * (BH * O) + h[None, :] * O + o[:, None]
    g = tl.load(gradients + at, mask=(h < pending)[None, :] & (o < O)[:, None], other=0.0)
    inverse = 1.0 / tl.load(scales + c * O + o, mask=(o < O) & (end > first), other=float("inf"))
    largest = tl.zeros((BM,), dtype=tl.float32)
    for i0 in range(0, I, BN):
        i = i0 + tl.arange(0, BN)
        mask = (o < O)[:, None] & (i < I)[None, :]
        weights = tl.load(w + o[:, None] * I + i[None, :], mask=mask, other=0.0)
        x = tl.load(inputs + h[:, None] * I + i[None, :], mask=(h < pending)[:, None] & (i < I)[None, :], other=0.0)
        weights -= rate * _dot(g, x, tl.zeros((BM, BN), dtype=tl.float32), PRECISION)
        tl.store(w + o[:, None] * I + i[None, :], weights, mask=mask & (end > first))
        stored = (weights * inverse[:, None]).to(half.dtype.element_ty)
        tl.store(half + o[:, None] * I + i[None, :], stored, mask=mask & (end > first))
        largest = tl.maximum(largest, tl.max(tl.abs(weights), 1))
    shifted = (largest * inverse >= _LARGEST) | (largest * inverse < _LEAST)
    if new | (tl.sum(shifted.to(tl.int32), 0) > 0):
        # The power of two below the largest weight of a row; multiplying by it changes no digits.
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.maximum(power, 2.0**-100) / _POWER
        tl.store(scales + c * O + o, scale, mask=o < O)
        tl.debug_barrier()  # threads read what others have stored
        for i0 in range(0, I, BN):
            i = i0 + tl.arange(0, BN)
            mask = (o < O)[:, None] & (i < I)[None, :]
            weights = tl.load(w + o[:, None] * I + i[None, :], mask=mask, other=0.0)
            stored = (weights * (1.0 / scale)[:, None]).to(half.dtype.element_ty)
            tl.store(half + o[:, None] * I + i[None, :], stored, mask=mask)
