"""Make the model of a job smaller by the arguments of its factory, where their names say what.

    args: {dim: 1024, depth: 24, heads: 16}     ->     {dim: 128, depth: 2, heads: 2}

Depth falls to as many blocks as the stages of a pipeline need, widths and heads together by one
power of two, so that what divides one another still does. Other arguments stay: vocabulary and
length belong to the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

DEPTHS = re.compile(
    r"depth|layers|blocks|n_(layers?|blocks?)|num_(hidden_)?layers?|num_blocks|"
    r"(num_)?(en|de)coder_layers"
)
WIDTHS = re.compile(
    r"dim|width|hidden(_dim|_size)?|d_(ff|model)|dim_feedforward|emb(ed|edding)?_dim|ffn_dim|"
    r"intermediate_size|(mlp|model)_dim|n_(embd|inner)"
)
HEADS = re.compile(r"(n_|num_)?(kv_|key_value_|attention_)?heads?")
_WIDEST = 128  # of the smallest width that stays


def shrunk(args: Mapping[str, Any], *, tp: int, blocks: int) -> dict[tuple[str, ...], int]:
    """Return the arguments that shrink, with their new values, by their path.

    Args:
        args: of the factory; numbers may be in mappings inside.
        tp: ranks that share each layer: heads must stay a multiple of it.
        blocks: how many the model needs at least.
    """
    numbers = dict(_numbers(args, ()))
    found = {}
    for path, value in numbers.items():
        if DEPTHS.fullmatch(path[-1]) and value > max(blocks, 2):
            found[path] = max(blocks, 2)
    widths = {path: value for path, value in numbers.items() if WIDTHS.fullmatch(path[-1])}
    heads = {path: value for path, value in numbers.items() if HEADS.fullmatch(path[-1])}
    factor = 1
    while widths and _can_halve(widths, heads, factor * 2, tp):
        factor *= 2
    if factor > 1:
        found |= {path: value // factor for path, value in {**widths, **heads}.items()}
    return found


def has_sizes(args: Mapping[str, Any]) -> bool:
    """Return whether a name among a factory's arguments says that it is a depth or a width."""
    return any(
        DEPTHS.fullmatch(path[-1]) or WIDTHS.fullmatch(path[-1]) for path, _ in _numbers(args, ())
    )


def _can_halve(
    widths: Mapping[tuple[str, ...], int],
    heads: Mapping[tuple[str, ...], int],
    factor: int,
    tp: int,
) -> bool:
    if min(widths.values()) // factor < _WIDEST // 2:
        return False
    if any(value % factor for value in [*widths.values(), *heads.values()]):
        return False
    return all(value // factor >= tp and not (value // factor) % tp for value in heads.values())


def _numbers(
    args: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], int]]:
    for key, value in args.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, (*path, key))
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield (*path, key), value
