"""Which rank has which slice of a model: against torch's own slices of real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from zrun_core.errors import JobError
from zrun_core.memory.tensors import TensorPart
from zrun_core.models.bert import bert
from zrun_core.models.gpt import gpt
from zrun_core.tensor_parallel.plan import TensorPlan, plan_model

GQA: dict[str, Any] = {
    "vocab_size": 251,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BERT = {key: value for key, value in GQA.items() if key != "num_key_value_heads"}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: gpt("gpt2", vocab_size=251, dim=32, depth=2, heads=4, seq_len=16),
    "gpt2 untied": lambda: gpt("gpt2", vocab_size=251, dim=32, depth=2, heads=4, tied=False),
    "llama": lambda: gpt("llama", vocab_size=251, dim=32, depth=2, heads=8, kv_heads=2),
    "bert": lambda: bert(vocab_size=250, dim=32, depth=2, heads=4, seq_len=16),
    "transformers Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA)),
    "transformers tied Llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**GQA, tie_word_embeddings=True)
    ),
    "transformers Mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**GQA)
    ),
    "transformers Qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GQA)),
    "transformers Qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**GQA, head_dim=16)
    ),
    "transformers GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=251, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    ),
    "transformers BERT": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)),
}


def made(name: str) -> nn.Module:
    with torch.device("meta"):
        model = MODELS[name]()
    if isinstance(model, transformers.PreTrainedModel):
        model.tie_weights()
    return model


def local(part: TensorPart, whole: torch.Tensor) -> torch.Tensor:
    """Return the values of a part; padding is -1."""
    flat = torch.full((torch.Size(part.local_shape).numel(),), -1)
    memory = torch.empty_strided(part.shape, part.stride, dtype=torch.int64).copy_(whole)
    ordered = memory.as_strided((whole.numel(),), (1,))
    for run in part.runs:
        flat[run.local : run.local + run.length] = ordered[run.start : run.start + run.length]
    return flat.as_strided(part.local_shape, part.local_stride)


def slices(plan: TensorPlan, name: str) -> list[torch.Tensor]:
    """Return what each rank has of a tensor whose elements are numbered."""
    parts = [plan.parts(index)[name] for index in range(plan.degree)]
    whole = torch.arange(torch.Size(parts[0].shape).numel()).view(parts[0].shape)
    return [local(part, whole) for part in parts]


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_all_ranks_are_each_tensor_once(name: str, degree: int) -> None:
    model = made(name)
    plan = plan_model(model, None, degree)
    for index in range(degree):
        assert list(plan.parts(index)) == [key for key, _ in model.named_parameters()]
    for key, param in model.named_parameters():
        parts = [plan.parts(index)[key] for index in range(degree)]
        held = torch.cat([each.flatten() for each in slices(plan, key)])
        held = held[held >= 0]
        is_whole = parts[0].replicated_over == ("tensor",)
        assert all(part.shape == param.shape for part in parts)
        assert all(part.local_shape == parts[0].local_shape for part in parts)
        assert len(held) == param.numel() * (degree if is_whole else 1)
        assert len(held.unique()) == param.numel()
        if not is_whole and key.split(".")[-2] not in ("tokens", "head", "embed_tokens"):
            assert parts[0].local_shape != parts[0].shape or degree == 1


@pytest.mark.parametrize("name", MODELS)
def test_each_block_has_a_region_of_attention_and_one_of_its_mlp(name: str) -> None:
    plan = plan_model(made(name), None, 2)
    assert len(plan.regions) == 4
    assert all(len(region.entries) == 1 for region in plan.regions)
    assert all(not region.rejects_sequence for region in plan.regions)
    linears = [linear for region in plan.regions for linear in (*region.columns, region.row)]
    assert len(set(linears)) == len(linears)


def test_a_region_begins_at_the_module_that_has_its_columns() -> None:
    llama = plan_model(made("transformers Llama"), None, 2).regions[0]
    prefix = "model.layers.0.self_attn"
    assert llama.entries == (prefix,)
    assert llama.columns == tuple(f"{prefix}.{key}_proj" for key in "qkv")
    assert llama.row == f"{prefix}.o_proj"
    attention, mlp = plan_model(made("transformers BERT"), None, 2).regions[:2]
    assert attention.entries == ("bert.encoder.layer.0.attention.self",)
    assert attention.row == "bert.encoder.layer.0.attention.output.dense"
    assert mlp.entries == mlp.columns == ("bert.encoder.layer.0.intermediate.dense",)


def test_a_linear_is_cut_as_torch_would_chunk_it() -> None:
    plan = plan_model(made("transformers Llama"), None, 2)
    prefix = "model.layers.1.self_attn"
    whole = torch.arange(64 * 64).view(64, 64)
    for ours, rows in zip(slices(plan, f"{prefix}.q_proj.weight"), whole.chunk(2), strict=True):
        assert ours.equal(rows)
    columns = whole.chunk(2, dim=1)
    for ours, theirs in zip(slices(plan, f"{prefix}.o_proj.weight"), columns, strict=True):
        assert ours.equal(theirs)


def test_of_fused_thirds_each_rank_has_a_slice_of_each() -> None:
    plan = plan_model(made("transformers GPT-2"), None, 4)
    whole = torch.arange(32 * 96).view(32, 96)  # [in, out]
    q, k, v = whole.chunk(3, dim=1)
    for rank, ours in enumerate(slices(plan, "transformer.h.0.attn.c_attn.weight")):
        assert ours.equal(torch.cat([third.chunk(4, dim=1)[rank] for third in (q, k, v)], dim=1))
    biases = slices(plan, "transformer.h.0.attn.c_attn.bias")
    assert biases[1].equal(torch.cat([third.chunk(4)[1] for third in torch.arange(96).chunk(3)]))
    attention = "transformer.h.0.attn"
    divided = {key: plan.attributes[f"{attention}.{key}"] for key in ("num_heads", "split_size")}
    assert divided == {"num_heads": 1, "split_size": 8}
    assert plan.attributes[f"{attention}.c_attn.nf"] == 24
    assert plan.attributes["transformer.h.1.mlp.c_fc.nf"] == 32


def test_slices_of_a_vocabulary_are_alike_and_their_end_is_padding() -> None:
    plan = plan_model(made("gpt2"), None, 4)
    rows = torch.arange(251 * 32).view(251, 32)
    ours = slices(plan, "tokens.weight")
    assert torch.cat(ours)[:251].equal(rows)
    assert ours[3].shape == (63, 32)
    assert (ours[3][-1] == -1).all()
    few = gpt("gpt2", vocab_size=5, dim=32, depth=1, heads=4)
    assert [
        part.unique().numel() for part in slices(plan_model(few, None, 4), "tokens.weight")
    ] == [
        64,
        64,
        33,
        1,
    ]


def test_a_bias_is_cut_with_the_rows_and_whole_where_columns_are_cut() -> None:
    parts = plan_model(made("transformers BERT"), None, 2).parts(0)
    layer = "bert.encoder.layer.0"
    assert parts[f"{layer}.intermediate.dense.bias"].local_shape == (48,)
    assert parts[f"{layer}.output.dense.bias"].replicated_over == ("tensor",)
    assert parts["cls.predictions.bias"].local_shape == (126,)


def test_norms_of_heads_are_whole_and_their_gradients_summed() -> None:
    plan = plan_model(made("transformers Qwen3"), None, 2)
    keys = [f"model.layers.{layer}.self_attn.{key}_norm.weight" for layer in (0, 1) for key in "qk"]
    assert plan.summed == set(keys)
    assert all(plan.parts(0)[key].replicated_over == ("tensor",) for key in keys)


@pytest.mark.parametrize(
    ("name", "degree", "message"),
    [
        (
            "transformers Llama",
            4,
            "parallel.tp: model.layers.0.self_attn.k_proj has 32 rows / 16 of a head = 2 heads, "
            "fewer than tp 4; write tp: 1 or 2",
        ),
        (
            "transformers GPT-2",
            3,
            "parallel.tp: transformer.h.0.attn.c_attn has 32 rows of a section / 8 of a head = 4 "
            "heads, and 4 / tp 3 = 1.333 is not whole; write tp: 1, 2 or 4",
        ),
        (
            "llama",
            4,
            "parallel.tp: blocks.0.attention.qkv has 48 rows / 24 of a head = 2 heads, fewer than "
            "tp 4; write tp: 1 or 2",
        ),
    ],
)
def test_heads_that_do_not_divide_are_refused(name: str, degree: int, message: str) -> None:
    with pytest.raises(JobError) as error:
        plan_model(made(name), None, degree)
    assert str(error.value) == message
