"""Triton kernels of fully connected layers whose updates are added to the weights once in several steps.

``deferred.py`` has the formulas. PENDING rows of X and G belong to the steps since the last addition.
"""

# Triton's language has no types that a checker knows, and its arguments are named as in the formulas.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import _dot


@triton.jit(do_not_specialize=["R"])
def deferred_linear(x, w, scales, inputs, gradients, bias, rates, step, out, R, I: tl.constexpr, O: tl.constexpr,
                    PERIOD: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
                    BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Compute a fully connected layer: rows are outputs, columns samples."""
    c = tl.program_id(1).to(tl.int64)
    rate = tl.load(rates + c)
    if rate == 0.0:
        return
    pending = (tl.load(step) % PERIOD).to(tl.int32) * R
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    r = tl.arange(0, BR)
    h = tl.arange(0, BH)
    w += c * (O * I)
    x += c * R * I
    inputs += c * (BH * I)
    acc = tl.zeros((BM, BR), dtype=tl.float32)
    gram = tl.zeros((BH, BR), dtype=tl.float32)
    for k0 in range(0, I, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(w + o[:, None] * I + k[None, :], mask=(o < O)[:, None] & (k < I)[None, :], other=0.0)
        b = tl.load(x + r[None, :] * I + k[:, None], mask=(r < R)[None, :] & (k < I)[:, None], other=0.0)
        acc = _dot(a.to(tl.float32), b, acc, PRECISION)
        before = tl.load(inputs + h[:, None] * I + k[None, :], mask=(h < pending)[:, None] & (k < I)[None, :],
                         other=0.0)  # fmt: skip
        gram = _dot(before, b, gram, PRECISION)
    acc *= tl.load(scales + c * O + o, mask=o < O, other=0.0)[:, None]
    at = c * (BH * O) + h[None, :] * O + o[:, None]
    g = tl.load(gradients + at, mask=(h < pending)[None, :] & (o < O)[:, None], other=0.0)
    acc -= rate * _dot(g, gram, tl.zeros((BM, BR), dtype=tl.float32), PRECISION)
    if BIAS:
        acc += tl.load(bias + c * O + o, mask=o < O, other=0.0)[:, None]
    if RELU:
        acc = tl.where(acc <= 0, 0.0, acc)
    tl.store(out + c * R * O + r[None, :] * O + o[:, None], acc, mask=(r < R)[None, :] & (o < O)[:, None])


@triton.jit(do_not_specialize=["R"])
def deferred_step(grad, out, x, w, scales, inputs, gradients, bias, rates, step, grad_x, R, I: tl.constexpr,
                  O: tl.constexpr, PERIOD: tl.constexpr, RELU: tl.constexpr, NEEDS_X: tl.constexpr,
                  BIAS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
                  BH: tl.constexpr):  # fmt: skip
    """Compute the gradient of the inputs, update the bias, and keep inputs and gradient, BN columns per program."""
    c = tl.program_id(1).to(tl.int64)
    rate = tl.load(rates + c)
    if rate == 0.0:
        return
    pending = (tl.load(step) % PERIOD).to(tl.int32) * R
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.arange(0, BR)
    h = tl.arange(0, BH)
    grad += c * R * O
    out += c * R * O
    w += c * (O * I)
    inputs += c * (BH * I)
    gradients += c * (BH * O)
    acc = tl.zeros((BR, BN), dtype=tl.float32)
    gram = tl.zeros((BR, BH), dtype=tl.float32)
    for o0 in range(0, O, BM):
        o = o0 + tl.arange(0, BM)
        outer = (r < R)[:, None] & (o < O)[None, :]
        at = r[:, None] * O + o[None, :]
        g = tl.load(grad + at, mask=outer, other=0.0)
        if RELU:
            g = tl.where(tl.load(out + at, mask=outer, other=0.0) <= 0, 0.0, g)
        if NEEDS_X:
            weights = tl.load(w + o[:, None] * I + i[None, :], mask=(o < O)[:, None] & (i < I)[None, :], other=0.0)
            scale = tl.load(scales + c * O + o, mask=o < O, other=0.0)
            acc = _dot(g * scale[None, :], weights.to(tl.float32), acc, PRECISION)
            before = tl.load(gradients + h[None, :] * O + o[:, None], mask=(h < pending)[None, :] & (o < O)[:, None],
                             other=0.0)  # fmt: skip
            gram = _dot(g, before, gram, PRECISION)
        if tl.program_id(0) == 0:
            tl.store(gradients + (pending + r)[:, None] * O + o[None, :], g, mask=outer)
            if BIAS:
                biases = bias + c * O + o
                tl.store(biases, tl.load(biases, mask=o < O, other=0.0) - rate * tl.sum(g, 0), mask=o < O)
    inner = (r < R)[:, None] & (i < I)[None, :]
    if NEEDS_X:
        before = tl.load(inputs + h[:, None] * I + i[None, :], mask=(h < pending)[:, None] & (i < I)[None, :],
                         other=0.0)  # fmt: skip
        acc -= rate * _dot(gram, before, tl.zeros((BR, BN), dtype=tl.float32), PRECISION)
        tl.store(grad_x + c * R * I + r[:, None] * I + i[None, :], acc, mask=inner)
    xs = tl.load(x + c * R * I + r[:, None] * I + i[None, :], mask=inner, other=0.0)
    tl.store(inputs + (pending + r)[:, None] * I + i[None, :], xs, mask=inner)


@triton.jit(do_not_specialize=["R", "first", "end"])
def add_updates(w, half, scales, inputs, gradients, rates, steps, first, end, R, I: tl.constexpr, O: tl.constexpr,
                PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Add the updates of the steps from ``first`` to ``end`` to the weights, and store these with 16 bits.

    A job that ends before has fewer of these steps. With ``first`` = ``end`` there is no update.
    """
    c = tl.program_id(1).to(tl.int64)
    rate = tl.load(rates + c)
    pending = (tl.minimum(tl.load(steps + c), end) - first).to(tl.int32) * R
    if (rate == 0.0) | ((end > first) & (pending <= 0)):
        return
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    h = tl.arange(0, BH)
    w += c * (O * I)
    half += c * (O * I)
    inputs += c * (BH * I)
    at = c * (BH * O) + h[None, :] * O + o[:, None]
    g = tl.load(gradients + at, mask=(h < pending)[None, :] & (o < O)[:, None], other=0.0)
    largest = tl.zeros((BM,), dtype=tl.float32)
    for i0 in range(0, I, BN):
        i = i0 + tl.arange(0, BN)
        mask = (o < O)[:, None] & (i < I)[None, :]
        weights = tl.load(w + o[:, None] * I + i[None, :], mask=mask, other=0.0)
        x = tl.load(inputs + h[:, None] * I + i[None, :], mask=(h < pending)[:, None] & (i < I)[None, :], other=0.0)
        weights -= rate * _dot(g, x, tl.zeros((BM, BN), dtype=tl.float32), PRECISION)
        tl.store(w + o[:, None] * I + i[None, :], weights, mask=mask & (pending > 0))
        largest = tl.maximum(largest, tl.max(tl.abs(weights), 1))
    # The power of two below the largest weight of a row, which becomes at most 2¹⁵; smaller ones keep their digits.
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, 2.0**-100)
    tl.store(scales + c * O + o, power * 2.0**-14, mask=o < O)
    tl.debug_barrier()  # threads read what others have stored
    for i0 in range(0, I, BN):
        i = i0 + tl.arange(0, BN)
        mask = (o < O)[:, None] & (i < I)[None, :]
        weights = tl.load(w + o[:, None] * I + i[None, :], mask=mask, other=0.0)
        stored = (weights * (2.0**14 / power)[:, None]).to(half.dtype.element_ty)
        tl.store(half + o[:, None] * I + i[None, :], stored, mask=mask)
