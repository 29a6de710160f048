"""Kernels of stacked layers with Triton, for float32 weights; plain operations compute the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from . import triton_deferred, triton_linear
from .deferred import PENDING_ROWS, DeferredUpdates
from .plain import Gradient, LayerWeights, Saved
from .triton_configs import blocks, filled, launch_config, tile_for
from .triton_normalised import TritonNormalised

ASYNCHRONOUS_ROWS = 32  # with more rows, a product uses the tensor cores' asynchronous instruction
ROWS = 64  # with more samples per client, plain operations compute the backward pass of a fully connected layer


class TritonLayerKernels(TritonNormalised):
    """One kernel each for the forward and the backward pass of a layer."""

    skips_zero_rates = True

    def __init__(self, precision: str) -> None:
        super().__init__(precision)
        self.defers_updates = precision == "tf32"

    def linear(self, x: Tensor, params: LayerWeights, relu: bool) -> tuple[Tensor, Saved]:
        """Do what ``LayerKernels.linear`` does."""
        clients, rows, ins = x.shape
        outs = params.weight.shape[1]
        x = x.contiguous()
        out = x.new_empty((clients, rows, outs))
        if params.deferred is not None:
            self._deferred_linear(x, params, params.deferred, relu, out)
            return out, (x, out)
        config = launch_config("linear", BM=outs, BN=rows, BK=ins)
        grid = (blocks(outs, config["BM"]), blocks(rows, config["BN"]), clients)
        triton_linear.linear[grid](
            x, params.weight, *filled(x, params.bias, params.rates), out, rows, I=ins, O=outs, RELU=relu,
            BIAS=params.bias is not None, SKIP=params.rates is not None, PRECISION=self._precision, **config,
        )  # fmt: skip
        return out, (x, out)

    def linear_backward(self, grad: Tensor, saved: Saved, params: LayerWeights, relu: bool, needs_x: bool) -> Gradient:
        """Do what ``LayerKernels.linear_backward`` does."""
        x, out = saved
        clients, rows, ins = x.shape
        if params.deferred is not None:
            return self._deferred_step(grad.contiguous(), saved, params, params.deferred, relu, needs_x)
        if rows > ROWS:
            return super().linear_backward(grad, saved, params, relu, needs_x)
        outs = params.weight.shape[1]
        grad_x = torch.empty_like(x) if needs_x else x
        config = launch_config("linear_step", BM=outs, BN=ins)
        if rows > ASYNCHRONOUS_ROWS:  # see triton_deferred.keep_inputs: here, the weights are read and stored
            config["num_stages"] = 1
        triton_linear.linear_step[blocks(ins, config["BN"]), clients](
            grad.contiguous(), out, x, params.weight, params.updated_weight,
            *filled(x, params.updated_bias, params.rates), grad_x, rows, I=ins, O=outs, RELU=relu, INPUTS=needs_x,
            WEIGHT=params.trainable[0], BIAS=params.trainable[1], SEPARATE=params.targets[0] is not None,
            PRECISION=self._precision, BR=tile_for(rows, ROWS), **config,
        )  # fmt: skip
        return grad_x if needs_x else None

    def _deferred_linear(
        self, x: Tensor, params: LayerWeights, deferred: DeferredUpdates, relu: bool, out: Tensor
    ) -> None:
        (clients, rows, ins), outs = x.shape, out.shape[-1]
        bias, rates = filled(x, params.bias, params.rates)
        tiles = {"PERIOD": deferred.period, "BR": tile_for(rows, ROWS), "BH": PENDING_ROWS}
        products = x.new_empty((clients, tiles["BR"], tiles["BH"]))
        triton_deferred.keep_inputs[clients,](
            x, deferred.inputs, rates, deferred.step, products, rows, I=ins, PRECISION=self._precision, **tiles,
            **launch_config("keep", BK=ins),
        )  # fmt: skip
        config = launch_config("deferred_linear", BM=outs, BK=ins)
        triton_deferred.deferred_linear[blocks(outs, config["BM"]), clients](
            x, deferred.weight, deferred.scales, deferred.gradients, products, bias, rates, deferred.step, out, rows,
            I=ins, O=outs, RELU=relu, BIAS=params.bias is not None, PRECISION=self._precision, **tiles, **config,
        )  # fmt: skip

    def _deferred_step(
        self, grad: Tensor, saved: Saved, params: LayerWeights, deferred: DeferredUpdates, relu: bool, needs_x: bool
    ) -> Gradient:
        x, out = saved
        (clients, rows, ins), outs = x.shape, out.shape[-1]
        bias, rates = filled(x, params.bias, params.rates)
        tiles = {"PERIOD": deferred.period, "BR": tile_for(rows, ROWS), "BH": PENDING_ROWS}
        products = x.new_empty((clients, tiles["BR"], tiles["BH"]))
        triton_deferred.keep_gradients[clients,](
            grad, out, deferred.gradients, bias, rates, deferred.step, products, rows, O=outs, RELU=relu,
            BIAS=params.trainable[1], PRECISION=self._precision, **tiles, **launch_config("keep", BK=outs),
        )  # fmt: skip
        if not needs_x:
            return None
        grad_x, config = torch.empty_like(x), launch_config("deferred_grad_x", BM=outs, BN=ins)
        triton_deferred.deferred_grad_x[blocks(ins, config["BN"]), clients](
            deferred.weight, deferred.scales, deferred.inputs, deferred.gradients, products, rates, deferred.step,
            grad_x, rows, I=ins, O=outs, PRECISION=self._precision, **tiles, **config,
        )  # fmt: skip
        return grad_x

    def add_updates(
        self, weight: Tensor, deferred: DeferredUpdates, rates: Tensor, steps: Tensor, between: tuple[int, int],
        size: int,
    ) -> None:  # fmt: skip
        """Do what ``LayerKernels.add_updates`` says."""
        clients, outs, ins = weight.shape
        config = launch_config("add_updates", BM=outs, BN=ins)
        triton_deferred.add_updates[blocks(outs, config["BM"]), clients](
            weight, deferred.weight, deferred.scales, deferred.inputs, deferred.gradients, rates, steps, *between, size,
            I=ins, O=outs, PRECISION=self._precision, BH=PENDING_ROWS, **config,
        )  # fmt: skip
