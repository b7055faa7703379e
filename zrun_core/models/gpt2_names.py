"""The bundled GPT in the gpt2 flavour, as `transformers`' GPT2LMHeadModel names and lays it out.

Three things differ: names; linear weights, which are [in, out] there; and the projection to
queries, keys and values, which is grouped by head here and by kind there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

_NAMES = {
    "tokens.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_PARTS = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LINEAR = {"attention.qkv", "attention.out", "mlp.up", "mlp.down"}
_OUR_PARTS = "|".join(map(re.escape, _PARTS))
_THEIR_PARTS = "|".join(map(re.escape, _PARTS.values()))
_OURS = re.compile(rf"blocks\.(\d+)\.({_OUR_PARTS})\.(weight|bias)")
_THEIRS = re.compile(rf"(?:transformer\.)?h\.(\d+)\.({_THEIR_PARTS})\.(weight|bias)")


def to_transformers(state: Mapping[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """Return the `state_dict` of a GPT2LMHeadModel with the weights of a GPT.

    Args:
        state: the `state_dict` of the GPT.
        heads: its attention heads.

    Raises:
        KeyError: a name that the gpt2 flavour has not.
    """
    found = {}
    for name, value in state.items():
        match = _OURS.fullmatch(name)
        if match is None:
            found[_NAMES[name]] = value
            continue
        number, part, kind = match.groups()
        if part == "attention.qkv":
            value = _by_kind(value, heads)
        if part in _LINEAR and kind == "weight":
            value = value.t().contiguous()
        found[f"transformer.h.{number}.{_PARTS[part]}.{kind}"] = value
    return found


def from_transformers(state: Mapping[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """Return the `state_dict` of a GPT with the weights of a GPT2LMHeadModel or GPT2Model.

    Buffers of old releases (the causal masks) are left out.

    Args:
        state: the `state_dict` of that model.
        heads: its attention heads.

    Raises:
        KeyError: a name that a GPT-2 has not.
    """
    names = {theirs.removeprefix("transformer."): ours for ours, theirs in _NAMES.items()}
    parts = {theirs: ours for ours, theirs in _PARTS.items()}
    found = {}
    for name, value in state.items():
        if re.fullmatch(r"(?:transformer\.)?h\.\d+\.attn\.(?:bias|masked_bias)", name):
            continue
        match = _THEIRS.fullmatch(name)
        if match is None:
            found[names[name.removeprefix("transformer.")]] = value
            continue
        number, part, kind = match.groups()
        ours = parts[part]
        if ours in _LINEAR and kind == "weight":
            value = value.t().contiguous()
        if ours == "attention.qkv":
            value = _by_head(value, heads)
        found[f"blocks.{number}.{ours}.{kind}"] = value
    return found


def _by_kind(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of [3D, ...] from (q, k, v) of each head to all q, all k, all v."""
    return value.reshape(heads, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)


def _by_head(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of [3D, ...] from all q, all k, all v to (q, k, v) of each head."""
    return value.reshape(3, heads, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
