"""Roles of attention, MLPs and experts in models that need no `parallel.plan`.

Modules of zrun and of transformers' GPT-2 and BERT are known by their class, also inside of a model
of the user's own. Other models of transformers say themselves how they are divided
(`base_model_tp_plan`), in roles that mean one of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zrun_core.errors import JobError
from zrun_core.spine.sections.tensor_roles import Entry, Role, read_entry
from zrun_core.tensor_parallel.cuts import why_whole

_ZRUN = "zrun_core.models"
_GPT2 = "transformers.models.gpt2.modeling_gpt2"
_BERT = "transformers.models.bert.modeling_bert"
_GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss"
_TORCH = "torch.nn.modules"
_MLP = {"up": "colwise", "down": "rowwise"}
_TORCH_MLP = {"linear1": "colwise", "linear2": "rowwise"}
_BERT_ATTENTION = {"query": "colwise", "key": "colwise", "value": "colwise"}

# By class, what its children and attributes are.
_CLASSES: Mapping[str, Mapping[str, str]] = {
    f"{_ZRUN}.gpt.GPT": {"tokens": "vocabulary", "head": "head"},
    f"{_ZRUN}.bert.Bert": {"tokens": "vocabulary"},
    f"{_ZRUN}.bert.MaskedHead": {"decoder": "head"},
    f"{_ZRUN}.attention.Attention": {"qkv": "colwise", "out": "rowwise"},
    f"{_ZRUN}.layers.GeluMLP": _MLP,
    f"{_ZRUN}.layers.SwiGLU": {"gate": "colwise", **_MLP},
    f"{_TORCH}.activation.MultiheadAttention": {"": "attention"},
    f"{_TORCH}.transformer.TransformerEncoderLayer": _TORCH_MLP,
    f"{_TORCH}.transformer.TransformerDecoderLayer": _TORCH_MLP,
    f"{_GPT2}.GPT2Model": {"wte": "vocabulary"},
    f"{_GPT2}.GPT2LMHeadModel": {"lm_head": "head"},
    f"{_GPT2}.GPT2DoubleHeadsModel": {"lm_head": "head"},
    f"{_GPT2}.GPT2MLP": {"c_fc": "colwise", "c_proj": "rowwise"},
    f"{_GPT2}.GPT2Attention": {
        "c_attn": "fused 3",
        "c_proj": "rowwise",
        "num_heads": "divide",
        "split_size": "divide",
    },
    f"{_GPT_OSS}.GptOssModel": {"embed_tokens": "vocabulary"},
    f"{_GPT_OSS}.GptOssForCausalLM": {"lm_head": "head"},
    f"{_GPT_OSS}.GptOssAttention": {
        "q_proj": "colwise",
        "k_proj": "colwise",
        "v_proj": "colwise",
        "o_proj": "rowwise",
        "sinks": "colwise",
    },
    f"{_GPT_OSS}.GptOssExperts": {
        "": "experts",
        "gate_up_proj": "colwise transposed",  # gates and what they gate in turn
        "gate_up_proj_bias": "colwise transposed",
        "down_proj": "rowwise transposed",
        "down_proj_bias": "once",
    },
    f"{_BERT}.BertModel": {"embeddings.word_embeddings": "vocabulary"},
    f"{_BERT}.BertSelfAttention": _BERT_ATTENTION,
    f"{_BERT}.BertCrossAttention": _BERT_ATTENTION,
    f"{_BERT}.BertSelfOutput": {"dense": "rowwise"},
    f"{_BERT}.BertIntermediate": {"dense": "colwise"},
    f"{_BERT}.BertOutput": {"dense": "rowwise"},
    f"{_BERT}.BertLMPredictionHead": {"decoder": "head", "bias": "head"},
}

# What roles of transformers mean.
TRANSFORMERS_ROLES: Mapping[str, str] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": "fused 2",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "summed",
    "colwise_gather_output": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input",
    "moe_tp_experts": "experts",
    "moe_identity_expert": "once",
    "all_reduce": "experts",
    "packed_rowwise": "fused 2 transposed",
    "embedding_colwise": "whole",
    "mla_kv_a_proj": "summed",  # and what else latent attention has beside its heads
    "replicate": "whole",
    "local_params": "whole",  # of a module whose parameters have entries of their own
}


def known_entries(model: nn.Module) -> dict[str, Entry]:
    """Return what is known of a model: entries by the name of a module, parameter or attribute.

    Raises:
        JobError: transformers has a role for a module that zrun has not.
    """
    entries: dict[str, Entry] = {}
    for prefix, module in model.named_modules():
        for child, entry in _entries_of_class(module):
            entries[_join(prefix, child)] = entry
    for prefix, pretrained in _pretrained(model):
        for name, entry in _entries_of_pretrained(pretrained).items():
            entries.setdefault(_join(prefix, name), entry)
    divided = {name: entry for name, entry in entries.items() if entry.role is not Role.WHOLE}
    return _without_tied_to_whole(model, divided)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _entries_of_class(module: nn.Module) -> Iterator[tuple[str, Entry]]:
    for base in type(module).__mro__:
        found = _CLASSES.get(f"{base.__module__}.{base.__qualname__}")
        if found is None:
            continue
        if isinstance(module, nn.MultiheadAttention) and why_whole(module):
            return
        of_class: Any = module
        for child, text in found.items():
            entry = read_entry(text)
            if child == "qkv":  # grouped by key head: see `zrun_core.models.attention`
                entry = Entry(entry.role, grain=(of_class.group + 2) * of_class.head_dim)
            yield child, entry
        if getattr(module, "is_cross_attention", False) and "c_attn" in found:
            yield "c_attn", read_entry("fused 2")
            yield "q_attn", read_entry("colwise")
        return


# transformers


def _pretrained(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield models of transformers that have a plan; a plan speaks of the models inside, too."""
    outer: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{prefix}.") or not prefix for prefix in outer):
            continue
        if isinstance(vars(module).get("_tp_plan"), dict) and hasattr(module, "base_model_prefix"):
            outer.append(name)
            yield name, module


def _entries_of_pretrained(model: nn.Module) -> dict[str, Entry]:
    plan: Mapping[str, str] = vars(model)["_tp_plan"]
    heads = {
        _join(prefix, name)
        for prefix, module in model.named_modules()
        for name in getattr(type(module), "_tp_plan", None) or ()
    }
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    entries: dict[str, Entry] = {}
    latent: list[str] = []
    for pattern, role in plan.items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name in filter(wanted.fullmatch, names):
            if role not in TRANSFORMERS_ROLES:
                raise JobError(
                    f"parallel.tp: transformers gives {name} of {type(model).__name__} the role "
                    f"{role}, which zrun does not know; write tp: 1"
                )
            is_head = name in heads and role == "colwise_gather_output"
            entries[name] = read_entry("head" if is_head else TRANSFORMERS_ROLES[role])
            if role == "mla_kv_a_proj":
                latent.append(name.rpartition(".")[0])
    for name in latent:
        entries |= _latent_attention(name, model.get_submodule(name), entries)
    entries |= _gated_mlps(entries)
    for name in [name for name, entry in entries.items() if entry.role is Role.EXPERTS]:
        entries |= _experts(name, model.get_submodule(name), entries)
    return {name: entry for name, entry in entries.items() if not _is_unfit(model, name, entry)}


def _is_unfit(model: nn.Module, name: str, entry: Entry) -> bool:
    """Return whether a module that would stand alone, between whole activations, is no linear."""
    is_alone = entry.role in (Role.COLWISE_GATHER_OUTPUT, Role.ROWWISE_SPLIT_INPUT)
    return is_alone and not isinstance(dict(model.named_modules()).get(name), nn.Linear)


def _experts(name: str, experts: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return entries of the parameters of packed experts.

    transformers says along which dimension they are divided, and not whether gates and what they
    gate are one after the other or in turn.

        [experts, 2 * width, in]  rows: out of the projection up
        [experts, in, 2 * width]  columns: the same, transposed
    """
    found: dict[str, Entry] = {}
    for key in experts._parameters:
        param = _join(name, key)
        if param not in entries:
            continue
        is_row = key == "down_proj"
        divides_columns = entries[param].role is Role.ROWWISE or entries[param].is_transposed
        transposed = divides_columns != is_row
        if is_row:
            found[param] = Entry(Role.ROWWISE, is_transposed=transposed)
        elif key == "gate_up_proj" and vars(experts).get("is_concatenated", True):
            found[param] = Entry(Role.FUSED, (1, 1), is_transposed=transposed)
        else:
            grain = 2 if key == "gate_up_proj" else 1
            found[param] = Entry(Role.COLWISE, grain=grain, is_transposed=transposed)
    return found


def _latent_attention(
    name: str, attention: nn.Module, entries: Mapping[str, Entry]
) -> dict[str, Entry]:
    """Return entries of an attention that makes its heads from latents (DeepSeek-V2).

    The latents are made whole on every rank, within the region, and used for the rank's own heads.
    """
    found = {
        _join(name, child): Entry(Role.SUMMED)
        for child, module in attention.named_modules()
        if module._parameters and _join(name, child) not in entries
    }
    sizes: Any = attention
    of_query = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    of_key_and_value = sizes.qk_nope_head_dim + sizes.v_head_dim
    grains = {"q_proj": of_query, "q_b_proj": of_query, "kv_b_proj": of_key_and_value}
    for child, grain in grains.items():
        column = _join(name, child)
        if column in entries:
            found[column] = Entry(Role.COLWISE, grain=grain)
    return found


def _gated_mlps(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return entries of gates that are fused with what they gate, which transformers gathers."""
    found: dict[str, Entry] = {}
    for name in entries:
        parent, _, child = name.rpartition(".")
        row = _join(parent, "down_proj")
        is_gathered = entries[name].role is Role.COLWISE_GATHER_OUTPUT
        if child == "gate_up_proj" and is_gathered and row in entries:
            found |= {name: read_entry("fused 2"), row: read_entry("rowwise")}
    return found


def _without_tied_to_whole(model: nn.Module, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return entries without those of embeddings that are tied to what stays whole."""
    divided = (Role.VOCABULARY, Role.HEAD)
    holders: dict[int, list[str]] = {}
    whole: set[int] = set()
    for prefix, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is None:
                continue
            names = (_join(prefix, key), prefix)
            holders.setdefault(id(param), []).extend(names)
            if not any(name in entries and entries[name].role in divided for name in names):
                whole.add(id(param))
    dropped = {name for param in whole for name in holders[param]}
    return {
        name: entry
        for name, entry in entries.items()
        if name not in dropped or entry.role not in divided
    }
