"""Compiles the Triton kernels of a model's layers for an NVIDIA H100 or H200, without a device.

This is a program of its own: kernels of a process that interprets them cannot be compiled.
"""

# Triton has no types that a checker knows.
# mypy: ignore-errors

from __future__ import annotations

import json
import re
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from defedavg.training.kernels import triton_deferred, triton_half, triton_kernels, triton_linear, triton_norm
from defedavg.training.kernels.deferred import DeferredUpdates
from defedavg.training.kernels.plain import Block, LayerWeights, NormalisedConv, Window
from defedavg.training.kernels.triton_layers import TritonLayerKernels

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8"}
OPTIONS = ("num_warps", "num_stages")


# As an operand that is stored, too, ``b`` has one buffer too few for a product that reads it later.
@triton.jit
def shared_operand(a, b, kept, out, K: tl.constexpr):  # noqa: N803
    m = tl.arange(0, 64)
    n = tl.arange(0, 16)
    acc = tl.zeros((64, 16), dtype=tl.float32)
    for k0 in range(0, K, 64):
        k = k0 + tl.arange(0, 64)
        left = tl.load(a + m[:, None] * K + k[None, :])
        right = tl.load(b + n[:, None] * K + k[None, :])
        acc = tl.dot(left, tl.trans(right), acc, input_precision="tf32")
        tl.store(kept + n[:, None] * K + k[None, :], right)
    tl.store(out + m[:, None] * 16 + n[None, :], acc)


class Launches:
    """Stands for a kernel, and compiles it for every launch with other types or constants."""

    def __init__(self, kernel: Any, found: dict[str, list[str]]) -> None:
        self._kernel, self._found = kernel, found

    def __getitem__(self, _grid: object) -> Any:
        return self._launch

    def _launch(self, *values: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        given = dict(zip(self._kernel.arg_names, values, strict=False)) | named
        signature, constants = {}, {}
        for number, parameter in enumerate(self._kernel.params):
            value = given[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[(number,)] = "constexpr", value
            else:
                number_type = "fp32" if isinstance(value, float) else "i32"
                signature[parameter.name] = TYPES[value.dtype] if isinstance(value, Tensor) else number_type
        label = f"{self._kernel.__name__} {sorted(signature.items())} {sorted(constants.items())} {options}"
        if label not in self._found:
            pointers = (number for number, kind in enumerate(signature.values()) if kind.startswith("*"))
            aligned = {(number,): [["tt.divisibility", 16]] for number in pointers}
            source = ASTSource(self._kernel, signature, constants, aligned)
            compiled = triton.compile(source, target=HOPPER, options=options)
            self._found[label] = shared_buffers(compiled.asm["ttgir"])


def shared_buffers(code: str) -> list[str]:
    """Return the buffers in shared memory that an asynchronous product and something else in the kernel read."""
    source = dict(re.findall(r"(%\S+) = ttg\.memdesc_(?:index|trans|subslice) (%[\w#]+)", code))

    def buffer(name: str) -> str:
        while name in source:
            name = source[name]
        return name

    products = re.findall(r"ttng\.warp_group_dot (%[\w#]+), (%[\w#]+), .*isAsync = true", code)
    read_later = {buffer(name) for operands in products for name in operands}
    loaded = {buffer(name) for name in re.findall(r"ttg\.local_load (%[\w#]+)", code)}
    return sorted(read_later & loaded)


def layers() -> None:
    """Do a step of the layers of the paper's CNN and of one with more samples in a mini-batch."""
    kernels = TritonLayerKernels("tf32")
    for rows in (10, 32, 50):
        rates = torch.ones(1)
        for outs, ins in ((512, 1024), (10, 512)):
            weights = LayerWeights(torch.zeros(1, outs, ins), torch.zeros(1, outs), rates)
            _, saved = kernels.linear(torch.zeros(1, rows, ins), weights, True)
            kernels.linear_backward(torch.zeros(1, rows, outs), saved, weights, True, True)
        if rows <= 32:
            weight = torch.zeros(1, 512, 1024)
            deferred = DeferredUpdates.of(weight, rows, torch.zeros(1, dtype=torch.int64))
            weights = LayerWeights(weight, torch.zeros(1, 512), rates, deferred=deferred)
            _, saved = kernels.linear(torch.zeros(1, rows, 1024), weights, True)
            kernels.linear_backward(torch.zeros(1, rows, 512), saved, weights, True, True)
            kernels.add_updates(weight, deferred, rates, torch.ones(1, dtype=torch.int64), (0, 1), rows)
    for channels, outs, side, size, padding in (
        (1, 32, 28, 5, 0),
        (3, 32, 32, 5, 0),
        (32, 64, 12, 5, 0),
        (16, 16, 32, 3, 1),
    ):
        pool = padding == 0
        window = Window((size, size), (1, 1), (padding, padding), relu=True, pool=pool)
        weights = LayerWeights(torch.zeros(1, outs, size, size, channels), torch.zeros(1, outs), torch.ones(1))
        x = torch.zeros(10, side, side, channels)
        out, saved = kernels.conv(x, weights, window)
        kernels.conv_backward(torch.zeros_like(out), saved, x.shape, weights, window, channels > 3)


def residual_blocks() -> None:
    """Do a step of the blocks of the built-in ResNet, and of others with the smallest tiles: single channels, B = 1."""
    kernels, rates = TritonLayerKernels("tf32"), torch.ones(1)

    def unit(ins: int, outs: int, size: int, stride: int, groups: int) -> NormalisedConv:
        weight = LayerWeights(torch.zeros(1, outs, size, size, ins), None, rates, (True, False))
        norm = LayerWeights(torch.ones(1, outs), torch.zeros(1, outs), rates)
        window = Window((size, size), (stride, stride), (size // 2, size // 2))
        return NormalisedConv(weight, window, norm, groups, 1e-5)

    def block(ins: int, outs: int, stride: int, groups: int) -> Block:
        shortcut = None if (ins, stride) == (outs, 1) else unit(ins, outs, 1, stride, groups)
        return Block(unit(ins, outs, 3, stride, groups), unit(outs, outs, 3, 1, groups), shortcut)

    resnet = [Block(unit(3, 16, 3, 1, 4)), block(16, 16, 1, 4), block(16, 32, 2, 4), block(32, 64, 2, 4)]
    small = [Block(unit(3, 1, 3, 2, 1)), block(1, 1, 1, 1), block(1, 4, 3, 4)]
    for shape, blocks, needs_x in (((10, 32, 32, 3), resnet, False), ((1, 9, 7, 3), small, True)):
        out, saved = kernels.blocks(torch.zeros(shape), blocks)
        kernels.blocks_backward(torch.zeros_like(out), saved, blocks, needs_x=needs_x)


def main() -> None:
    """Print the shared buffers of every compiled kernel, as JSON."""
    found: dict[str, list[str]] = {}
    for module in (triton_kernels, triton_linear, triton_deferred, triton_half, triton_norm):
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, triton.JITFunction) and not name.startswith("_"):
                setattr(module, name, Launches(kernel, found))
    layers()
    residual_blocks()
    planted: dict[str, list[str]] = {}
    one, two = torch.zeros(64, 256), torch.zeros(16, 256)
    Launches(shared_operand, planted)[1,](one, two, two, one, K=256, num_warps=4, num_stages=4)
    print(json.dumps({"kernels": found, "planted": planted}))


if __name__ == "__main__":
    main()
