"""Roles of the modules of models that need no `parallel.plan`.

Modules of zrun and of transformers' GPT-2 and BERT are known by their class, also inside of a model
of the user's own. Other models of transformers say themselves how they are divided
(`base_model_tp_plan`), in roles that mean one of ours, or stay whole where they gather at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zrun_core.errors import JobError
from zrun_core.spine.sections.tensor_roles import Entry, Role, read_entry

_ZRUN = "zrun_core.models"
_GPT2 = "transformers.models.gpt2.modeling_gpt2"
_BERT = "transformers.models.bert.modeling_bert"
_TORCH = "torch.nn.modules.transformer"
_MLP = {"up": "colwise", "down": "rowwise"}
_TORCH_MLP = {"linear1": "colwise", "linear2": "rowwise"}  # its attention stays whole
_BERT_ATTENTION = {"query": "colwise", "key": "colwise", "value": "colwise"}

# By class, what its children and attributes are.
_CLASSES: Mapping[str, Mapping[str, str]] = {
    f"{_ZRUN}.gpt.GPT": {"tokens": "vocabulary", "head": "head"},
    f"{_ZRUN}.bert.Bert": {"tokens": "vocabulary"},
    f"{_ZRUN}.bert.MaskedHead": {"decoder": "head"},
    f"{_ZRUN}.attention.Attention": {"qkv": "colwise", "out": "rowwise"},
    f"{_ZRUN}.layers.GeluMLP": _MLP,
    f"{_ZRUN}.layers.SwiGLU": {"gate": "colwise", **_MLP},
    f"{_TORCH}.TransformerEncoderLayer": _TORCH_MLP,
    f"{_TORCH}.TransformerDecoderLayer": _TORCH_MLP,
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
    "colwise_gather_output": "whole",  # what follows takes whole activations
    "rowwise_split_input": "whole",  # it takes whole activations
    "mla_kv_a_proj": "summed",  # and what else latent attention has beside its heads
    "replicate": "whole",
    "local_params": "whole",  # of a module whose parameters have entries of their own
}
_EXPERTS = "the experts of a mixture, which zrun does not divide"
REFUSED_ROLES: Mapping[str, str] = {
    "moe_tp_experts": _EXPERTS,
    "moe_identity_expert": _EXPERTS,
    "packed_rowwise": _EXPERTS,
    "all_reduce": _EXPERTS,
    "embedding_colwise": "columns of an embedding, which zrun does not divide",
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
                raise _refused(model, name, role)
            is_head = name in heads and role == "colwise_gather_output"
            entries[name] = read_entry("head" if is_head else TRANSFORMERS_ROLES[role])
            if role == "mla_kv_a_proj":
                latent.append(name.rpartition(".")[0])
    for name in latent:
        entries |= _latent_attention(name, model.get_submodule(name), entries)
    return entries | _gated_mlps(entries)


def _refused(model: nn.Module, name: str, role: str) -> JobError:
    reason = REFUSED_ROLES.get(role, "which zrun does not know")
    return JobError(
        f"parallel.tp: transformers gives {name} of {type(model).__name__} the role {role}: "
        f"{reason}; write tp: 1"
    )


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
        is_whole = all(key in entries and entries[key].role is Role.WHOLE for key in (name, row))
        if child == "gate_up_proj" and is_whole:
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
