"""``nn.MultiheadAttention``: with keyed dropout of the attention weights, and stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .dropout import Draws, factors
from .layer_registry import LayerSite, StackedLayer, StackedPass, StackingError, stacked_layer
from .layers import linear

Projection = Callable[[Tensor, Tensor, Tensor], Iterable[Tensor]]  # of queries, keys and values, each (N, L, E)
TensorMap = Callable[[Tensor], Tensor]


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask that is added to the scores; in a Boolean mask, True forbids."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


def _attend(
    module: nn.MultiheadAttention, project_in: Projection, project_out: TensorMap, drop: TensorMap,
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, average_attn_weights: bool = True,
    is_causal: bool = False,  # noqa: ARG001  a hint about attn_mask, which is given anyway
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute ``module.forward`` with these projections and this dropout of attention weights."""
    if query.ndim != 3:
        raise StackingError("attention without a dimension for samples")
    if not module.batch_first:
        # Equal inputs stay one tensor, so that they are projected once.
        transposed = {id(x): x.transpose(0, 1) for x in (query, key, value)}
        query, key, value = (transposed[id(x)] for x in (query, key, value))
    q, k, v = (x.reshape(*x.shape[:2], module.num_heads, -1).transpose(1, 2) for x in project_in(query, key, value))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if attn_mask is not None:
        mask = _additive(attn_mask, q)
        scores = scores + (mask if mask.ndim == 2 else mask.reshape(scores.shape))
    if key_padding_mask is not None:
        scores = scores + _additive(key_padding_mask, q)[:, None, None]
    weights = drop(torch.softmax(scores, dim=-1))
    out = project_out((weights @ v).transpose(1, 2).flatten(2))
    if not module.batch_first:
        out = out.transpose(0, 1)
    if not need_weights:
        return out, None
    return out, weights.mean(dim=1) if average_attn_weights else weights


class PlainAttention(TorchFunctionMode):
    """Replaces PyTorch's attention kernels, which ``torch.func`` cannot map over clients, by plain operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            kwargs = {**(kwargs or {}), "need_weights": True}  # PyTorch computes them with plain operations
        return (_plain_attention if func is F.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _plain_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``F.scaled_dot_product_attention``, where True in a mask allows."""
    if dropout_p > 0 or enable_gqa:
        raise StackingError("scaled_dot_product_attention with dropout_p or enable_gqa")
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores + (_additive(~attn_mask, query) if attn_mask.dtype == torch.bool else attn_mask)
    return torch.softmax(scores, dim=-1) @ value


class KeyedAttention(nn.MultiheadAttention):
    """Attention whose dropout draws keyed masks."""

    number: int
    draws: Draws

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Compute ``nn.MultiheadAttention``; inputs without a dimension for samples use PyTorch's own dropout."""
        query: Tensor = args[0] if args else options["query"]
        if not self.training or query.ndim != 3:
            return super().forward(*args, **options)
        return _attend(self, self._project, self.out_proj, lambda x: self.drop(x, self.draws.key), *args, **options)

    def drop(self, weights: Tensor, keys: Tensor | None) -> Tensor:
        """Drop attention weights of the clients with these keys."""
        return weights * factors(keys, self.number, self.dropout, tuple(weights.shape), weights.dtype)

    def _project(self, *inputs: Tensor) -> list[Tensor]:
        assert self.in_proj_weight is not None
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(*params) for params in zip(inputs, weights, biases, strict=True)]


def is_standard(module: nn.MultiheadAttention) -> bool:
    """Return whether one matrix projects queries, keys and values, and nothing is added to them."""
    return module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn


@stacked_layer(nn.MultiheadAttention, KeyedAttention)
def attention(module: nn.MultiheadAttention, site: LayerSite) -> StackedLayer:
    """Stack an attention layer."""
    if not is_standard(module):
        raise StackingError(f"{site.name}: attention with kdim, vdim, add_bias_kv or add_zero_attn")
    size = module.embed_dim
    projection = nn.Linear(size, 3 * size, bias=False, device="meta")
    projection.weight = module.in_proj_weight
    projection.register_parameter("bias", module.in_proj_bias)
    first = linear(projection, LayerSite(f"{site.name}in_proj_", site.kernels))
    last = linear(module.out_proj, LayerSite(f"{site.name}out_proj.", site.kernels))

    def run(context: StackedPass, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        def project_in(*inputs: Tensor) -> list[Tensor]:
            # One product for all inputs, because the SGD update is fused into its backward pass: each input is
            # projected to queries, keys and values, and only what is needed of these is used.
            distinct = {id(x): x for x in inputs}
            slots = {identity: slot for slot, identity in enumerate(distinct)}
            joined = inputs[0] if len(distinct) == 1 else torch.cat(list(distinct.values()), dim=1)
            projected = zip(first.run(context, joined).chunk(3, dim=-1), inputs, strict=True)
            lengths = [x.shape[1] for x in distinct.values()]
            return [part.split(lengths, dim=1)[slots[id(x)]] for part, x in projected]

        def drop(weights: Tensor) -> Tensor:
            if not context.training or not isinstance(module, KeyedAttention):
                return weights
            return module.drop(weights, context.keys)

        return _attend(module, project_in, lambda x: last.run(context, x), drop, *args, **options)

    return StackedLayer(run, self_updating=(*first.self_updating, *last.self_updating))
