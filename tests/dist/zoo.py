"""Models, datasets and losses as users write them.

Nothing here knows zrun: a job names what it needs of this file.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, LENGTH, DIM = 50, 8, 24


# Data


class Samples(torch.utils.data.Dataset):
    """`make(generator, index)` for each of `count` samples."""

    def __init__(self, count: int, make: Callable[[torch.Generator, int], Any]) -> None:
        self.samples = [make(torch.Generator().manual_seed(1000 + i), i) for i in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def images(count: int = 24) -> Samples:
    """Tuples of an image and its class."""
    return Samples(
        count,
        lambda g, i: (torch.randn(3, 8, 8, generator=g), int(torch.randint(10, (), generator=g))),
    )


def tokens(count: int = 24) -> Samples:
    """Dicts, as language models take them."""

    def make(generator: torch.Generator, index: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCAB, (LENGTH + 1,), generator=generator)
        return {"input_ids": ids[:-1], "labels": ids[1:]}

    return Samples(count, make)


def vectors(count: int = 24, domains: bool = True) -> Samples:
    """Dicts of a vector, its target and a domain.

    The first half of every 8 samples is of domain 0, the rest of 1.
    """

    def make(generator: torch.Generator, index: int) -> dict[str, Tensor]:
        x, y = torch.randn(DIM, generator=generator), torch.randn(1, generator=generator)
        return {"x": x, "y": y, "domain": torch.tensor(index % 8 // 4 if domains else 0)}

    return Samples(count, make)


def pairs(count: int = 24) -> Samples:
    """Tuples of a source, a target to read and a target to predict."""

    def make(generator: torch.Generator, index: int) -> tuple[Tensor, Tensor, Tensor]:
        source = torch.randint(VOCAB, (LENGTH,), generator=generator)
        target = torch.randint(VOCAB, (LENGTH + 1,), generator=generator)
        return source, target[:-1], target[1:]

    return Samples(count, make)


def ragged(count: int = 24) -> Samples:
    """Token lists of length 2 to 12."""

    def make(generator: torch.Generator, index: int) -> Tensor:
        length = int(torch.randint(2, 13, (), generator=generator))
        return torch.randint(1, VOCAB, (length,), generator=generator)

    return Samples(count, make)


@dataclasses.dataclass
class Padded:
    ids: Tensor
    mask: Tensor


def pad(samples: list[Tensor]) -> Padded:
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return Padded(ids, ids != 0)


# Convolutions


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*(Residual(16) for _ in range(3)))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def convnet(channels_last: bool = False, frozen_norm: bool = False) -> nn.Module:
    model: nn.Module = ConvNet()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    if frozen_norm:
        model.stem[1].eval().requires_grad_(False)
    return model


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# Transformers


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class LanguageModel(nn.Module):
    """Returns an object with `.loss`.

    `tie`: none | weight (one parameter, two modules) | functional.
    """

    def __init__(self, tie: str = "none", depth: int = 2) -> None:
        super().__init__()
        self.tie = tie
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(DIM)
        if tie != "functional":
            self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tie == "weight":
            self.head.weight = self.tok.weight
        nn.init.normal_(self.tok.weight, std=0.1)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        x = self.tok(input_ids) + self.pos[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = F.linear(x, self.tok.weight) if self.tie == "functional" else self.head(x)
        return SimpleNamespace(
            logits=logits, loss=None if labels is None else token_loss(logits, labels)
        )


class EncoderDecoder(nn.Module):
    """One embedding in the encoder, in the decoder and as the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.shared.weight, std=0.1)
        self.encoder = nn.ModuleDict(
            {"embed": self.shared, "blocks": nn.Sequential(Block(), Block())}
        )
        self.decoder = nn.ModuleDict(
            {"embed": self.shared, "blocks": nn.Sequential(Block(), Block())}
        )
        self.cross = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)
        self.head.weight = self.shared.weight

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> dict[str, Tensor]:
        memory = self.encoder["blocks"](self.encoder["embed"](source))
        x = self.decoder["blocks"](self.decoder["embed"](target))
        x = x + self.cross(x, memory, memory, need_weights=False)[0]
        return {"loss": token_loss(self.head(x), labels)}


# Mixtures and branches


class Experts(nn.Module):
    """The batch's first domain decides: ranks that hold different domains run different experts."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))
            for _ in range(2)
        )

    def forward(self, x: Tensor, domain: Tensor) -> Tensor:
        weight = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (domain == number).nonzero()[:, 0]
            if len(chosen):
                out = out.index_add(0, chosen, expert(x[chosen]) * weight[chosen, number, None])
        return x + out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, domain)
        return F.mse_loss(self.last(x), y)


class UncalledExperts(nn.Module):
    """Experts whose parameters are used without calling them, by some ranks only."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(count))

    def forward(self, x: Tensor, domain: Tensor) -> Tensor:
        for number in domain.unique().tolist():
            if number < len(self.experts):
                chosen = self.experts[number]
                x = x + (domain == number)[:, None] * F.linear(x, chosen.weight, chosen.bias).tanh()
        return x


class UncalledMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.mixture = UncalledExperts(DIM, 2)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.mixture(self.first(x), domain)), y)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.ReLU(), nn.Linear(4 * DIM, DIM))
        self.right = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Tanh(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, goes_left: bool) -> Tensor:
        return x + (self.left(x) if goes_left else self.right(x))


class Branching(nn.Module):
    """Which branch runs depends on the values of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(DIM, DIM), Router(), nn.Linear(DIM, 1)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.router(self.first(x), bool(domain[0] == 0))), y)


class ExtraAtTheEnd(nn.Module):
    """One rank runs a module more than the other, and nothing after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, 4 * DIM)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        x = self.first(x)
        if not self.training and bool(domain[0] == 0):
            x = self.extra(x)
        return F.mse_loss(x.mean(1, keepdim=True), y)


# Adapters


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def lora() -> nn.Module:
    model = LanguageModel(depth=3).requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = Adapted(block.attention.qkv)
        block.mlp[0] = Adapted(block.mlp[0])
    return model


# Modules used several times, and not at all


class Recurrent(nn.Module):
    """A block that is entered three times; one part runs for domain 0 only, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.block = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Tanh(), nn.Linear(4 * DIM, DIM))
        self.sometimes, self.never = UncalledExperts(DIM, 1), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + self.block(x)
        return F.mse_loss(self.last(self.sometimes(x, domain)), y)


def twice(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Two forwards before one backward."""
    noisy = {**batch, "x": batch["x"] * 0.5}
    return model(**batch) + 0.5 * model(**noisy)


def with_penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Every parameter is looked at outside of its module."""
    return model(**batch) + 1e-3 * sum(p.square().sum() for p in model.parameters())


def penalty_first(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    penalty = 1e-3 * sum(p.square().sum() for p in model.parameters())
    return penalty + model(**batch)


# Ragged text


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def masked_sum(model: nn.Module, batch: Padded) -> tuple[Tensor, Tensor]:
    logits, targets = model(batch.ids)[:, :-1], batch.ids[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    counts = batch.mask[:, 1:].flatten()
    return (losses * counts).sum(), counts.sum()


# torch's own modules that use parameters without calling the modules that hold them


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.lstm = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * DIM, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return token_loss(self.head(self.lstm(self.tok(input_ids))[0]), labels)


class TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.encoder(self.tok(input_ids))
        x = x + self.attention(x, x, x)[0]
        return token_loss(self.head(x), labels)


def normalised(old: bool = False) -> nn.Module:
    norm = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
    model = Recurrent()
    norm(model.first)
    norm(model.block[0])
    if not old:
        nn.utils.parametrizations.spectral_norm(model.block[2])
    return model


# What else users do


class Leaky(nn.Module):
    """Hands its weight out, keeps results as attributes, has an empty and a scalar parameter and
    odd buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, 4 * DIM)
        self.scale, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0))
        self.register_buffer("mask", torch.ones(1, 1).expand(1, 4 * DIM))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("ids", torch.arange(3)[None], persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.kept = self.inner(x).square().mean()
        return self.inner(x) * self.scale * self.mask, self.inner.weight, self.inner.weight.t()


class Withheld(torch.autograd.Function):
    """A product whose weight gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad * weight, None


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.withheld = nn.Parameter(torch.full((DIM,), 0.5))
        self.first = nn.Linear(DIM, DIM)
        self.parts = nn.ModuleList(Leaky() for _ in range(3))
        self.last = nn.Linear(4 * DIM, 1)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        x = Withheld.apply(self.first(x), self.withheld)
        for part in self.parts:
            wide, weight, turned = part(x)
            self.last(wide)
            x = x + 0.1 * (wide @ weight).tanh() + 0.1 * F.linear(wide, turned).tanh()
        loss = F.mse_loss(self.last(wide + F.linear(x, self.parts[0].inner.weight.detach())), y)
        return loss + 0.01 * sum(part.kept for part in self.parts)


class Detached(nn.Module):
    """A weight is used once as a constant, before its own use.

    Its gradient comes before its last use in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.mix = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        x = self.first(x)
        x = x + F.linear(x, self.mix.weight.detach()).tanh()
        return F.mse_loss(self.last(self.mix(x)), y)


class DetachedInside(nn.Module):
    """As `Detached`, but within one module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return F.linear(F.linear(x, weight.detach()).tanh(), weight)


def detached_inside() -> nn.Module:
    model = Recurrent()
    model.block = nn.Sequential(DetachedInside(), nn.Tanh(), DetachedInside())
    return model


class Hooked(nn.Module):
    """Gradient hooks and attributes on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, 1)
        self.first.weight.register_hook(lambda grad: grad * 3.0)
        self.first.weight.kind = "mine"

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        assert self.first.weight.kind == "mine"
        return F.mse_loss(self.last(self.first(x).tanh()), y)


class Checkpointed(nn.Module):
    """The user's own activation checkpointing, of either kind."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Tanh(), nn.Linear(4 * DIM, DIM))
            for _ in range(3)
        )

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return F.mse_loss(self.last(x), y)


class Distilled(nn.Module):
    """A frozen teacher under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Tanh(), nn.Linear(4 * DIM, 1))
        self.teacher = nn.Sequential(
            nn.Linear(DIM, 4 * DIM), nn.Tanh(), nn.Linear(4 * DIM, 1)
        ).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return F.mse_loss(self.student(x), wanted + y)


def smooth(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A gradient penalty: backward inside forward, and backward of backward."""
    x = batch["x"].clone().requires_grad_()
    loss = model(**{**batch, "x": x})
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + (len(x) * slope).square().sum(-1).sqrt().mean()


# Hooks

GENERATED: list[Any] = []


def generate(context: Any) -> None:
    """Greedy text, longer on the first rank."""
    with context.gathered() as model:
        ids = torch.tensor([[1]])
        for _ in range(7 if context.is_main else 2):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    GENERATED.append(ids[0].tolist())


def halve(context: Any) -> None:
    with context.gathered() as model:
        with context.gathered():  # a helper that does not know where it is called from
            model.last.weight.mul_(0.25)
        model.last.weight.mul_(2.0)


def keep_copy(context: Any) -> None:
    with context.gathered() as model:
        kept = copy.deepcopy(model)
    batch = torch.utils.data.default_collate([vectors()[i] for i in range(4)])
    kept(**batch).backward()
    GENERATED.append(sum((p.square().sum() + p.grad.sum()).item() for p in kept.parameters()))


def overwrite(context: Any) -> None:
    with context.gathered() as model:
        model.last.weight.fill_(0.25)


def peek(context: Any) -> None:
    GENERATED.append(float(context.model.mix.weight.sum()))
