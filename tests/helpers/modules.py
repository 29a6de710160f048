"""Modules of many kinds, by name, each with its stacked form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from defedavg.tasks import Task, build, make_task
from helpers.small_runs import CLIENTS

ENTER = 64


class Residual(nn.Module):
    """Functions between layers, dropout, and parameters outside of layers."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(ENTER, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(p)
        self.scale, self.heat = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(x.flatten(1)))
        out: Tensor = self.leave(hidden + (1 + self.scale) * F.gelu(self.drop(self.inner(hidden))))
        return out * self.heat.exp()


class Convolutions(nn.Module):
    """Layers in nested sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.4))
        self.classify = nn.Sequential(nn.Linear(36, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classify(self.features(x).view(x.size(0), -1))
        return out


class Language(nn.Module):
    """Attention in plain operations, with an infinite mask and a table of positions."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(7, 8), nn.Embedding(4, 8)
        self.norm, self.enter, self.leave = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(8, 3)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), float("-inf")), 1))

    def forward(self, x: Tensor) -> Tensor:
        samples, length = x.shape
        hidden = self.drop(self.words(x) + self.positions(torch.arange(length)))
        parts = self.enter(self.norm(hidden)).chunk(3, dim=2)
        q, k, v = (part.view(samples, length, 2, 4).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        hidden = hidden + self.leave(seen.transpose(1, 2).reshape(samples, length, 8))
        out: Tensor = self.last(hidden[:, -1])
        return out


class Tied(Language):
    """Two layers with one weight matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.again.weight = self.leave.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.again(self.words(x)).mean(1)[:, :3]
        return out


class Encoder(nn.Module):
    """PyTorch's own Transformer, with a token for the class and learned positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(7, 8), nn.Parameter(torch.zeros(1, 5, 8))
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, **{"batch_first": True, **options})
        self.samples_second = not layer.self_attn.batch_first
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.words(x)], dim=1)
        tokens = tokens + self.positions
        tokens = self.body(tokens.transpose(0, 1)).transpose(0, 1) if self.samples_second else self.body(tokens)
        out: Tensor = self.last(tokens[:, 0])
        return out


class Cross(nn.Module):
    """Attention of one sequence to another."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys = self.first(x[:, 0]), self.second(x[:, 0, :5])
        padding = x[:, 0, :5, 0] > 1.0
        out: Tensor = self.last(self.attend(queries, keys, value=keys, key_padding_mask=padding)[0].mean(1))
        return out


class Recurrent(nn.Module):
    """A recurrent module over words; its first state depends on the text."""

    def __init__(self, kind: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.words, self.net = nn.Embedding(7, 3), kind(3, 4, **options)
        self.last, self.is_lstm = nn.Linear(4 * (1 + self.net.bidirectional), 3), kind is nn.LSTM

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x)
        first = words.mean((1, 2)).expand(self.net.num_layers * (1 + self.net.bidirectional), 4, -1).transpose(1, 2)
        states = (first.contiguous(), 2 * first.contiguous()) if self.is_lstm else first.contiguous()
        out, last = self.net(words if self.net.batch_first else words.transpose(0, 1), states)
        mean = out.mean(1 if self.net.batch_first else 0)
        last = last[0] + last[1] if self.is_lstm else last
        scores: Tensor = self.last(mean) + last.sum(0)[:, :3]
        return scores


class Around(nn.Module):
    """A chain whose inputs are changed by a function."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(ENTER, 8), nn.Tanh(), nn.Linear(8, 3))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(self.change(x))
        return out


class Again(nn.Module):
    """One layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.twice = nn.Linear(ENTER, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.twice(torch.tanh(self.twice(self.enter(x.flatten(1)))))
        return out


class Backwards(nn.Sequential):
    """A subclass of Sequential that calls its layers in reverse order."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


class Average(nn.Module):
    """A buffer that training updates."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(ENTER, 3))
        self.register_buffer("level", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        if self.training:
            self.level.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return out - self.level


class NormalisedTwice(nn.Module):
    """One layer with running statistics that is used twice, with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(144, 3)
        self.norm, self.last = nn.BatchNorm2d(4), nn.BatchNorm1d(3, affine=False, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.enter(x)))
        hidden = hidden + self.norm(self.inner(hidden))
        out: Tensor = self.last(self.leave(hidden.flatten(1)))
        return out


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(ENTER, 8), nn.ReLU(), nn.Linear(8, 3))
    net[2].register_forward_hook(lambda _, args, out: out + 1)
    return net


def frozen() -> nn.Module:
    net = Residual()
    net.inner.requires_grad_(False)
    net.leave.bias.requires_grad_(False)
    net.scale.requires_grad_(False)
    return net


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "resnet": ("chain", lambda: build("resnet", (1, 8, 8), 3)),
    "transformer": ("composed", lambda: build("transformer", (1, 8, 8), 3)),
    "residual": ("composed", lambda: Residual(0.0)),
    "residual with dropout": ("composed", Residual),
    "frozen": ("composed", frozen),
    "convolutions": ("composed", Convolutions),
    "language": ("composed", Language),
    "encoder": ("composed", Encoder),
    "encoder, norm first": ("composed", lambda: Encoder(norm_first=True, activation="gelu", dropout=0.0)),
    "lstm": ("composed", lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.3, batch_first=True)),
    "gru": ("composed", lambda: Recurrent(nn.GRU, bidirectional=True)),
    "rnn": ("composed", lambda: Recurrent(nn.RNN, nonlinearity="relu", bias=False, batch_first=True)),
    "cross attention": ("composed", Cross),
    "cross attention with dropout": ("composed", lambda: Cross(dropout=0.2, bias=False)),
    "dropout": ("chain", lambda: nn.Sequential(
        nn.Dropout1d(0.2), nn.Flatten(), nn.Linear(ENTER, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )),
    "batch normalisation": ("chain", lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )),
    "batch normalisation of features": ("chain", lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(ENTER, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Tanh(), nn.Linear(8, 3)
    )),
    "running statistics": ("chain", lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.BatchNorm1d(8),
        nn.Tanh(), nn.Linear(8, 3),
    )),
    "normalised twice": ("composed", NormalisedTwice),
    "running statistics, mapped": ("mapped", lambda: nn.Sequential(
        nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(ENTER, 3), nn.Softmax(0)
    )),
    "instance statistics": ("mapped", lambda: nn.Sequential(
        nn.InstanceNorm2d(1, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(ENTER, 3)
    )),
    "own statistics": ("mapped", Average),
    "unusual attention": ("mapped", lambda: Cross(dropout=0.0, add_zero_attn=True)),
    "mean of the batch": ("mapped", lambda: Around(lambda x: x - x.mean(0))),
    "mean of all": ("mapped", lambda: Around(lambda x: x - x.mean())),
    "largest of all": ("mapped", lambda: Around(lambda x: x / x.abs().max())),
    "again": ("mapped", Again),
    "hooked": ("composed", hooked),
    "language, tied": ("mapped", Tied),
    "encoder, samples second": ("mapped", lambda: Encoder(batch_first=False)),
    "backwards": ("composed", lambda: Backwards(nn.Linear(8, 3), nn.Tanh(), nn.Linear(ENTER, 8), nn.Flatten())),
    "softmax over samples": ("mapped", lambda: nn.Sequential(nn.Flatten(), nn.Linear(ENTER, 3), nn.Softmax(0))),
}  # fmt: skip

RANDOM = np.random.default_rng(1)
X, Y = RANDOM.normal(size=(60, 1, 8, 8)), RANDOM.integers(0, 3, 60)
WORDS = RANDOM.integers(0, 7, size=(60, 4))


def task_of(model: Callable[[], nn.Module], inputs: Any = X) -> Task:
    """Return a float64 task for six clients."""
    parts = [np.arange(i, 60, CLIENTS) for i in range(CLIENTS)]
    data = (inputs, Y)
    return make_task(model=lambda: model().double(), train=data, test=data, clients=parts, keep_dtype=True)


def named(model: str) -> Task:
    texts = model.startswith(("language", "encoder", "lstm", "gru", "rnn"))
    return task_of(MODELS[model][1], WORDS if texts else X)
