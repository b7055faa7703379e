"""The roles that a job may give modules in `parallel.plan`, for tensor parallelism.

"*.q_proj": colwise            rows of the weight, whose results are slices
"*.o_proj": rowwise            columns of the weight; the results are summed over ranks
"*.c_attn": fused 3            colwise, of 3 equal sections: a slice of each
"*.qkv_proj": fused 4:1:1      colwise, of sections in these proportions
"wte": vocabulary              rows of an embedding
"lm_head": head                rows of the linear that makes logits
"*.q_norm": summed             whole, and used on slices: its gradient is summed over ranks
"*.attn.num_heads": divide     an integer attribute
"*.router": whole              whole on every rank, whatever else is known of it
"*.self_attn": attention       an nn.MultiheadAttention: each rank has some of its heads
"*.experts": experts           a module of packed experts, of whose parameters ranks have slices:
                               what it makes of them is summed. Its weights are [experts, out, in],
                               "*.experts.gate_up": fused 2 and "*.experts.down": rowwise;
                               behind them, transposed says that one is [experts, in, out]
"*.experts.down_bias": once    whole, in a module of experts: in their sum over ranks it counts once
"*.q_proj": colwise_gather_output     rows of the weight, whose results are gathered
"*.o_proj": rowwise_split_input       columns of the weight, whose input is whole
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
