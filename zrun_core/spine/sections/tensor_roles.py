"""The roles that a job may give modules in `parallel.plan`, for tensor parallelism.

A module of packed experts has weights [experts, out, in]; `transposed` behind the role of one says
that it is [experts, in, out].
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_MAX_SECTIONS = 64
_SECTIONS = re.compile(r"\d{1,7}(:\d{1,7})*")


class Role(StrEnum):
    """The part of a module, a parameter or an attribute in the division of layers."""

    COLWISE = "colwise"
    ROWWISE = "rowwise"
    FUSED = "fused"
    VOCABULARY = "vocabulary"
    HEAD = "head"
    SUMMED = "summed"
    DIVIDE = "divide"
    WHOLE = "whole"
    ATTENTION = "attention"
    EXPERTS = "experts"
    ONCE = "once"
    COLWISE_GATHER_OUTPUT = "colwise_gather_output"
    ROWWISE_SPLIT_INPUT = "rowwise_split_input"


# Of each role: what it says, and a line of a plan that has it.
ROLES: dict[Role, tuple[str, str]] = {
    Role.COLWISE: (
        "a linear divided by outputs: each rank has rows of its weight, and makes a slice of its "
        "result",
        '"*.q_proj": colwise',
    ),
    Role.ROWWISE: (
        "a linear divided by inputs: each rank has columns of its weight; results are summed "
        "over ranks",
        '"*.o_proj": rowwise',
    ),
    Role.FUSED: (
        "several colwise linears in one weight, each divided by itself: how many sections, or "
        "their proportions as in 4:1:1",
        '"*.c_attn": fused 3',
    ),
    Role.VOCABULARY: ("an embedding: each rank has some of its rows", '"*.wte": vocabulary'),
    Role.HEAD: (
        "the linear that makes the logits: each rank has some of its rows",
        '"lm_head": head',
    ),
    Role.SUMMED: (
        "whole, but applied to slices, such as a norm of each head: its gradient is summed over "
        "ranks",
        '"*.q_norm": summed',
    ),
    Role.DIVIDE: (
        "an integer attribute that counts heads or width: tp divides it",
        '"*.num_heads": divide',
    ),
    Role.WHOLE: ("whole on every rank, even if zrun would divide it", '"*.router": whole'),
    Role.ATTENTION: (
        "an nn.MultiheadAttention, of which ranks have some heads",
        '"*.self_attn": attention',
    ),
    Role.EXPERTS: (
        "a module of packed experts, whose weights [experts, out, in] have roles of their own "
        "(transposed behind one: [experts, in, out]): what it makes is summed over ranks",
        '"*.experts": experts',
    ),
    Role.ONCE: (
        "a parameter of such a module that is whole, and counts once in that sum",
        '"*.experts.down_bias": once',
    ),
    Role.COLWISE_GATHER_OUTPUT: (
        "colwise, and its result is gathered: what follows is whole",
        '"*.q_proj": colwise_gather_output',
    ),
    Role.ROWWISE_SPLIT_INPUT: (
        "rowwise, but its input is whole: each rank takes its slice of it",
        '"*.o_proj": rowwise_split_input',
    ),
}
_LINEAR = (Role.COLWISE, Role.ROWWISE, Role.FUSED)


@dataclass(frozen=True)
class Entry:
    """A role, and what belongs to it.

    Attributes:
        sections: of a fused projection, in which proportions its sections are.
        grain: rows of a column linear that stay on one rank; 1: as its module's heads say.
        is_transposed: of a parameter that is [..., in, out].
    """

    role: Role
    sections: tuple[int, ...] = (1,)
    grain: int = 1
    is_transposed: bool = False


def read_entry(text: str) -> Entry:
    """Return what the text of a role says.

    Raises:
        ValueError: it is none.
    """
    word, *rest = text.split() or [""]
    if word not in tuple(Role):
        raise ValueError(f"there is no role {word!r}: write one of {', '.join(Role)}")
    role = Role(word)
    is_transposed = bool(rest) and rest[-1] == "transposed" and role in _LINEAR
    if is_transposed:
        rest.pop()
    if role is not Role.FUSED:
        if rest:
            raise ValueError(f"{word} takes nothing behind it, and {text!r} has {rest[0]!r}")
        return Entry(role, is_transposed=is_transposed)
    if len(rest) != 1 or not _SECTIONS.fullmatch(rest[0]):
        raise ValueError(
            f"{text!r} does not say what is fused: write fused 3 for three equal sections, or "
            "fused 4:1:1 for sections in these proportions"
        )
    numbers = tuple(int(number) for number in rest[0].split(":"))
    count = numbers[0] if len(numbers) == 1 else len(numbers)
    if 0 in numbers or not 2 <= count <= _MAX_SECTIONS:
        raise ValueError(
            f"{text!r}: a fused projection has 2 to {_MAX_SECTIONS} sections, none of them empty"
        )
    sections = numbers if len(numbers) > 1 else (1,) * count
    return Entry(role, sections, is_transposed=is_transposed)
