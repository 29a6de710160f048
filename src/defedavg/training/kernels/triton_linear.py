"""Triton kernels of fully connected layers: forward, and backward with a fused SGD update.

The results of a client depend on its own numbers only. Kernels skip clients with learning rate zero.
"""

# Triton's language has no types that a checker knows, and its arguments are named as in the formulas.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import _dot, _output_gradient, _sgd_update


@triton.jit(do_not_specialize=["R"])
def linear(x, w, bias, rates, out, R, I: tl.constexpr, O: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr,
           SKIP: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           BK: tl.constexpr):  # fmt: skip
    """Compute a fully connected layer: rows are outputs, columns samples, because there are more outputs."""
    c = tl.program_id(2).to(tl.int64)
    if SKIP:
        if tl.load(rates + c) == 0.0:
            return
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    r = tl.program_id(1) * BN + tl.arange(0, BN)
    w += c * (O * I)
    x += c * R * I
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, I, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(w + o[:, None] * I + k[None, :], mask=(o < O)[:, None] & (k < I)[None, :], other=0.0)
        b = tl.load(x + r[None, :] * I + k[:, None], mask=(r < R)[None, :] & (k < I)[:, None], other=0.0)
        acc = _dot(a, b, acc, PRECISION)
    if BIAS:
        acc += tl.load(bias + c * O + o, mask=o < O, other=0.0)[:, None]
    if RELU:
        acc = tl.where(acc <= 0, 0.0, acc)
    tl.store(out + c * R * O + r[None, :] * O + o[:, None], acc, mask=(r < R)[None, :] & (o < O)[:, None])


@triton.jit(do_not_specialize=["R"])
def linear_step(grad, out, x, w, target, bias, rates, grad_x, R,
                I: tl.constexpr, O: tl.constexpr, RELU: tl.constexpr, INPUTS: tl.constexpr, WEIGHT: tl.constexpr,
                BIAS: tl.constexpr, SEPARATE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Compute the gradient of the inputs and the SGD update in one pass over the weights, BN columns per program.

    With SEPARATE the update is subtracted from ``target`` instead of the weights.
    """
    c = tl.program_id(1).to(tl.int64)
    rate = tl.load(rates + c)
    if rate == 0.0:
        return
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.arange(0, BR)
    inner = (r < R)[:, None] & (i < I)[None, :]
    xs = tl.load(x + c * R * I + r[:, None] * I + i[None, :], mask=inner, other=0.0)
    grad += c * R * O
    out += c * R * O
    w += c * (O * I)
    acc = tl.zeros((BR, BN), dtype=tl.float32)
    for o0 in range(0, O, BM):
        o = o0 + tl.arange(0, BM)
        outer = (r < R)[:, None] & (o < O)[None, :]
        g = _output_gradient(grad, out, r[:, None] * O + o[None, :], outer, RELU)
        if INPUTS or WEIGHT:
            tile_mask = (o < O)[:, None] & (i < I)[None, :]
            to = w + o[:, None] * I + i[None, :]
            weights = tl.load(to, mask=tile_mask, other=0.0)
            if INPUTS:
                acc = _dot(g, weights, acc, PRECISION)
            if WEIGHT:
                gradient = _dot(tl.trans(g), xs, tl.zeros((BM, BN), dtype=tl.float32), PRECISION)
                if SEPARATE:
                    _sgd_update(target + c * (O * I) + o[:, None] * I + i[None, :], gradient, rate, tile_mask)
                else:
                    tl.store(to, weights - rate * gradient, mask=tile_mask)
        if BIAS:
            if tl.program_id(0) == 0:
                _sgd_update(bias + c * O + o, tl.sum(g, 0), rate, o < O)
    if INPUTS:
        tl.store(grad_x + c * R * I + r[:, None] * I + i[None, :], acc, mask=inner)
