"""The model of a `config.json` is that of transformers, and what it cannot be is said."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from zrun_core.errors import JobError
from zrun_core.models.transformers_config import model, text

pytest.importorskip("transformers")
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
        (
            {
                "model_type": "mixtral",
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 32000,
                "max_position_embeddings": 32768,
                "num_local_experts": 8,
            },
            46_702_792_704,
        ),
    ],
)
def test_configs_have_the_parameters_of_their_models(config: dict[str, Any], params: int) -> None:
    """As their pages on the hub say: GPT-2, Llama 3 8B, Mistral 7B, Qwen2 0.5B, BERT base with its
    masked head, Mixtral 8x7B.
    """
    with torch.device("meta"):
        built = model(config)
    assert sum(param.numel() for param in built.parameters()) == params
    assert built.training


def test_the_class_is_that_of_its_architectures() -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    for kind, names, expected in (
        ("bert", None, "BertForMaskedLM"),
        ("bert", ["BertLMHeadModel"], "BertLMHeadModel"),
        ("bert", ["BertModel"], "BertForMaskedLM"),
        ("llama", ["LlamaForSequenceClassification"], "LlamaForCausalLM"),
        ("t5", None, "T5ForConditionalGeneration"),
    ):
        config = {"model_type": kind, **small, "architectures": names}
        with torch.device("meta"):
            assert type(model(config)).__name__ == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {},
            r"^transformers 5\S+ knows no model_type None: estimate a job that builds this model$",
        ),
        ({"model_type": "none such"}, "knows no model_type 'none such'"),
        ({"model_type": ["llama"]}, "knows no model_type"),
        ({"model_type": "vit"}, "^vit is no language model of transformers: estimate a job"),
        ({**LLAMA_8B, "hidden_size": "4096"}, "these values do not describe a llama: "),
        (
            {**LLAMA_8B, "num_attention_heads": 33, "num_key_value_heads": 3},
            "these values do not describe a llama: ",
        ),
    ],
)
def test_what_is_no_model_is_said(config: dict[str, Any], said: str) -> None:
    with torch.device("meta"), pytest.raises(JobError, match=said) as error:
        model(config)
    assert "\n" not in str(error.value)


def test_without_transformers_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (model, text):
        with pytest.raises(JobError, match=r"cannot be imported .*: pip install 'zrun\[hf\]'$"):
            call(LLAMA_8B)


def test_samples_are_as_long_as_the_model_takes_or_as_asked() -> None:
    (sample,) = text(LLAMA_8B)
    assert sample["input_ids"].shape == sample["labels"].shape == (8192,)
    assert text(LLAMA_8B, 128)[0]["labels"].shape == (128,)
    assert text({"model_type": "gpt2"})[0]["labels"].shape == (1024,), "its type's usual one"
    with pytest.raises(JobError, match="bloom does not say how long its samples are: add --seq N"):
        text({"model_type": "bloom"})
