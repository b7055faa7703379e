"""The bundled models against references that are written differently, and their published parameter
counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zrun_core.errors import JobError
from zrun_core.models.attention import Attention
from zrun_core.models.bert import Bert, bert
from zrun_core.models.generate import generate, sample
from zrun_core.models.gpt import GPT, gpt
from zrun_core.models.mlp import mlp
from zrun_core.models.rope import Rope, rotate
from zrun_core.models.token_loss import token_loss


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def tiny(flavour: str, **changes: object) -> GPT:
    shape: dict[str, object] = {
        "vocab_size": 31,
        "dim": 32,
        "depth": 2,
        "heads": 4,
        "seq_len": 16,
        "ffn_dim": 48,
    }
    torch.manual_seed(0)
    model = gpt(flavour, **(shape | changes))
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def ids(*shape: int, vocab_size: int = 31) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1))


# References: every head by itself, one explicit formula after the other.


def split_qkv(attention: Attention, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries, keys and values of each query head, each [B, T, H].

    Key heads repeated for the queries they serve.
    """
    out = x @ attention.qkv.weight.T + (0 if attention.qkv.bias is None else attention.qkv.bias)
    pieces = list(out.split(attention.head_dim, dim=-1))
    q, k, v = [], [], []
    for start in range(0, len(pieces), attention.group + 2):
        *queries, key, value = pieces[start : start + attention.group + 2]
        q += queries
        k += [key] * len(queries)
        v += [value] * len(queries)
    return q, k, v


def complex_rotation(x: Tensor, theta: float) -> Tensor:
    """RoPE as multiplication of x[i] + j x[i + H/2] by e^(j position theta^(-2i/H)), for x [B, T,
    H].
    """
    length, head_dim = x.shape[-2:]
    half = head_dim // 2
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double())
    frequencies = torch.tensor(
        [theta ** (-2 * i / head_dim) for i in range(half)], dtype=torch.float64
    )
    turns = torch.exp(1j * torch.arange(length, dtype=torch.float64)[:, None] * frequencies)
    turned = numbers * turns
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def naive_attention(
    attention: Attention, x: Tensor, *, causal: bool, theta: float | None
) -> Tensor:
    outs = []
    for q, k, v in zip(*split_qkv(attention, x), strict=True):
        if theta is not None:
            q, k = complex_rotation(q, theta), complex_rotation(k, theta)
        scores = q @ k.mT / math.sqrt(attention.head_dim)  # [B, T, T]
        if causal:
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        outs.append(scores.softmax(-1) @ v)
    out = torch.cat(outs, dim=-1)
    return out @ attention.out.weight.T + (0 if attention.out.bias is None else attention.out.bias)


def naive_gpt2(model: GPT, input_ids: Tensor) -> Tensor:
    def norm(layer: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(layer, nn.LayerNorm)
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight
            + layer.bias
        )

    x = model.tokens.weight[input_ids] + model.positions.weight[: input_ids.shape[1]]
    for block in model.blocks:
        x = x + naive_attention(
            block.attention, norm(block.attention_norm, x), causal=True, theta=None
        )
        hidden = norm(block.mlp_norm, x) @ block.mlp.up.weight.T + block.mlp.up.bias
        gelu = (
            hidden / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        )
        x = x + gelu @ block.mlp.down.weight.T + block.mlp.down.bias
    return norm(model.norm, x) @ model.head.weight.T


def naive_llama(model: GPT, input_ids: Tensor) -> Tensor:
    def norm(layer: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(layer, nn.RMSNorm)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight

    x = model.tokens.weight[input_ids]
    for block in model.blocks:
        theta = model.config.rope_theta
        x = x + naive_attention(
            block.attention, norm(block.attention_norm, x), causal=True, theta=theta
        )
        hidden = norm(block.mlp_norm, x)
        gate = hidden @ block.mlp.gate.weight.T
        x = x + (gate * gate.sigmoid() * (hidden @ block.mlp.up.weight.T)) @ block.mlp.down.weight.T
    return norm(model.norm, x) @ model.head.weight.T


def test_gpt2_logits_equal_the_formulas() -> None:
    model = tiny("gpt2")
    torch.testing.assert_close(
        model(ids(3, 16)), naive_gpt2(model, ids(3, 16)), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama_logits_equal_the_formulas(kv_heads: int) -> None:
    model = tiny("llama", kv_heads=kv_heads, tied=False)
    torch.testing.assert_close(
        model(ids(3, 16)), naive_llama(model, ids(3, 16)), rtol=2e-5, atol=2e-5
    )


def test_gpt2_equals_torchs_own_transformer() -> None:
    model = tiny(
        "gpt2", depth=1, heads=1
    )  # with one head the projection's rows are ordered as torch's
    block = model.blocks[0]
    layer = nn.TransformerEncoderLayer(
        32,
        1,
        48,
        dropout=0.0,
        activation=lambda x: F.gelu(x, approximate="tanh"),
        batch_first=True,
        norm_first=True,
    )
    layer.load_state_dict(
        {
            "self_attn.in_proj_weight": block.attention.qkv.weight,
            "self_attn.in_proj_bias": block.attention.qkv.bias,
            "self_attn.out_proj.weight": block.attention.out.weight,
            "self_attn.out_proj.bias": block.attention.out.bias,
            "linear1.weight": block.mlp.up.weight,
            "linear1.bias": block.mlp.up.bias,
            "linear2.weight": block.mlp.down.weight,
            "linear2.bias": block.mlp.down.bias,
            "norm1.weight": block.attention_norm.weight,
            "norm1.bias": block.attention_norm.bias,
            "norm2.weight": block.mlp_norm.weight,
            "norm2.bias": block.mlp_norm.bias,
        }
    )
    x = torch.randn(2, 16, 32)
    causal = nn.Transformer.generate_square_subsequent_mask(16)
    torch.testing.assert_close(
        block(x), layer(x, src_mask=causal, is_causal=True), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("flavour", ["gpt2", "llama"])
def test_no_position_sees_a_later_one(flavour: str) -> None:
    model = tiny(flavour)
    tokens = ids(1, 16)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 31
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("flavour", ["gpt2", "llama"])
def test_loss_is_the_mean_over_labelled_positions_whole_or_in_chunks(flavour: str) -> None:
    labels = ids(3, 16)
    labels[1, 4:] = -100
    losses, gradients = [], []
    for chunk in (None, 7):
        model = tiny(flavour, loss_chunk=chunk)
        loss = model(ids(3, 16), labels)
        loss.backward()
        losses.append(loss.detach())
        assert model.tokens.weight.grad is not None
        gradients.append(model.tokens.weight.grad)
    assert losses[0].dim() == 0
    kept = labels != -100
    log_probabilities = tiny(flavour)(ids(3, 16)).log_softmax(-1)[kept]  # [positions, V]
    expected = -log_probabilities[torch.arange(len(log_probabilities)), labels[kept]].mean()
    torch.testing.assert_close(losses[0], expected.detach())
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_chunked_loss_bounds_the_logits() -> None:
    sizes: list[int] = []

    def head(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return hidden @ torch.ones(4, 11)

    token_loss(
        torch.randn(2, 5, 4, requires_grad=True), ids(2, 5, vocab_size=11), head, chunk=4
    ).backward()
    assert sizes[:3] == [4, 4, 2]
    assert max(sizes) == 4


@pytest.mark.parametrize("flavour", ["gpt2", "llama"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_close_and_its_loss_is_fp32(
    flavour: str, dtype: torch.dtype, autocast: bool
) -> None:
    expected = tiny(flavour)(ids(3, 16), ids(3, 16))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = tiny(flavour).to(dtype)(ids(3, 16), ids(3, 16))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    loss.backward()


def test_rope_keeps_its_angles_when_it_is_cast_or_leaves_the_meta_device() -> None:
    expected = Rope(8, 4096, 10_000.0).table
    with torch.device("meta"):
        rope = Rope(8, 4096, 10_000.0)
    rope.to_empty(device="cpu")
    torch.testing.assert_close(rope.table, expected, rtol=0, atol=0)
    assert rope.bfloat16().table.dtype == torch.float32
    torch.testing.assert_close(rope.table, expected, rtol=0, atol=0)
    assert rope.state_dict() == {}


def test_rope_scores_depend_on_the_distance_alone() -> None:
    table = Rope(8, 64, 10_000.0)(64)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = (
        rotate(q.expand(1, 1, 64, 8), table)[0, 0],
        rotate(k.expand(1, 1, 64, 8), table)[0, 0],
    )
    scores = turned_q @ turned_k.T  # [query position, key position]
    for distance in (0, 1, 30):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_initial_scales_are_gpt2s() -> None:
    torch.manual_seed(0)
    model = gpt("gpt2", dim=256, depth=8, heads=4)
    block = model.blocks[0]
    for layer, std in (
        (model.tokens, 0.02),
        (block.attention.qkv, 0.02),
        (block.mlp.up, 0.02),
        (block.attention.out, 0.02 / 4),
        (block.mlp.down, 0.02 / 4),
    ):
        assert layer.weight.std().item() == pytest.approx(std, rel=0.02)
    assert not block.mlp.up.bias.any()
    tokens = ids(4, 65, vocab_size=256)
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(256), abs=0.2)


def test_dropout_acts_in_training_only() -> None:
    model = tiny("gpt2", dropout=0.5)
    assert not torch.equal(model(ids(2, 8)), model(ids(2, 8)))
    model.eval()
    assert torch.equal(model(ids(2, 8)), tiny("gpt2")(ids(2, 8)))


@pytest.mark.parametrize(
    ("args", "num_parameters"),
    [
        ({"vocab_size": 50257, "dim": 768, "depth": 12, "heads": 12, "seq_len": 1024}, 124_439_808),
        (
            {"vocab_size": 50257, "dim": 1600, "depth": 48, "heads": 25, "seq_len": 1024},
            1_557_611_200,
        ),
        (
            {
                "flavour": "llama",
                "vocab_size": 128_256,
                "dim": 4096,
                "depth": 32,
                "heads": 32,
                "kv_heads": 8,
                "ffn_dim": 14_336,
                "seq_len": 8192,
                "tied": False,
            },
            8_030_261_248,
        ),
    ],
)
def test_published_parameter_counts(args: dict[str, object], num_parameters: int) -> None:
    with torch.device("meta"):
        assert count(gpt(**args)) == num_parameters


def test_bert_base_has_its_published_parameters() -> None:
    with torch.device("meta"):
        assert count(bert()) == 109_514_298


def every_model() -> list[nn.Module]:
    return [tiny("gpt2"), tiny("gpt2", tied=False), tiny("llama", kv_heads=2), tiny_bert(), mlp()]


@pytest.mark.parametrize("index", range(5))
def test_every_module_resets_its_own_parameters(index: int) -> None:
    """Built on meta, given storage, reset.

    Every parameter as in a model that was built in place.
    """
    with torch.device("meta"):
        remade = every_model()[index]
    remade.to_empty(device="cpu")
    plain = every_model()[index]
    for model in (remade, plain):
        for module in model.modules():
            if module._parameters:
                torch.manual_seed(0)
                module.reset_parameters()
    for name, parameter in plain.named_parameters():
        assert torch.equal(remade.get_parameter(name), parameter), name


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"flavour": "gpt3"}, "there is no flavour 'gpt3': write gpt2 or llama"),
        ({"dim": 100, "heads": 3}, "dim 100 does not divide into 3 heads"),
        ({"heads": 6, "kv_heads": 4}, "6 heads do not divide over 4 kv_heads"),
        ({"flavour": "llama", "dim": 9, "heads": 3}, "9 / 3 heads = 3 is odd"),
        ({"flavour": "llama", "dropout": 0.1}, "the llama flavour has no dropout"),
    ],
)
def test_impossible_shapes_are_refused(args: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        gpt(**args)


def test_too_long_a_sequence_is_refused() -> None:
    for model in (tiny("gpt2"), tiny("llama"), tiny_bert()):
        with pytest.raises(ValueError, match="17 tokens is longer than the model's seq_len 16"):
            model(ids(1, 17))


# Generation


@pytest.mark.parametrize("flavour", ["gpt2", "llama"])
def test_generate_takes_the_likeliest_token_step_by_step(flavour: str) -> None:
    model = tiny(flavour)
    prompt = ids(2, 10)
    out = generate(model, prompt, 12, temperature=0)  # goes beyond seq_len 16
    assert torch.equal(out[:, :10], prompt)
    for length in range(10, 22):
        logits = model(out[:, max(0, length - 16) : length])[:, -1]
        assert torch.equal(logits.argmax(-1), out[:, length])


def test_generate_calls_the_model_with_few_lengths() -> None:
    model = tiny("llama", seq_len=150)
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    assert generate(model, ids(1, 3), 170).shape == (1, 173)
    assert sorted(set(lengths)) == [64, 128, 150]


def test_generate_repeats_with_its_generator_and_restores_every_mode() -> None:
    model = tiny("gpt2", dropout=0.5)
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    outs = [
        generate(model, ids(1, 3), 8, generator=torch.Generator().manual_seed(2)) for _ in range(2)
    ]
    assert torch.equal(outs[0], outs[1])
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)


class Context:
    """What the loop gives to a hook."""

    def __init__(self, model: nn.Module, runs_model: bool) -> None:
        self.model = model
        self.runs_model = runs_model
        self.device = torch.device("cpu")
        self.num_gathered = 0
        self.logged: list[str] = []

    def log(self, text: str) -> None:
        self.logged.append(text)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self.num_gathered += 1
        yield


def test_sample_logs_text_on_the_main_rank_and_gathers_on_all() -> None:
    model = gpt("llama", dim=32, depth=1, heads=2, seq_len=32)
    main, other = Context(model, runs_model=True), Context(model, runs_model=False)
    for context in (main, other):
        sample(context, prompt="def ", num_tokens=10)
    assert (main.num_gathered, other.num_gathered) == (1, 1)
    assert main.logged[0].startswith("def ")
    assert other.logged == []
    with pytest.raises(JobError, match="not by a Linear"):
        sample(Context(nn.Linear(1, 1), runs_model=True))


# BERT and MLP


def tiny_bert(**changes: object) -> Bert:
    torch.manual_seed(0)
    shape: dict[str, object] = {
        "vocab_size": 31,
        "dim": 32,
        "depth": 2,
        "heads": 4,
        "seq_len": 16,
        "dropout": 0.0,
    }
    model = bert(**(shape | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def test_bert_logits_equal_the_formulas() -> None:
    model = tiny_bert()

    def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt() * layer.weight
            + layer.bias
        )

    def gelu(x: Tensor) -> Tensor:
        return x / 2 * (1 + torch.erf(x / math.sqrt(2)))

    tokens, segments = ids(3, 12), ids(3, 12, vocab_size=2)
    x = norm(
        model.norm,
        model.tokens.weight[tokens] + model.positions.weight[:12] + model.segments.weight[segments],
    )
    for layer in model.layers:
        x = norm(
            layer.attention_norm, x + naive_attention(layer.attention, x, causal=False, theta=None)
        )
        hidden = gelu(x @ layer.mlp.up.weight.T + layer.mlp.up.bias)
        x = norm(layer.mlp_norm, x + hidden @ layer.mlp.down.weight.T + layer.mlp.down.bias)
    dense = norm(model.head.norm, gelu(x @ model.head.dense.weight.T + model.head.dense.bias))
    expected = dense @ model.tokens.weight.T + model.head.decoder.bias
    torch.testing.assert_close(
        model(tokens, token_type_ids=segments), expected, rtol=2e-5, atol=2e-5
    )


def test_bert_ignores_padding() -> None:
    model = tiny_bert()
    tokens = ids(1, 12)
    mask = torch.ones(1, 12, dtype=torch.int64)
    mask[:, 8:] = 0
    padded = model(tokens, attention_mask=mask)[:, :8]
    torch.testing.assert_close(padded, model(tokens[:, :8]), rtol=1e-5, atol=1e-5)


def test_bert_loss_counts_masked_positions_only() -> None:
    model = tiny_bert()
    labels = torch.full((2, 12), -100)
    labels[0, 3], labels[1, 7] = 5, 6
    logits = model(ids(2, 12)).log_softmax(-1)
    expected = -(logits[0, 3, 5] + logits[1, 7, 6]) / 2
    torch.testing.assert_close(model(ids(2, 12), labels), expected)


def test_mlp_classifies_and_regresses() -> None:
    torch.manual_seed(0)
    model = mlp(4, 8, 3, depth=2)
    x = torch.randn(5, 4)
    expected = F.linear(
        F.linear(x, *model.layers[0].parameters()).relu(), *model.layers[1].parameters()
    )
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(
        model(x, torch.arange(5) % 3), F.cross_entropy(expected, torch.arange(5) % 3)
    )
    torch.testing.assert_close(model(x, x[:, :3]), F.mse_loss(expected, x[:, :3]))
