"""``nn.MultiheadAttention``: with keyed dropout of the attention weights, and stacked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..kernels.plain import LayerKernels
from .dropout import Draws, factors
from .layers import CannotStack, StackedLayer, Step, linear

Three = tuple[Tensor, Tensor, Tensor]
Enter = Callable[[Tensor, Tensor, Tensor], Three]
"""How queries, keys and values, each (N, L, E), are projected."""


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as what is added to the scores; in one of truth values, True forbids."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


def _attend(
    module: nn.MultiheadAttention,
    enter: Enter,
    leave: Callable[[Tensor], Tensor],
    drop: Callable[[Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,  # says of what kind attn_mask is
) -> tuple[Tensor, Tensor | None]:
    """As ``module.forward``, with these projections and this way to drop weights."""
    if query.ndim != 3:
        raise CannotStack("attention without a dimension for samples")
    if not module.batch_first:
        turned = {id(x): x.transpose(0, 1) for x in (query, key, value)}  # what was the same stays the same
        query, key, value = (turned[id(x)] for x in (query, key, value))
    q, k, v = (x.reshape(*x.shape[:2], module.num_heads, -1).transpose(1, 2) for x in enter(query, key, value))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if attn_mask is not None:
        mask = _added(attn_mask, q)
        scores = scores + (mask if mask.ndim == 2 else mask.reshape(scores.shape))
    if key_padding_mask is not None:
        scores = scores + _added(key_padding_mask, q)[:, None, None]
    weights = drop(torch.softmax(scores, dim=-1))
    out = leave((weights @ v).transpose(1, 2).flatten(2))
    if not module.batch_first:
        out = out.transpose(0, 1)
    if not need_weights:
        return out, None
    return out, weights.mean(dim=1) if average_attn_weights else weights


class PlainAttention(TorchFunctionMode):
    """PyTorch's attention in plain operations: its own kernels cannot be mapped over clients."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is F.scaled_dot_product_attention:
            func = _plain
        elif func is F.multi_head_attention_forward:
            options = {**options, "need_weights": True}  # with these it uses plain operations
        return func(*args, **options)


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As ``F.scaled_dot_product_attention``, where True in a mask allows."""
    if dropout_p > 0 or enable_gqa:
        raise CannotStack("scaled_dot_product_attention with dropout_p or enable_gqa")
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores + (_added(~attn_mask, query) if attn_mask.dtype == torch.bool else attn_mask)
    return torch.softmax(scores, dim=-1) @ value


class KeyedAttention(nn.MultiheadAttention):
    """Attention with dropout, whose masks are keyed."""

    number: int
    draws: Draws

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention``; without a dimension for samples it draws as that does."""
        query: Tensor = args[0] if args else options["query"]
        if not self.training or query.ndim != 3:
            return super().forward(*args, **options)
        return _attend(self, self._enter, self.out_proj, lambda x: self.dropped(x, self.draws.key), *args, **options)

    def dropped(self, weights: Tensor, keys: Tensor | None) -> Tensor:
        """The attention weights of the clients with these keys, with some dropped."""
        return weights * factors(keys, self.number, self.dropout, tuple(weights.shape), weights.dtype)

    def _enter(self, query: Tensor, key: Tensor, value: Tensor) -> Three:
        assert self.in_proj_weight is not None
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, *own) for x, *own in zip((query, key, value), weights, biases, strict=True))
        return q, k, v


def is_usual(module: nn.MultiheadAttention) -> bool:
    """Whether queries, keys and values are projected by one matrix, and nothing is added to them."""
    return module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn


def attention(module: nn.MultiheadAttention, name: str, products: LayerKernels) -> StackedLayer:
    """Attention for many clients."""
    if not is_usual(module):
        raise CannotStack(f"{name}: attention with kdim, vdim, add_bias_kv or add_zero_attn")
    width = module.embed_dim
    projection = nn.Linear(width, 3 * width, bias=False, device="meta")
    projection.weight = module.in_proj_weight
    projection.register_parameter("bias", module.in_proj_bias)
    first, last = linear(projection, f"{name}in_proj_", products), linear(module.out_proj, f"{name}out_proj.", products)

    def run(step: Step, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        def enter(*inputs: Tensor) -> Three:
            # One product for all, since it also moves the weights: of each input some outputs are left aside.
            apart = list({id(x): x for x in inputs}.values())
            found = first.run(step, apart[0] if len(apart) == 1 else torch.cat(apart, dim=1)).chunk(3, dim=-1)
            lengths = [x.shape[1] for x in apart]
            q, k, v = (
                part.split(lengths, dim=1)[next(i for i, other in enumerate(apart) if other is x)]
                for part, x in zip(found, inputs, strict=True)
            )
            return q, k, v

        def drop(weights: Tensor) -> Tensor:
            if step.rates is None or not isinstance(module, KeyedAttention):
                return weights
            return module.dropped(weights, step.keys)

        return _attend(module, enter, lambda x: last.run(step, x), drop, *args, **options)

    return StackedLayer(run, moved=(*first.moved, *last.moved))
