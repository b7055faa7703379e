"""The GPT that a size such as "7.5B" stands for, as arguments of `zrun_core.models.gpt`. Pure.

    gpt_of_size("7.5B").args()["depth"]

Its blocks are GPT-2's, as Narayanan et al. 2021 count them ("Efficient Large-Scale Language Model
Training on GPU Clusters"), without dropout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from zrun_core.errors import JobError

SMALLEST = 10**5  # parameters of `gpt_of_size`
LARGEST = 10**15
_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMbBtT])\s*")
_FACTORS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# Of a size, the width over the depth at 100M parameters, and the power by which it grows: published
# models have 64 at 100M, 110 at 7.5B, 200 at 1T.
_WIDTH_OF_DEPTH = 64
_GROWTH = 0.124
_FFN_MULTIPLE = 16  # so that it divides over 16 ranks


class SizedGPT(NamedTuple):
    """A GPT as a handful of numbers.

    Attributes:
        vocab: tokens that it knows.
        seq: tokens of a sample, and rows of its table of positions.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int

    @property
    def num_params(self) -> int:
        """Parameters: of the tables of tokens and positions, of all blocks and the last norm."""
        return (self.vocab + self.seq + 2) * self.hidden + self.layers * self.block_params

    @property
    def block_params(self) -> int:
        """Parameters of a block: of four square matrices, two of the layer behind, and biases."""
        matrices = 4 * self.hidden**2 + 2 * self.hidden * self.ffn
        return matrices + 9 * self.hidden + self.ffn

    def args(self, seq: int | None = None) -> dict[str, Any]:
        """Return the arguments of `zrun_core.models.gpt:gpt`.

        Args:
            seq: tokens of a sample, where they may be more than usual.
        """
        return {
            "flavour": "gpt2",
            "vocab_size": self.vocab,
            "dim": self.hidden,
            "depth": self.layers,
            "heads": self.heads,
            "ffn_dim": self.ffn,
            "seq_len": max(self.seq, seq or 0),
        }


def gpt_of_size(text: str) -> SizedGPT:
    """Return a plausible GPT of about so many parameters, such as "7.5B".

    Its depth and width are those of published models of the size. The layers between the blocks'
    norms are as wide as it takes to come near the number.

    Raises:
        JobError: the text is no such number.
    """
    params = parse_count(text)
    vocab = 256
    seq = 256
    if params >= 10**8:
        vocab = 51200
        seq = 2048
    elif params >= 10**7:
        vocab = 8192
        seq = 1024
    wanted = _WIDTH_OF_DEPTH * (params / 1e8) ** _GROWTH

    def cost(one: SizedGPT) -> float:
        lacks = 1 - one.num_params / params
        is_unlike = abs(math.log(one.hidden / one.layers / wanted))
        return is_unlike + 40 * lacks + 0.05 * (one.layers % 4)

    best = min(_deepest(params, vocab, seq), key=cost)
    return best._replace(ffn=_filling(best, params))


def parse_count(text: str) -> int:
    """Return the number in "7.5B", "124M", "1T" or "350k".

    Raises:
        JobError: it is no such number, or beyond what `gpt_of_size` takes.
    """
    match = _COUNT.fullmatch(text) if len(text) <= 20 else None
    if match is None:
        raise JobError(
            f"{text!r} is not a number of parameters: write for example 124M, 7.5B or 1T"
        )
    whole, _, decimals = match[1].partition(".")
    count: int = int(whole + decimals) * _FACTORS[match[2].lower()] // 10 ** len(decimals)
    if not SMALLEST <= count <= LARGEST:
        raise JobError(f"{text.strip()} parameters: write a number from 100k to 1000T")
    return count


def _deepest(params: int, vocab: int, seq: int) -> Iterator[SizedGPT]:
    """Yield, of each width, the deepest GPT with at most so many parameters."""
    for hidden in _widths():
        heads = max(1, hidden // (128 if hidden >= 2048 else 64))
        one = SizedGPT(1, hidden, heads, 4 * hidden, vocab, seq)
        layers = (params - (one.num_params - one.block_params)) // one.block_params
        if layers > 0:
            yield one._replace(layers=layers)


def _filling(gpt: SizedGPT, params: int) -> int:
    """Return the width of the layers behind attention with which it has nearest to `params`."""
    of_one = gpt.layers * (2 * gpt.hidden + 1)
    return gpt.ffn + _FFN_MULTIPLE * round((params - gpt.num_params) / of_one / _FFN_MULTIPLE)


def _widths() -> list[int]:
    """Return multiples of 64, then of 128, 512 and 1024.

    Products divide well, and so do the heads of large models over 8 ranks.
    """
    return [
        *(16, 32, 48),
        *range(64, 1024, 64),
        *range(1024, 2048, 128),
        *range(2048, 4096, 512),
        *range(4096, 262145, 1024),
    ]
