"""Random but valid models, of idioms that users write: which of them, and where, follows a seed.

    Fuzzed(seed)                   its idioms are `idioms_of(seed)`
    Fuzzed(seed, more=True)        and up to two that a second generator draws
    Fuzzed(seed, without=[2, 5])   the same without two of them: how a failure is made smaller

Each idiom is one line of a table. It changes activations between a block's divided linears
(INNER), in the stream from block to block (STREAM), outside of the blocks (OUTSIDE), the loss
(LOSSES), or the model once it is built (BUILT). What was added later is in tables of its own
(MORE_STREAM, MORE_LOSSES, MORE_BUILT), so that the first draw of a seed stays what it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, DEPTH = 13, 16, 4
Change = Callable[["Any", Tensor], Tensor]  # of a block, or of the model, and its activations


class Doubled(torch.autograd.Function):
    """Doubles, and says so in backward by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def _hidden(block: Any) -> int:
    return 4 * DIM


def _shuffled(h: Tensor) -> Tensor:
    return h.view(*h.shape[:-1], 4, -1).transpose(-1, -2).flatten(-2)


# Between a column and a row linear. The first ones are of each feature by itself.
INNER: dict[str, Change] = {
    "gelu": lambda block, h: F.gelu(h),
    "squared relu": lambda block, h: F.relu(h).square(),
    "silu": lambda block, h: F.silu(h),
    "tanh": lambda block, h: torch.tanh(h),
    "leaky": lambda block, h: F.leaky_relu(h, 0.1),
    "clamped": lambda block, h: h.clamp(-1, 1),
    "scaled by a number": lambda block, h: h * 0.7 + 0.1,
    "where": lambda block, h: torch.where(h > 0, h, 0.1 * h),
    "in place": lambda block, h: h.mul(2).relu_(),
    "autograd function": lambda block, h: Doubled.apply(h),
    "rolled over time": lambda block, h: h.roll(1, 1),
    "mean over time": lambda block, h: h - h.mean(1, keepdim=True),
    "cumulated over time": lambda block, h: h.cumsum(1) / 4,
    "masked over time": lambda block, h: h * torch.tril(h.new_ones(h.shape[1], 1)),
    "float": lambda block, h: h.float().sigmoid().to(h.dtype),
    "chunked batch": lambda block, h: torch.cat([F.gelu(each) for each in h.chunk(2)]),
    "over the width": lambda block, h: h / h.shape[-1] * 64,
    "by the root of the width": lambda block, h: h * h.size(-1) ** -0.5 * 8,
    "flipped": lambda block, h: h.flip(-1),
    "rolled": lambda block, h: h.roll(1, -1),
    "shuffled": lambda block, h: _shuffled(h),
    "gated by one": lambda block, h: h * torch.sigmoid(h[..., :1]),
    "ramp": lambda block, h: h * torch.linspace(0, 1, h.shape[-1]).to(h.dtype),
    "softmax": lambda block, h: F.softmax(h.float(), -1).to(h.dtype) * 8,
    "layer norm": lambda block, h: F.layer_norm(h, h.shape[-1:]),
    "rms norm": lambda block, h: (
        h * torch.rsqrt(h.float().pow(2).mean(-1, True) + 1e-6).to(h.dtype)
    ),
    "group norm": lambda block, h: F.group_norm(h.transpose(1, 2), 4).transpose(1, 2),
    "unit length": lambda block, h: F.normalize(h, dim=-1) * 4,
    "minus its mean": lambda block, h: h - h.mean(-1, keepdim=True),
    "minus its largest": lambda block, h: h - h.amax(-1, keepdim=True),
    "cumulated": lambda block, h: h.cumsum(-1) / 16,
    "sorted": lambda block, h: h.sort(-1).values,
    "largest half": lambda block, h: h * (h >= h.median(-1, keepdim=True).values),
    "max pool": lambda block, h: F.max_pool1d(h, 3, 1, 1),
    "fft": lambda block, h: torch.fft.fft(h.float(), dim=-1).real.to(h.dtype) / 8,
    "looked at": lambda block, h: h * float(h.detach().float().abs().mean()),
    "even, then odd": lambda block, h: torch.cat([h[..., ::2], h[..., 1::2]], -1),
}

# In the stream between blocks, and in their forward.
STREAM: dict[str, Change] = {
    "layer norm": lambda block, x: block.norm(x),
    "batch norm": lambda block, x: block.batch_norm(x.transpose(1, 2)).transpose(1, 2),
    "gate": lambda block, x: x * torch.sigmoid(block.gate),
    "frozen scale": lambda block, x: x * block.frozen,
    "dropout": lambda block, x: F.dropout(x, 0.2, block.training),
    "noise": lambda block, x: x + 0.1 * torch.randn_like(x),
    "random depth": lambda block, x: x * float(random.random() < 0.7),
    "numpy noise": lambda block, x: x + float(np.random.rand()) * 0.1,
    "buffer mean": lambda block, x: block.follow(x),
    "buffer count": lambda block, x: x * block.count_in_buffer(),
    "python count": lambda block, x: x * block.count_in_python(),
    "attention": lambda block, x: F.softmax(x.float() @ x.float().mT / 4, -1).to(x.dtype) @ x,
    "causal mean": lambda block, x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(-1, 1),
    "in place": lambda block, x: x.clone().mul_(1.1),
    "added in place": lambda block, x: _add_in_place(x),
    "detached mean": lambda block, x: x - x.detach().mean(1, keepdim=True),
    "without gradients": lambda block, x: x + _without_grad(x),
    "branch": lambda block, x: x * (2 if x.detach().float().mean() > 0 else 0.5),
    "branch on shape": lambda block, x: x * (2 if x.shape[1] > 3 else 0.5),
    "tensor hook": lambda block, x: _hooked(x),
    "autograd function": lambda block, x: Doubled.apply(x) / 2,
    "leaves a tensor": lambda block, x: block.leave(x.float().pow(2).mean(), x),
    "leaves a number": lambda block, x: block.leave(float(x.detach().float().pow(2).mean()), x),
    "unused parameter": lambda block, x: x,
    "complex": lambda block, x: (
        torch.view_as_real(
            torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
            * torch.polar(torch.ones(()), torch.tensor(0.3))
        )
        .flatten(-2)
        .to(x.dtype)
    ),
    "einsum": lambda block, x: torch.einsum("btd,bsd->bts", x, x).tanh() @ x / 4,
    "window": lambda block, x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "scatter": lambda block, x: x.scatter_add(1, torch.zeros_like(x, dtype=torch.long), x) / 2,
    "index": lambda block, x: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "padding": lambda block, x: F.pad(x, (0, 0, 1, 0))[:, :-1],
}

# Outside of the blocks: in front of them, and behind.
OUTSIDE: dict[str, Change] = {
    "positions": lambda model, x: x + model.positions[: x.shape[1]],
    "noise": lambda model, x: model.add_noise(x),
    "masked": lambda model, x: x * (torch.rand(x.shape[:2]) > 0.2).unsqueeze(-1),
    "mixed up": lambda model, x: model.mix(x),
    "numpy mask": lambda model, x: x * float(np.random.rand() > 0.3),
    "python factor": lambda model, x: x * (0.5 + random.random()),
    "dropout": lambda model, x: F.dropout(x, 0.1, model.training),
    "scaled": lambda model, x: x * DIM**0.5,
    "counted": lambda model, x: model.warm_up(x),
    "layer norm": lambda model, x: F.layer_norm(x, x.shape[-1:]),
    "remembered": lambda model, x: model.remember(x),
    "mean over batch": lambda model, x: x - x.mean(0, keepdim=True),
    "detached": lambda model, x: x + x.detach(),
}


def _penalty(params: Sequence[Tensor]) -> Tensor:
    return torch.stack([param.float().pow(2).sum() for param in params]).sum()


# Of the model, its logits, the batch's labels, and the loss so far.
LOSSES: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "decay of all": lambda model, z, y, loss: loss + 1e-3 * _penalty(list(model.parameters())),
    "decay of blocks": lambda model, z, y, loss: (
        loss + 1e-3 * _penalty(list(model.blocks.parameters()))
    ),
    "norm of the head": lambda model, z, y, loss: loss + 1e-2 * model.head.weight.float().norm(),
    "logits": lambda model, z, y, loss: loss + 1e-4 * z.float().logsumexp(-1).square().mean(),
    "of blocks": lambda model, z, y, loss: loss + 1e-2 * sum(b.left for b in model.blocks),
    "noise": lambda model, z, y, loss: loss + (model.noise * z.float().mean(-1, True)).mean(),
    "mixed labels": lambda model, z, y, loss: model.mixed_loss(z, y, loss),
    "focal": lambda model, z, y, loss: loss * (1 - torch.exp(-loss)),
    "accuracy": lambda model, z, y, loss: loss * (1 + (z.argmax(-1) == y).float().mean()),
    "random weights": lambda model, z, y, loss: loss * torch.rand(()),
    "python count": lambda model, z, y, loss: loss * model.count(),
    "smoothed": lambda model, z, y, loss: loss - 0.1 * z.float().log_softmax(-1).mean(),
    "labels in place": lambda model, z, y, loss: loss + 0 * y.add_(1).float().mean(),
}

BUILT: dict[str, Callable[[Any], None]] = {
    "tied head": lambda model: setattr(model.head, "weight", model.embed.weight),
    "frozen embedding": lambda model: model.embed.requires_grad_(False) and None,
    "shared linears": lambda model: _share_linears(model),
    "halved gradient": lambda model: _on_grad(model.blocks[1].down.weight, lambda g: g / 2),
    "clipped gradient": lambda model: _on_grad(
        model.blocks[1].norm.weight, lambda g: g.clamp(-1, 1)
    ),
    "normalised gradient": lambda model: _on_grad(
        model.blocks[2].up.weight, lambda g: g / (g.norm() + 1)
    ),
    "forward hook": lambda model: (
        model.blocks[1].register_forward_hook(lambda module, args, output: output * 1.1) and None
    ),
    "pre-hook": lambda model: (
        model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.9,)) and None
    ),
    "backward hook": lambda model: (
        model.blocks[1].register_full_backward_hook(
            lambda module, before, after: tuple(each * 0.5 for each in before)
        )
        and None
    ),
    "no bias": lambda model: _drop_biases(model),
    "leaves out a block": lambda model: setattr(model, "leaves_out", True),
    "leaves early": lambda model: setattr(model, "leaves_early", True),
    "block twice": lambda model: setattr(model, "repeats", True),
    "in another order": lambda model: setattr(model, "turns_round", True),
    "skip connection": lambda model: setattr(model, "skips", True),
    "list of outputs": lambda model: setattr(model, "lists", True),
}


# State that is kept from one forward to the next, in each way that Python has.
MORE_STREAM: dict[str, Change] = {
    "average in place": lambda block, x: block.average(x, block.ema),
    "average of an attribute": lambda block, x: block.average(x, block.trace),
    "dict in a dict": lambda block, x: block.count_in_dicts(x),
    "list of tensors": lambda block, x: block.follow_in_list(x),
    "own object": lambda block, x: x * block.meter.factor(x),
    "history": lambda block, x: block.look_back(x),
}
MORE_LOSSES: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "running mean": lambda model, z, y, loss: model.scale_by_mean(loss),
    "own object": lambda model, z, y, loss: loss * model.meter.factor(z),
    "counted parameters": lambda model, z, y, loss: loss * (1 + 1e-3 * _size(model)),
    "largest of a weight": lambda model, z, y, loss: loss + 0.1 * model.head.weight.float().max(),
}
MORE_BUILT: dict[str, Callable[[Any], None]] = {
    "leaves by its batch": lambda model: setattr(model, "leaves", lambda y: int(y.sum()) % 2 == 0),
    "leaves by its count": lambda model: setattr(model, "leaves", lambda y: model.count() > 1.1),
    "leaves by chance": lambda model: setattr(model, "leaves", lambda y: random.random() < 0.4),
}
BY_RANK = ("leaves by its batch", "leaves by chance")  # data-parallel ranks may do either


def _size(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters() if param.requires_grad)


class Meter:
    """Counts and sums what it is shown: no module, and no tensor."""

    def __init__(self) -> None:
        self.calls = 0
        self.total = torch.zeros(())
        self.seen: dict[str, list[Tensor]] = {"last": []}

    def factor(self, x: Tensor) -> Tensor:
        """Return a number near 1 that follows from this value, and from all before."""
        self.calls += 1
        self.total += x.detach().float().mean()
        self.seen["last"] = [self.total.clone(), *self.seen["last"][:1]]
        return (1 + 0.1 * torch.tanh(self.seen["last"][-1] / self.calls)).to(x.dtype)


def _add_in_place(x: Tensor) -> Tensor:
    x = x * 1.0
    x += 0.1
    return x


@torch.no_grad()
def _without_grad(x: Tensor) -> Tensor:
    return x * 0.1


def _hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 0.5)
    return x


def _on_grad(param: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    param.register_hook(change)


def _share_linears(model: Any) -> None:
    model.blocks[3].down.weight = model.blocks[0].down.weight


def _drop_biases(model: Any) -> None:
    for block in model.blocks:
        block.up.bias = None


_MORE = "more: "  # before the names of what the second generator draws


def _of_stream(name: str) -> Change:
    if name.startswith(_MORE):
        return MORE_STREAM[name.removeprefix(_MORE)]
    return STREAM[name]


class Idiom(NamedTuple):
    """One line of a table, in its place.

    Attributes:
        table: of which it is.
        name: its key there.
        block: number of the block; None: all of them, or none.
    """

    table: str
    name: str
    block: int | None = None


def idioms_of(seed: int, *, more: bool = False) -> list[Idiom]:
    """Return the idioms of a model: a function between linears, and up to five others.

    Args:
        more: also up to two of the tables that were added later.
    """
    return [*_first_idioms(seed), *(_more_idioms(seed) if more else ())]


def _more_idioms(seed: int) -> list[Idiom]:
    draw = random.Random(f"more, {seed}")
    tables = {"stream": MORE_STREAM, "losses": MORE_LOSSES, "built": MORE_BUILT}
    found = []
    for _ in range(draw.choice([0, 0, 1, 1, 1, 2])):
        table = draw.choice(["stream", "stream", "losses", "built"])
        block = draw.choice([None, 0, 1, 2, 3]) if table == "stream" else None
        idiom = Idiom(f"more {table}", draw.choice(list(tables[table])), block)
        if idiom not in found:
            found.append(idiom)
    return found


def _first_idioms(seed: int) -> list[Idiom]:
    draw = random.Random(seed)
    found = [Idiom("inner", draw.choice(list(INNER)), draw.choice([None, None, 1, 2]))]
    for _ in range(draw.randint(1, 5)):
        table = draw.choice(["stream", "stream", "outside", "losses", "built", "inner"])
        names = {
            "stream": STREAM,
            "outside": OUTSIDE,
            "losses": LOSSES,
            "built": BUILT,
            "inner": dict.fromkeys(list(INNER)[:16]),
        }[table]
        block = draw.choice([None, 0, 1, 2, 3]) if table in ("stream", "inner") else None
        idiom = Idiom(table, draw.choice(list(names)), block)
        if idiom not in found:
            found.append(idiom)
    needs = {"noise": ("outside", "noise"), "mixed labels": ("outside", "mixed up")}
    for idiom in list(found):
        if idiom.table == "losses" and idiom.name in needs:
            found.append(Idiom(*needs[idiom.name]))
        if idiom == ("losses", "of blocks", None):
            name = draw.choice(["leaves a tensor", "leaves a number"])
            found.append(Idiom("stream", name, draw.choice([None, 1, 2])))
    return found


class Block(nn.Module):
    """Two linears, what lies between them, and what else its idioms say."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)
        self.inner: list[str] = []
        self.stream: list[str] = []
        self.calls = 0
        self.left: Any = 0.0

    def add(self, idiom: Idiom) -> None:
        """Take an idiom, and what parameters and buffers it needs."""
        if idiom.table == "inner":
            self.inner.append(idiom.name)
            return
        self.stream.append(idiom.name if idiom.table == "stream" else _MORE + idiom.name)
        if idiom.table == "more stream":
            self._add_state(idiom.name)
            return
        match idiom.name:
            case "batch norm":
                self.batch_norm = nn.BatchNorm1d(DIM)
            case "gate":
                self.gate = nn.Parameter(torch.zeros(DIM))
            case "frozen scale":
                self.frozen = nn.Parameter(torch.full((DIM,), 1.1), requires_grad=False)
            case "unused parameter":
                self.unused = nn.Parameter(torch.ones(DIM))
            case "buffer mean":
                self.register_buffer("mean", torch.zeros(DIM))
            case "buffer count":
                self.register_buffer("count", torch.zeros(()))

    def _add_state(self, name: str) -> None:
        match name:
            case "average in place":
                self.register_buffer("ema", torch.zeros(DIM))
            case "average of an attribute":
                self.trace = torch.zeros(DIM)
            case "dict in a dict":
                self.stats = {"seen": {"calls": 0, "mean": torch.zeros(())}}
            case "list of tensors":
                self.kept = [torch.zeros(DIM), torch.zeros(())]
            case "own object":
                self.meter = Meter()
            case "history":
                self.history: list[Tensor] = []

    def average(self, x: Tensor, mean: Tensor) -> Tensor:
        mean.mul_(0.9).add_(0.1 * x.detach().float().mean((0, 1)))
        return x - mean.to(x.dtype)

    def count_in_dicts(self, x: Tensor) -> Tensor:
        seen = self.stats["seen"]
        seen["calls"] += 1
        seen["mean"] = 0.9 * seen["mean"] + 0.1 * x.detach().float().mean()
        return x * (1 + seen["mean"].to(x.dtype)) / (1 + 0.01 * seen["calls"])

    def follow_in_list(self, x: Tensor) -> Tensor:
        self.kept[0].lerp_(x.detach().float().mean((0, 1)), 0.1)
        self.kept[1] = self.kept[1] + 1
        return x - self.kept[0].to(x.dtype) / self.kept[1].to(x.dtype)

    def look_back(self, x: Tensor) -> Tensor:
        self.history.append(x.detach().float().mean())
        return x - 0.1 * torch.stack(self.history[-3:]).mean().to(x.dtype)

    def follow(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.float().mean((0, 1)), 0.1)
        return x - self.mean.to(x.dtype)

    def count_in_buffer(self) -> Tensor:
        with torch.no_grad():
            self.count += 1
        return 1 / (1 + 0.01 * self.count)

    def count_in_python(self) -> float:
        self.calls += 1
        return 1 / (1 + 0.01 * self.calls)

    def leave(self, value: Any, x: Tensor) -> Tensor:
        self.left = value
        return x

    def forward(self, x: Tensor) -> Tensor:
        for name in self.stream:
            x = _of_stream(name)(self, x)
        h = self.up(self.norm(x))
        for name in self.inner:
            h = INNER[name](self, h)
        return x + self.down(h)


class Fuzzed(nn.Module):
    """Tokens [batch, time] -> the mean loss of the next ones."""

    def __init__(self, seed: int, without: Sequence[int] = (), *, more: bool = False) -> None:
        """
        Args:
            more: it has idioms of the tables that were added later, too.
            without: numbers of idioms that are left out.
        """
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Parameter(torch.zeros(32, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.outside: list[str] = []
        self.losses: list[str] = []
        self.calls = 0
        self.noise = torch.zeros(())
        self.order: Tensor | None = None
        self.seen: list[Tensor] = []
        self.leaves_out = self.leaves_early = self.repeats = False
        self.turns_round = self.skips = self.lists = False
        self.leaves: Callable[[Tensor], bool] | None = None
        found = enumerate(idioms_of(seed, more=more))
        kept = [each for number, each in found if number not in without]
        if not any(each.table == "inner" for each in kept):
            kept.insert(0, Idiom("inner", "gelu"))
        for idiom in kept:
            self._add(idiom)
        for idiom in kept:
            if idiom.table == "built":
                BUILT[idiom.name](self)
            elif idiom.table == "more built":
                MORE_BUILT[idiom.name](self)

    def _add(self, idiom: Idiom) -> None:
        if idiom.table in ("inner", "stream", "more stream"):
            for number, block in enumerate(self.blocks):
                if idiom.block in (None, number):
                    block.add(idiom)
        elif idiom.table == "outside":
            self.outside.append(idiom.name)
        elif idiom.table == "losses":
            self.losses.append(idiom.name)
        elif idiom.table == "more losses":
            self.losses.append(_MORE + idiom.name)
            match idiom.name:
                case "running mean":
                    self.stats = {"loss": {"mean": torch.zeros(()), "steps": [0]}}
                case "own object":
                    self.meter = Meter()

    def scale_by_mean(self, loss: Tensor) -> Tensor:
        stats = self.stats["loss"]
        stats["steps"][0] += 1
        stats["mean"].mul_(0.9).add_(0.1 * loss.detach().float())
        return loss * (1 + stats["mean"] / stats["steps"][0])

    def add_noise(self, x: Tensor) -> Tensor:
        self.noise = torch.randn_like(x).float()
        return x + 0.1 * self.noise.to(x.dtype)

    def mix(self, x: Tensor) -> Tensor:
        self.order = torch.randperm(len(x))
        return 0.7 * x + 0.3 * x[self.order]

    def mixed_loss(self, logits: Tensor, labels: Tensor, loss: Tensor) -> Tensor:
        assert self.order is not None
        other = F.cross_entropy(logits.float().flatten(0, 1), labels[self.order].flatten())
        return 0.7 * loss + 0.3 * other

    def count(self) -> float:
        self.calls += 1
        return 1 + 0.1 * (self.calls % 3)

    def warm_up(self, x: Tensor) -> Tensor:
        return x * min(1.0, self.count())

    def remember(self, x: Tensor) -> Tensor:
        self.seen = [x.detach().float().mean(), *self.seen[:1]]
        return x + 0.01 * self.seen[-1].to(x.dtype)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for name in self.outside:
            x = OUTSIDE[name](self, x)
        x = self._blocks(x, self.leaves is not None and self.leaves(labels))
        logits = self.head(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        for name in self.losses:
            change = MORE_LOSSES[name.removeprefix(_MORE)] if _MORE in name else LOSSES[name]
            loss = change(self, logits, labels, loss)
        return loss

    def _blocks(self, x: Tensor, leaves: bool) -> Tensor:
        first = x
        blocks = list(self.blocks)
        if self.turns_round:
            blocks.reverse()
        if self.leaves_out:
            del blocks[2]
        if self.repeats:
            blocks.insert(2, blocks[1])
        outputs = []
        for block in blocks:
            x = block(x)
            outputs.append(x)
            if self.leaves_early and x.detach().float().abs().mean() > 1e3:
                break
            if leaves and len(outputs) == DEPTH - 2:
                break
        if self.skips:
            x = x + first
        return torch.stack(outputs).mean(0) if self.lists else x
