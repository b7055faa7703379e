"""Transformers as numbers, the oracle of what is traced: their counts equal the models'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from formulas import TransformerShape

from zrun.job.load import load_job
from zrun_core.errors import JobError
from zrun_core.models.bert import bert
from zrun_core.models.gpt import gpt

ROOT = Path(__file__).resolve().parents[3]
GPT, BERT = "zrun_core.models.gpt:gpt", "zrun_core.models.bert:bert"


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
    assert shape.num_params == sum(param.numel() for param in model.parameters())


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
    job = load_job(ROOT / "jobs/llama-8b.yaml").config.model
    shape = TransformerShape.from_model_args(job.call, job.args)
    assert (shape.seq, round(replace(shape, loss_chunk=None).logit_bytes(1) / 1e9, 1)) == (
        8192,
        10.5,
    )
    chunked = TransformerShape.from_model_args(
        GPT, {"vocab_size": 1000, "seq_len": 512, "loss_chunk": 128}
    )
    assert chunked.logit_bytes(4) == 128 * 1000 * 10
