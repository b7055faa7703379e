"""Transformers as numbers: counts equal the models', sizes are near what is asked, configs that
lack keys say which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zrun.job.load import load_job
from zrun_core.errors import JobError
from zrun_core.models.bert import bert
from zrun_core.models.gpt import gpt
from zrun_core.plan.question.transformer import TransformerShape, parse_count

ROOT = Path(__file__).resolve().parents[3]
GPT, BERT = "zrun_core.models.gpt:gpt", "zrun_core.models.bert:bert"
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("call", "build", "args"),
    [
        (GPT, gpt, {}),
        (
            GPT,
            gpt,
            {
                "flavour": "gpt2",
                "vocab_size": 50257,
                "dim": 96,
                "depth": 3,
                "heads": 4,
                "dropout": 0.1,
            },
        ),
        (
            GPT,
            gpt,
            {"flavour": "llama", "dim": 128, "depth": 2, "heads": 8, "kv_heads": 2, "tied": False},
        ),
        (
            GPT,
            gpt,
            {
                "flavour": "llama",
                "dim": 128,
                "depth": 1,
                "heads": 4,
                "ffn_dim": 300,
                "loss_chunk": 16,
            },
        ),
        (BERT, bert, {}),
        (
            BERT,
            bert,
            {"dim": 64, "depth": 3, "heads": 4, "ffn_dim": 100, "vocab_size": 1000, "seq_len": 32},
        ),
    ],
)
def test_bundled_models_have_as_many_parameters(call, build, args):
    with torch.device("meta"):
        model = build(**args)
    shape = TransformerShape.from_model_args(call, args)
    assert shape.num_params == shape.params == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    ("job", "params"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-xl-1.5b", 1_557_611_200),
        ("llama-8b", 8_030_261_248),
        ("bert-base", 109_514_298),
    ],
)
def test_jobs_say_how_many_they_have(job, params):
    model = load_job(ROOT / f"jobs/{job}.yaml").config.model
    assert TransformerShape.from_model_args(model.call, model.args).num_params == params


@pytest.mark.parametrize(
    ("config", "params"),
    [
        (
            {
                "model_type": "gpt2",
                "n_layer": 12,
                "n_embd": 768,
                "n_head": 12,
                "vocab_size": 50257,
                "n_positions": 1024,
            },
            124_439_808,
        ),
        (LLAMA_8B, 8_030_261_248),
        ({**LLAMA_8B, "tie_word_embeddings": True}, 8_030_261_248 - 128256 * 4096),
        (
            {
                "model_type": "mistral",
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "intermediate_size": 14336,
                "vocab_size": 32000,
                "max_position_embeddings": 32768,
            },
            7_241_732_096,
        ),
        (
            {
                "model_type": "qwen2",
                "num_hidden_layers": 24,
                "hidden_size": 896,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "intermediate_size": 4864,
                "vocab_size": 151936,
                "max_position_embeddings": 32768,
                "tie_word_embeddings": True,
            },
            494_032_768,
        ),
        (
            {
                "model_type": "bert",
                "num_hidden_layers": 12,
                "hidden_size": 768,
                "num_attention_heads": 12,
                "intermediate_size": 3072,
                "vocab_size": 30522,
                "max_position_embeddings": 512,
            },
            109_514_298,
        ),
    ],
)
def test_configs_have_the_parameters_of_their_models(config, params):
    """As their pages on the hub say: GPT-2, Llama 3 8B, Mistral 7B, Qwen2 0.5B, BERT base with its
    masked head.
    """
    assert TransformerShape.from_config(config).num_params == params


def test_configs_say_what_they_lack():
    lacking = {
        key: value for key, value in LLAMA_8B.items() if key not in ("hidden_size", "vocab_size")
    }
    with pytest.raises(JobError, match=r"this llama lacks hidden_size, vocab_size$"):
        TransformerShape.from_config(lacking)
    with pytest.raises(
        JobError, match=r"this model lacks num_hidden_layers, .*; its text_config may be"
    ):
        TransformerShape.from_config({"text_config": LLAMA_8B})
    with pytest.raises(JobError, match="gpt2 lacks n_layer"):
        TransformerShape.from_config({"model_type": "gpt2"})
    with pytest.raises(
        JobError, match=r"num_local_experts is 8: the formula does not cover experts"
    ):
        TransformerShape.from_config({**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8})
    with pytest.raises(JobError, match="hidden is '4096': it must be a whole number"):
        TransformerShape.from_config({**LLAMA_8B, "hidden_size": "4096"})
    with pytest.raises(JobError, match="does not divide into 33 heads"):
        TransformerShape.from_config(
            {**LLAMA_8B, "num_attention_heads": 33, "num_key_value_heads": 3}
        )


def test_a_config_is_for_as_many_tokens_as_one_trains_with():
    shape = TransformerShape.from_config({**LLAMA_8B, "max_position_embeddings": 131072}, seq=2048)
    assert (shape.seq, shape.num_params) == (2048, 8_030_261_248)
    gpt2: dict[str, Any] = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 2,
        "vocab_size": 100,
        "n_positions": 512,
    }
    assert (
        TransformerShape.from_config(gpt2, seq=128).num_params
        == TransformerShape.from_config(gpt2).num_params
    )


@pytest.mark.parametrize(
    ("size", "layers", "hidden"),
    [
        ("124M", 12, 768),
        ("1.7B", 24, 2304),
        ("7.5B", 36, 4096),
        ("175B", 96, 12288),
        ("1T", 128, 25600),
    ],
)
def test_a_size_alone_is_near_the_published_shape(size, layers, hidden):
    shape = TransformerShape.from_size(size)
    assert shape.params == parse_count(size)
    assert shape.num_params == pytest.approx(shape.params, rel=0.05)
    assert layers / 1.6 <= shape.layers <= layers * 1.6
    assert hidden / 1.35 <= shape.hidden <= hidden * 1.35


@hypothesis.settings(deadline=None, max_examples=50)
@given(exponent=st.floats(5.01, 14.99))
def test_any_size_has_a_shape(exponent):
    shape = TransformerShape.from_size(
        f"{10 ** (exponent - 3):.0f}k" if exponent < 9 else f"{10 ** (exponent - 9):.3f}B"
    )
    least = 0.97 if shape.params >= 2 * 10**8 else 0.93 if shape.params >= 10**7 else 0.8
    assert least * shape.params <= shape.num_params <= shape.params
    assert shape.hidden % shape.heads == 0


@pytest.mark.parametrize(
    "text", ["", "7.5", "B", "-7B", "7.5 GB", "1e9", "7,5B", "0B", "2000T", "9" * 30 + "B", "7.5BB"]
)
def test_what_is_no_size(text):
    with pytest.raises(JobError, match="write "):
        parse_count(text)


def test_sizes_are_exact():
    assert [parse_count(text) for text in ("7.5B", "124M", "1t", " 350K ", "0.3b")] == [
        7_500_000_000,
        124_000_000,
        10**12,
        350_000,
        300_000_000,
    ]


def test_other_models_have_no_shape():
    with pytest.raises(JobError, match=r"train.py:build is none of zrun_core.models.gpt:gpt"):
        TransformerShape.from_model_args("train.py:build", {})
    with pytest.raises(JobError, match="got an unexpected keyword argument 'width'"):
        TransformerShape.from_model_args(GPT, {"width": 3})


def test_recomputation_keeps_less_and_computes_more():
    shape = TransformerShape.from_model_args(
        GPT, {"flavour": "llama", "dim": 1024, "depth": 8, "heads": 16}
    )
    kept = [
        shape.block_activations(2, recompute=policy)
        for policy in ("none", "selective", "every_n", "full")
    ]
    assert kept[0] > kept[1] > kept[3]
    assert kept[2] == (kept[0] + kept[3]) / 2
    made = [shape.hardware_flops(4, policy) for policy in ("none", "selective", "every_n", "full")]
    assert made[0] == made[1] == shape.model_flops(4) < made[2] < made[3]
    assert made[2] - made[0] == (made[3] - made[0]) / 2


def test_logits_take_ten_bytes_each():
    """In bf16, their copy in fp32, and its gradient: Llama 3 with one sample of 8192 tokens."""
    shape = TransformerShape.from_config(LLAMA_8B)
    assert round(shape.logit_bytes(1) / 1e9, 1) == 10.5
    chunked = TransformerShape.from_model_args(
        GPT, {"vocab_size": 1000, "seq_len": 512, "loss_chunk": 128}
    )
    assert chunked.logit_bytes(4) == 128 * 1000 * 10
