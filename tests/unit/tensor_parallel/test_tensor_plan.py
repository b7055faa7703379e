"""Which rank has which slice of a model: against torch's own slices of real tensors."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from zrun_core.errors import JobError
from zrun_core.memory.tensors import TensorPart
from zrun_core.models.bert import bert
from zrun_core.models.gpt import gpt
from zrun_core.tensor_parallel.known import TRANSFORMERS_ROLES
from zrun_core.tensor_parallel.plan import TensorPlan, plan_model

GQA: dict[str, Any] = {
    "vocab_size": 251,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
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
    model = made(name)
    plan = plan_model(model, None, 2)
    assert len(plan.regions) == 4
    assert all(len(region.entries) == 1 for region in plan.regions)
    assert all(not region.rejects_sequence(model) for region in plan.regions)
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


# What a job says


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.kv = nn.Linear(16, 16)
        self.o = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 30)
        self.between = nn.Identity()
        self.down = nn.Linear(30, 16)
        self.attention = nn.MultiheadAttention(16, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight
        self.n_head = 2


ROLES = {"*.q": "colwise", "*.kv": "fused 3:1", "*.o": "rowwise"}
MLP = {"*.up": "colwise", "*.down": "rowwise"}
ENDS = {"embed": "vocabulary", "head": "head"}


def test_a_job_says_the_roles_of_modules_that_zrun_does_not_know() -> None:
    model = Net()
    plan = plan_model(model, {**ROLES, **MLP, **ENDS, "*.attention": "whole"}, 2)
    attention, mlp = plan.regions[:2]
    assert (attention.columns, attention.row) == (("blocks.0.q", "blocks.0.kv"), "blocks.0.o")
    assert (mlp.columns, mlp.row) == (("blocks.0.up",), "blocks.0.down")
    # Each column begins it: they share their block with a norm.
    assert attention.entries == attention.columns
    assert attention.rejects_sequence(model) == (
        "no module has the inputs of blocks.0.q, blocks.0.kv as its own, where a sequence could be "
        "gathered: put them into one module with blocks.0.o"
    )
    assert mlp.rejects_sequence(model) == ""
    rows = torch.arange(16 * 16).view(16, 16)
    for rank, ours in enumerate(slices(plan, "blocks.1.kv.weight")):
        assert ours.equal(torch.cat([part.chunk(2)[rank] for part in rows.split((12, 4))]))
    assert slices(plan, "embed.weight")[1].shape == (5, 16)


def test_a_job_comes_before_what_is_known() -> None:
    model = made("transformers Llama")
    plan = plan_model(model, {"*.mlp.*_proj": "whole", "lm_head": "whole"}, 2)
    assert [region.row for region in plan.regions] == [
        f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)
    ]
    assert plan.parts(0)["lm_head.weight"].replicated_over == ("tensor",)


def test_a_parameter_may_have_a_role_of_its_own() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].register_parameter("sinks", nn.Parameter(torch.zeros(4)))

    plan = plan_model(Scaled(), {**ROLES, "*.sinks": "colwise"}, 2)
    assert slices(plan, "blocks.0.sinks")[1].tolist() == [2, 3]


def test_of_torchs_own_layers_heads_and_mlp_are_divided() -> None:
    plan = plan_model(nn.Transformer(16, 2, 1, 1, 32), None, 2)
    rows = ("self_attn.out_proj", "linear2")
    cross = "multihead_attn.out_proj"
    assert [region.row for region in plan.regions] == [
        *(f"encoder.layers.0.{row}" for row in rows),
        *(f"decoder.layers.0.{row}" for row in (rows[0], cross, rows[1])),
    ]
    prefix = "encoder.layers.0.self_attn"
    assert plan.regions[0].entries == (prefix,)
    assert plan.regions[1].entries == ("encoder.layers.0.linear1",)
    whole = torch.arange(48 * 16).view(48, 16)
    for rank, ours in enumerate(slices(plan, f"{prefix}.in_proj_weight")):
        assert ours.equal(torch.cat([third.chunk(2)[rank] for third in whole.chunk(3)]))
    columns = torch.arange(16 * 16).view(16, 16).chunk(2, dim=1)
    for ours, theirs in zip(slices(plan, f"{prefix}.out_proj.weight"), columns, strict=True):
        assert ours.equal(theirs)
    assert plan.parts(0)[f"{prefix}.out_proj.bias"].replicated_over == ("tensor",)


def test_attention_stays_whole_where_a_job_says_so_or_it_adds_keys() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    model = nn.TransformerEncoder(layer, 1)
    assert len(plan_model(model, {"*.self_attn": "whole"}, 4).regions) == 1
    model.layers[0].self_attn = nn.MultiheadAttention(16, 2, add_zero_attn=True)
    assert len(plan_model(model, None, 4).regions) == 1


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "AriaText", "Llama4"])
def test_of_each_expert_ranks_have_a_slice_of_the_width(name: str) -> None:
    config = {
        "AriaText": lambda: transformers.AriaTextConfig(**GQA, moe_num_experts=4),
        "Llama4": lambda: transformers.Llama4TextConfig(**GQA, num_local_experts=4),
    }
    sizes = GQA | {"num_experts": 4, "moe_intermediate_size": 96}
    with torch.device("meta"):
        made = getattr(transformers, f"{name}ForCausalLM")(
            config.get(name, lambda: getattr(transformers, f"{name}Config")(**sizes))()
        )
    plan = plan_model(made, None, 2)
    (experts,) = (r for r in plan.regions if r.role == "experts" and ".layers.0." in r.row)
    assert experts.entries == (experts.row,)
    up, down = f"{experts.row}.gate_up_proj", f"{experts.row}.down_proj"
    dims = (2, 1) if name in ("AriaText", "Llama4") else (1, 2)  # [experts, in, out] or not
    for key, dim, sections in ((up, dims[0], 2), (down, dims[1], 1)):
        shape = plan.parts(0)[key].shape
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        for rank, ours in enumerate(slices(plan, key)):
            section = [part.chunk(2, dim)[rank] for part in whole.chunk(sections, dim)]
            assert ours.equal(torch.cat(section, dim))
    others = [key for key in plan.parts(0) if "router" in key or ".mlp.gate." in key]
    assert others
    assert all(plan.parts(0)[key].replicated_over for key in others)


def without_attention() -> Net:
    model = Net()
    for block in model.blocks:
        del block.attention
    return model


def with_batch_norm() -> Net:
    model = Net()
    model.blocks[1].between = nn.BatchNorm1d(30)
    return model


class Scaling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def with_own_forward() -> Net:
    model = Net()
    model.blocks[0].down = Scaling(30, 16)
    return model


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (
            without_attention,
            None,
            "parallel.tp: zrun does not know how to divide Net; write their roles in "
            'parallel.plan, as in {"*.q_proj": colwise, "*.o_proj": rowwise}, or tp: 1: its '
            'linears are "blocks.*.q", "blocks.*.kv", "blocks.*.o", "blocks.*.up", "blocks.*.down"',
        ),
        (
            Net,
            {"q": "colwise"},
            "parallel.plan: no module matches 'q': a pattern speaks of a whole name; write '*.q'",
        ),
        (
            Net,
            {"blocks.*.quer": "colwise"},
            "parallel.plan: no module matches 'blocks.*.quer'; did you mean 'blocks.*.q'?",
        ),
        (
            Net,
            {**ROLES, "*.n_heads": "divide"},
            "parallel.plan: no integer attribute matches '*.n_heads'; did you mean 'n_head'?",
        ),
        (
            Net,
            {**ROLES, "*.[oq]": "rowwise"},
            "parallel.plan: blocks.0.q matches '*.q' and "
            "'*.[oq]': write patterns of which each module matches one",
        ),
        (
            Net,
            {"*.q": "colwise"},
            "parallel.plan: blocks.0.q is colwise, and no row linear after "
            "it takes the slices that it makes: give a role rowwise too, or write blocks.0.q: "
            "whole",
        ),
        (
            Net,
            {"*.o": "rowwise"},
            "parallel.plan: blocks.0.o is rowwise, and no column linear "
            "before it makes the slices that it takes: give a role colwise too, or write "
            "blocks.0.o: whole",
        ),
        (
            Net,
            {**ROLES, "*.kv": "fused 3"},
            "parallel.plan: blocks.0.kv has 16 rows, and 16 / "
            "(1:1:1) = 5.33 is not whole: write the sections in the proportions that they have",
        ),
        (
            Net,
            {**ROLES, "embed": "colwise"},
            "parallel.plan: embed is an Embedding, but colwise "
            "needs an nn.Linear: name the linears inside it, or leave it out",
        ),
        (
            Net,
            {**ROLES, "head": "vocabulary"},
            "parallel.plan: head is a Linear, and vocabulary divides an nn.Embedding",
        ),
        (
            Net,
            {**ROLES, "embed": "vocabulary"},
            "parallel.plan: embed.weight and head.weight are "
            "one parameter, and only the first is divided so: give both modules a role, for "
            "example head: head or vocabulary, or head and embed: whole",
        ),
        (
            Net,
            {**ROLES, "*.attention.out_proj": "rowwise"},
            "parallel.plan: blocks.0.attention is "
            "an nn.MultiheadAttention, which computes with its weights as a whole: write "
            "blocks.0.attention: attention, in place of blocks.0.attention.out_proj",
        ),
        (
            Net,
            {**ROLES, "embed": "attention"},
            "parallel.plan: embed is an Embedding, and "
            "attention divides an nn.MultiheadAttention; write embed: whole",
        ),
        (
            Net,
            {**ROLES, "*.norm": "experts"},
            "parallel.plan: blocks.0.norm.weight is whole, and "
            "blocks.0.norm sums what ranks make with it; write blocks.0.norm.weight: colwise, "
            "fused 2 or rowwise, once where it is added to their results, or summed where it "
            "scales slices",
        ),
        (
            with_batch_norm,
            MLP,
            "parallel.tp: blocks.1.between is a BatchNorm1d, whose running "
            "statistics would be of slices, between blocks.1.up and blocks.1.down; write a norm "
            "without them, or blocks.1.up: whole and blocks.1.down: whole",
        ),
        (
            with_own_forward,
            MLP,
            "parallel.plan: blocks.0.down is a Scaling with a forward of its "
            "own, and the bias of a rowwise linear is added after the sum over ranks: make it an "
            "nn.Linear, or write blocks.0.down: whole",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: Callable[[], nn.Module], plan: Mapping[str, str] | None, message: str
) -> None:
    with pytest.raises(JobError) as error:
        plan_model(model(), plan, 2)
    assert str(error.value) == message


def test_widths_and_attributes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(JobError) as error:
        plan_model(Net(), {**MLP, "*.attention": "whole"}, 4)
    assert str(error.value) == (
        "parallel.tp: blocks.0.up has 30 rows, and 30 / tp 4 = 7.5 is not whole; write tp: 1, 2, "
        "3, 5, 6, 10, 15 or 30"
    )
    with pytest.raises(JobError) as error:
        plan_model(Net(), {**ROLES, "n_head": "divide", "*.attention": "whole"}, 4)
    assert str(error.value) == (
        "parallel.tp: n_head has the value 2 to divide, fewer than tp 4; write tp: 1 or 2"
    )


def test_an_attribute_that_counts_heads_needs_a_role() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            vars(self.blocks[0])["n_head"] = 2

    with pytest.raises(JobError) as error:
        plan_model(Counting(), ROLES, 2)
    assert str(error.value) == (
        "parallel.plan: blocks.0.n_head is 2, and each rank has 2 / tp 2 of them: write "
        "'blocks.*.n_head': divide, or 'blocks.*.n_head': whole if its forward counts heads by the "
        "width of what it is given"
    )
    plan = plan_model(Counting(), {**ROLES, "*.n_head": "divide"}, 2)
    assert plan.attributes == {"blocks.0.n_head": 1}


# transformers


def planned_configs() -> Iterator[type[transformers.PretrainedConfig]]:
    """Yield the configurations of transformers that say how their model is divided."""
    for folder in pkgutil.iter_modules(transformers.models.__path__):
        name = f"{folder.name}.configuration_{folder.name}"
        try:
            module = importlib.import_module(f"transformers.models.{name}")
        except ModuleNotFoundError:  # not each folder has one
            continue
        for found in vars(module).values():
            is_class = isinstance(found, type) and found.__module__ == module.__name__
            if is_class and getattr(found, "base_model_tp_plan", None):
                yield found


@pytest.mark.thorough
def test_each_role_of_transformers_means_one_of_ours() -> None:
    by_config = [set((config.base_model_tp_plan or {}).values()) for config in planned_configs()]
    assert len(by_config) > 100
    assert set.union(*by_config) <= TRANSFORMERS_ROLES.keys()


def test_a_model_whose_plan_has_no_meaning_here_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.DogeForCausalLM(transformers.DogeConfig(**GQA))
    with pytest.raises(JobError) as error:
        plan_model(model, None, 2)
    said = "model.layers.0.self_attn.o_proj is rowwise, and no column linear before it"
    assert said in str(error.value)
    assert plan_model(model, {"*.self_attn.*": "whole"}, 2).regions


DENSE = [
    *("Llama", "Mistral", "Ministral3", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Phi3", "Olmo"),
    *("Olmo2", "Olmo3", "Cohere", "Cohere2", "Glm", "Glm4", "GPTNeoX", "Granite", "Starcoder2"),
    *("SmolLM3", "SeedOss", "Helium", "Ernie4_5", "Exaone4", "Apertus", "Arcee", "NanoChat"),
    *("VaultGemma", "HyperCLOVAX", "Jais2", "MiniCPM3"),
]


@pytest.mark.parametrize("name", DENSE)
def test_the_dense_models_of_transformers_are_divided(name: str) -> None:
    sizes = dict(GQA)
    if name in ("Phi", "GPTNeoX", "Jais2", "MiniCPM3"):
        sizes["num_key_value_heads"] = 4
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    plan = plan_model(model, None, 2)
    # Attention that normalises over all heads, or reads its width from the job, stays whole.
    assert len(plan.regions) == (2 if name in ("Olmo2", "Olmo3", "Phi3") else 4)
    for key, param in model.named_parameters():
        held = sum(run.length for i in (0, 1) for run in plan.parts(i)[key].runs)
        is_whole = bool(plan.parts(0)[key].replicated_over)
        assert held == param.numel() * (2 if is_whole else 1)
