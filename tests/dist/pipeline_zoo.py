"""Models as users write them, whose parts depend on each other in ways that matter to a pipeline.

Nothing here knows zrun: a job names what it needs of this file. All of them take `vectors` of
`zoo.py`, and have four blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import DIM, VOCAB, Samples

DEPTH = 4


class Mlp(nn.Module):
    """The block of most models here."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(2 * dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Regression(nn.Module):
    """`stem`, blocks, `head`, and the loss; models of this file change the way through it."""

    block: type[nn.Module] = Mlp

    def __init__(self, **args: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(self.block(**args) for _ in range(DEPTH))
        self.head = nn.Linear(DIM, 1)

    def hidden(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.hidden(x)), y)


# What blocks are given and hand out


class Pair(NamedTuple):
    x: Tensor
    scale: Tensor


@dataclasses.dataclass
class Held:
    x: Tensor
    scale: Tensor


class Returning(Mlp):
    """Hands out `x` and a scale in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Any, scale: Tensor | None = None) -> Any:
        if scale is None:
            x, scale = (x["x"], x["scale"]) if self.kind == "dict" else (x.x, x.scale)
        y, scale = super().forward(x) * scale, scale * 0.9
        if self.kind == "tuple":
            return y, scale
        if self.kind == "dict":
            return {"x": y, "scale": scale, "note": "text"}
        return (Pair if self.kind == "named tuple" else Held)(y, scale)


class Containers(Regression):
    block = Returning

    def __init__(self, kind: str) -> None:
        super().__init__(kind=kind)
        self.kind = kind

    def hidden(self, x: Tensor) -> Tensor:
        x, scale = self.stem(x), torch.ones((), device=x.device)
        if self.kind == "tuple":
            for block in self.blocks:
                x, scale = block(x, scale)
            return x
        state: Any = {"x": x, "scale": scale}
        if self.kind != "dict":
            state = (Pair if self.kind == "named tuple" else Held)(x, scale)
        for block in self.blocks:
            state = block(state)
        return state["x"] if self.kind == "dict" else state.x


class Keywords(Regression):
    """Blocks are called with keyword arguments only, one of which is not a tensor."""

    class block(Mlp):  # noqa: N801 - as the attribute that it is
        def forward(self, *, hidden: Tensor, factor: float, mask: Tensor) -> Tensor:
            return super().forward(hidden) * factor * mask

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.linspace(0.5, 1, DIM), persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(hidden=x, factor=1 - 0.1 * number, mask=self.mask)
        return x


# Ways around blocks


class UNet(Regression):
    """The first half's results reach the second half, last one first."""

    def __init__(self, attribute: bool = False) -> None:
        super().__init__()
        self.attribute = attribute
        self.merge = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(DEPTH // 2))

    def hidden(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for block in self.blocks[: DEPTH // 2]:
            x = block(x)
            skips.append(x)
        for block, merge in zip(self.blocks[DEPTH // 2 :], self.merge, strict=True):
            x = block(merge(torch.cat([x, skips.pop()], -1)))
        return x


class ResidualOutside(Regression):
    """The sum is made between blocks."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def hidden(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            x = y.add_(x) if self.in_place else y + x
        return x


class Deep(Regression):
    """Each block sees the stem's result, and each layer has scalars of the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.residual = nn.Parameter(torch.ones(DEPTH))
        self.first = nn.Parameter(torch.full((DEPTH,), 0.1))

    def hidden(self, x: Tensor) -> Tensor:
        x = x0 = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(self.residual[number] * x + self.first[number] * x0)
        return x


class ClassToken(nn.Module):
    """Parameters of the root in front of the blocks and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(DIM // 4, DIM)
        self.token = nn.Parameter(torch.randn(1, 1, DIM) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, 5, DIM) * 0.1)
        self.blocks = nn.ModuleList(Mlp() for _ in range(DEPTH))
        self.scale = nn.Parameter(torch.ones(DIM))
        self.head = nn.Linear(DIM, 1)
        self.pooler = nn.Linear(DIM, DIM)  # never called

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        x = self.patches(x.unflatten(-1, (4, -1)))
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x[:, 0] * self.scale), y)


# Writes in place


class InPlace(Regression):
    """A block writes to its input, and the model to the stem's result."""

    class block(Mlp):  # noqa: N801
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.9))

    def hidden(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x += 1.0
        x.clamp_(min=-0.5)
        for block in self.blocks:
            x = block(x)
            x *= 1.1
        return x.relu_()


class WrittenSkip(Regression):
    """The stem's result is written to, and used again at the end."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.inside = inside

    def hidden(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        if not self.inside:
            first += 1.0
        x = first
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0 and self.inside:
                x.add_(1.0)
                first.data.mul_(2.0)
        return x + first


# Ways that no stage can see


class ByAttribute(Regression):
    """Blocks leave an auxiliary loss behind."""

    class block(Mlp):  # noqa: N801
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.up(x).square().mean()
            return super().forward(x)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        loss = super().forward(x, y, domain)
        return loss + 0.01 * sum(block.kept for block in self.blocks)


class GradientPenalty(Regression):
    """The loss has a gradient of itself."""

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        loss = super().forward(x, y, domain)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.square().sum()


class ByList(Regression):
    """A list of the model's gets what each block has seen."""

    class block(Mlp):  # noqa: N801
        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            x = super().forward(x)
            seen.append(x.mean())
            return x

    def hidden(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, seen)
        return x + 0.01 * sum(seen)


class AuxiliaryReturned(Regression):
    """A mixture whose blocks return an auxiliary loss."""

    class block(Mlp):  # noqa: N801
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(DIM, 2)
            self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            gates = self.gate(x).softmax(-1)
            mixed = sum(
                gates[:, number, None] * expert(x) for number, expert in enumerate(self.experts)
            )
            return super().forward(x + mixed), gates.mean(0).square().sum()

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        x = self.stem(x)
        auxiliary = []
        for block in self.blocks:
            x, loss = block(x)
            auxiliary.append(loss)
        return F.mse_loss(self.head(x), y) + 0.01 * torch.stack(auxiliary).sum()


class LooksAtValues(Regression):
    def hidden(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if x.abs().max().item() > 100:
                x = x / 2
        return x


class LooksInside(Regression):
    """A block looks at values of its own."""

    class block(Mlp):  # noqa: N801
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y / 2 if y.abs().max().item() > 1.5 else y


class LooksAtBatch(Regression):
    """Decides by what the batch holds, and not by what is made of it."""

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        factor = 2.0 if domain.sum().item() > 0 else 1.0
        return super().forward(x * factor, y, domain)


class WithoutBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        return F.mse_loss(self.other(self.one(x).tanh()), y)


class Twice(Regression):
    """Its first block is called again at the end."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.blocks[0](super().hidden(x))


class DependsOnBatch(Regression):
    """Some batches leave out a block."""

    def hidden(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if number != 1 or x.shape[0] > 1:
                x = block(x)
        return x


# Parts that do not train, norms, dropout


def frozen(first: int = 0, stem: bool = True) -> nn.Module:
    """A model whose stem and `first` blocks do not train."""
    model = Regression()
    model.stem.requires_grad_(not stem)
    for block in model.blocks[:first]:
        block.requires_grad_(False)
    return model


class Normed(Regression):
    class block(Mlp):  # noqa: N801
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(DIM)


def weight_normed() -> nn.Module:
    model = Regression()
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.up)
        nn.utils.parametrizations.spectral_norm(block.down)
    return model


class Dropping(Regression):
    class block(Mlp):  # noqa: N801
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.2, self.training)


class Checkpointing(Regression):
    """Recomputes its blocks itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def hidden(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Sequential(nn.Module):
    """Blocks in a Sequential of a Sequential, of two classes."""

    class Other(Mlp):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(DIM, DIM),
            nn.Sequential(Mlp(), self.Other(), Mlp(), self.Other(), Mlp()),
            nn.ReLU(inplace=True),
            nn.Linear(DIM, 1),
        )

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)


# Losses


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A sum, and its weight."""
    y = model.head(model.hidden(batch["x"]))
    weights = 1.0 + batch["domain"].float()
    return (weights * (y - batch["y"]).square()[:, 0]).sum(), weights.sum()


def with_embeddings(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Needs what the stem makes."""
    stem = model.stem(batch["x"])
    y = model.head(model.hidden(batch["x"]))
    return F.mse_loss(y, batch["y"]) + 0.01 * stem.square().mean()


def with_first_weights(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Needs weights of the first block."""
    loss: Tensor = model(**batch)
    return loss + 0.01 * model.blocks[0].up.weight.square().mean()


def ragged_tokens(count: int = 24) -> Samples:
    """Lists of tokens; padded, the first two are 8 long, and the next two are not."""

    def make(generator: torch.Generator, index: int) -> Tensor:
        return torch.randint(1, VOCAB, (3 + index * 5 % 7,), generator=generator)

    return Samples(count, make)


class Resampled(nn.Module):
    """Whatever the length of a text, all but its first block see 8 places."""

    class Resample(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.proj(F.adaptive_avg_pool1d(x.transpose(1, 2), 8).transpose(1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Mlp() for _ in range(DEPTH))
        self.resample = self.Resample()
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.resample(self.blocks[0](self.embed(ids)))
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x).square().mean()


def of_ids(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch.ids)
    return loss


def transformer(name: str, **settings: Any) -> nn.Module:
    """A small model of transformers, with settings instead of those of `pretrained.py`."""
    import pretrained
    import transformers

    kind = getattr(transformers, name)
    sizes = pretrained.SIZES.get(name, pretrained.SIZES["LlamaForCausalLM"])
    model: nn.Module = kind(kind.config_class(**{**sizes, **settings}))
    return model
