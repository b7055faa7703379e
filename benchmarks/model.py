"""Model and data of every system: a GPT-2-style decoder on the bytes of Python's own library.

All systems get the same batches.

`zrun train` builds the same model and data by `job_model` and `JobData`.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from cases import SHAPES, VOCAB, Shape
from torch import Tensor, nn
from torch.utils.data import Dataset

SEED = 1234


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(dim, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """(tokens, targets) -> mean loss.

    The head is not tied, so that no system needs a special case.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(VOCAB, shape.dim),
            nn.Embedding(shape.seq, shape.dim),
        )
        self.blocks = nn.ModuleList(Block(shape.dim, shape.heads) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, VOCAB, bias=False)
        residual_std = 0.02 / (2 * shape.depth) ** 0.5
        for name, param in self.named_parameters():
            if param.dim() == 2:
                nn.init.normal_(
                    param,
                    std=residual_std if name.endswith(("out.weight", "down.weight")) else 0.02,
                )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().view(-1, VOCAB), targets.reshape(-1))


def build(shape: Shape) -> GPT:
    """The model with its first values, which depend on nothing but the shape."""
    torch.manual_seed(SEED)
    return GPT(shape)


@functools.cache
def corpus(limit: int = 8 << 20) -> Tensor:
    """uint8 [limit]: modules of the standard library, one after the other."""
    root, text = Path(sysconfig.get_paths()["stdlib"]), bytearray()
    for path in [*sorted(root.glob("*.py")), *sorted(root.glob("asyncio/*.py"))]:
        text += path.read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8).clone()


def global_batch(shape: Shape, step: int, ranks: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of all ranks in a step from 0, int64 [ranks * batch, seq].

    Rank r takes the r-th part.
    """
    generator = torch.Generator().manual_seed(700021 + step)
    text = corpus()
    starts = torch.randint(
        0, len(text) - shape.seq - 1, (ranks * shape.batch,), generator=generator
    )
    rows = torch.stack([text[start : start + shape.seq + 1] for start in starts.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def job_model(size: str) -> GPT:
    """The model for a job file."""
    return build(SHAPES[size])


class JobData(Dataset[tuple[Tensor, Tensor]]):
    """The same global batches, sample by sample, for a job file."""

    def __init__(self, size: str, ranks: int, steps: int) -> None:
        self._shape, self._ranks, self._steps = SHAPES[size], ranks, steps
        self._batch = functools.lru_cache(maxsize=2)(
            lambda step: global_batch(self._shape, step, self._ranks)
        )

    def __len__(self) -> int:
        return self._steps * self._ranks * self._shape.batch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        step, row = divmod(index, self._ranks * self._shape.batch)
        tokens, targets = self._batch(step)
        return tokens[row], targets[row]
