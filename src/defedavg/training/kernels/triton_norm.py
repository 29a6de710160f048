"""Triton kernels of group normalisation with ReLU: the SGD update of scale and shift follows the backward pass.

Values are (C·B, pixels, channels), one C for each client. One program computes one sample, whose values are read once.
The results of a client depend on its own numbers only. Kernels skip clients with learning rate zero.
"""

# Triton's language has no types that a checker knows, and its arguments are named as in the formulas.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sums(values, P: tl.constexpr, G: tl.constexpr, CG: tl.constexpr):
    """Return the sum of every group of channels, in a shape that broadcasts with (pixels, groups, channels)."""
    return tl.sum(tl.sum(tl.reshape(values, (P, G, CG)), 2), 0)[None, :, None]


@triton.jit
def _by_channel(values, BP: tl.constexpr, G: tl.constexpr, CG: tl.constexpr):
    return tl.reshape(tl.broadcast_to(values, (BP, G, CG)), (BP, G * CG))


@triton.jit(do_not_specialize=["B", "P"])
def group_norm(x, weight, bias, rates, out, moments, B, P, eps, G: tl.constexpr, CG: tl.constexpr, RELU: tl.constexpr,
               BIAS: tl.constexpr, SKIP: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """Compute normalised values times weight plus bias, and store mean and inverse deviation of every group."""
    sample = tl.program_id(0).to(tl.int64)
    c = sample // B
    if SKIP:
        if tl.load(rates + c) == 0.0:
            return
    CHANNELS: tl.constexpr = G * CG
    pixel = tl.arange(0, BP)
    channel = tl.arange(0, CHANNELS)
    at = sample * P * CHANNELS + pixel[:, None] * CHANNELS + channel[None, :]
    inside = (pixel < P)[:, None] & (channel < CHANNELS)[None, :]
    values = tl.load(x + at, mask=inside, other=0.0)
    count = (P * CG).to(tl.float32)
    mean = _sums(values, BP, G, CG) / count
    centred = tl.where(inside, values - _by_channel(mean, BP, G, CG), 0.0)
    inverse = tl.rsqrt(_sums(centred * centred, BP, G, CG) / count + eps)
    scale = tl.load(weight + c * CHANNELS + channel)
    result = centred * _by_channel(inverse, BP, G, CG) * scale[None, :]
    if BIAS:
        result += tl.load(bias + c * CHANNELS + channel)[None, :]
    if RELU:
        result = tl.where(result <= 0, 0.0, result)
    tl.store(out + at, result, mask=inside)
    group = tl.arange(0, G)
    tl.store(moments + sample * (2 * G) + group, tl.reshape(mean, (G,)))
    tl.store(moments + sample * (2 * G) + G + group, tl.reshape(inverse, (G,)))


@triton.jit(do_not_specialize=["B", "P"])
def group_norm_backward(grad, x, out, moments, weight, rates, grad_x, sums, B, P, G: tl.constexpr, CG: tl.constexpr,
                        RELU: tl.constexpr, INPUTS: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """Compute the gradient of the inputs, and the sums over pixels that the gradients of weight and bias are."""
    sample = tl.program_id(0).to(tl.int64)
    c = sample // B
    if tl.load(rates + c) == 0.0:
        return
    CHANNELS: tl.constexpr = G * CG
    pixel = tl.arange(0, BP)
    channel = tl.arange(0, CHANNELS)
    group = tl.arange(0, G)
    at = sample * P * CHANNELS + pixel[:, None] * CHANNELS + channel[None, :]
    inside = (pixel < P)[:, None] & (channel < CHANNELS)[None, :]
    g = tl.load(grad + at, mask=inside, other=0.0)
    if RELU:
        g = tl.where(tl.load(out + at, mask=inside, other=0.0) <= 0, 0.0, g)
    mean = tl.load(moments + sample * (2 * G) + group)[None, :, None]
    inverse = _by_channel(tl.load(moments + sample * (2 * G) + G + group)[None, :, None], BP, G, CG)
    values = tl.load(x + at, mask=inside, other=0.0)
    normal = tl.where(inside, (values - _by_channel(mean, BP, G, CG)) * inverse, 0.0)
    tl.store(sums + sample * (2 * CHANNELS) + channel, tl.sum(g * normal, 0))
    tl.store(sums + sample * (2 * CHANNELS) + CHANNELS + channel, tl.sum(g, 0))
    if INPUTS:
        scaled = g * tl.load(weight + c * CHANNELS + channel)[None, :]
        count = (P * CG).to(tl.float32)
        along = _sums(scaled * normal, BP, G, CG) / count
        level = _sums(scaled, BP, G, CG) / count
        result = (scaled - _by_channel(level, BP, G, CG) - normal * _by_channel(along, BP, G, CG)) * inverse
        tl.store(grad_x + at, result, mask=inside)


@triton.jit(do_not_specialize=["B"])
def norm_step(sums, weight, bias, rates, B, CHANNELS: tl.constexpr, WEIGHT: tl.constexpr,
              BIAS: tl.constexpr):  # fmt: skip
    """Update weight and bias by the sums of all samples of a client, added in their order."""
    c = tl.program_id(0).to(tl.int64)
    rate = tl.load(rates + c)
    if rate == 0.0:
        return
    channel = tl.arange(0, CHANNELS)
    along = tl.zeros((CHANNELS,), dtype=tl.float32)
    level = tl.zeros((CHANNELS,), dtype=tl.float32)
    for sample in range(B):
        at = sums + (c * B + sample) * (2 * CHANNELS) + channel
        along += tl.load(at)
        level += tl.load(at + CHANNELS)
    to = c * CHANNELS + channel
    if WEIGHT:
        tl.store(weight + to, tl.load(weight + to) - rate * along)
    if BIAS:
        tl.store(bias + to, tl.load(bias + to) - rate * level)
