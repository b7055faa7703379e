"""Models of transformers with the settings that these have by default, but few, narrow layers.

And their data.
"""

from __future__ import annotations

from typing import Any

import tokenizers
import torch
import transformers
from torch import nn

VOCABULARY, LENGTH = 96, 12
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 3, "n_head": 4},
    "LlamaForCausalLM": _DECODER,
    "Qwen2ForCausalLM": _DECODER,
    "MistralForCausalLM": _DECODER,
    "Gemma2ForCausalLM": {**_DECODER, "head_dim": 4},
    "MixtralForCausalLM": {**_DECODER, "num_local_experts": 4},
    "BertForMaskedLM": {key: _DECODER[key] for key in _DECODER if key != "num_key_value_heads"},
    "T5ForConditionalGeneration": {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "d_ff": 32,
        "d_kv": 4,
        "num_heads": 4,
        "num_layers": 3,
        "decoder_start_token_id": 0,
    },
}


def build(name: str, **settings: Any) -> nn.Module:
    """The class `name` of transformers, with values from the current seed."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**SIZES[name], **settings))


class Wrapped(nn.Module):
    """A user's module around one of transformers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = build(name)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.inner(**batch).loss


class WithHead(Wrapped):
    """Not all of it is of transformers."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.head = nn.Linear(VOCABULARY, 2)


class Adapted(nn.Module):
    """A user's adapter around a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    """A frozen model with adapters in its blocks."""
    model = build("LlamaForCausalLM").requires_grad_(False)
    for block in model.model.layers:
        block.self_attn.q_proj = Adapted(block.self_attn.q_proj)
    return model


def own_checkpointing(name: str) -> nn.Module:
    """The user has switched on what the model itself can do."""
    model = build(name)
    model.gradient_checkpointing_enable()
    return model


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Padded to one length: `attention_mask` is 0 there, and the label -100."""

    @property
    def tokenizer(self) -> Any:
        """One that reads single letters."""
        vocabulary = {chr(32 + number): number for number in range(VOCABULARY - 1)}
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=" "))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
        return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token=" ")

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(
            3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index)
        )
        is_text = torch.arange(LENGTH) < LENGTH - index % 5
        ids = ids.where(is_text, 0)
        labels = ids.where(is_text, -100)
        return {"input_ids": ids, "attention_mask": is_text.long(), "labels": labels}


SEEN: list[Any] = []


def look(context: Any) -> None:
    """A hook that generates, and sees what the model keeps where there are no gradients."""
    prompt = torch.tensor([[5, 6, 7]])
    with context.gathered() as model:
        kept = model(prompt).past_key_values is not None
        SEEN.append((kept, model.config.use_cache, model.generate(prompt, max_length=6).tolist()))


def asks_for_cache(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss function that wants the cache all the same."""
    return model(**batch, use_cache=True).loss
