"""What a job of the joints' table is made of: models that write text, their data, a hook.

Weights begin larger than is usual, so that what a layer computes shows in a loss after few steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pretrained
import torch
import torch.nn.functional as F
from pretrained import LENGTH, VOCABULARY
from torch import Tensor, nn

DIM, HEADS, DEPTH = 16, 4, 3
PROMPT = [[5, 6, 7], [8, 9, 3]]
NEW_TOKENS = 4
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": DIM,
    "intermediate_size": 2 * DIM,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
}
_SETTINGS: Mapping[str, dict[str, Any]] = {
    "MixtralForCausalLM": {**_DECODER, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {
        **_DECODER,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "LlamaForCausalLM": _DECODER,
    "GPT2LMHeadModel": {
        "vocab_size": VOCABULARY,
        "n_embd": DIM,
        "n_layer": DEPTH,
        "n_head": HEADS,
        "initializer_range": 0.15,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}


def of_transformers(name: str, mistake: float = 0.0, **settings: Any) -> nn.Module:
    """Build a small model of transformers from its config.

    Args:
        settings: that the config has besides, or otherwise.
        mistake: by which share what the middle block's attention adds is too large.
    """
    import transformers

    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**{**_SETTINGS[name], **settings}))
    if mistake:
        out = model.get_submodule("model.layers.1.self_attn.o_proj")
        out.register_forward_hook(lambda module, args, result: result * (1 + mistake))
    return model


def lora(name: str) -> nn.Module:
    """Put peft's adapters, which do not begin with zeros, on each linear of a frozen model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model: nn.Module = get_peft_model(of_transformers(name), config)
    return model


# Home-made


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            made(x).view(batch, length, self.heads, DIM // HEADS).transpose(1, 2)
            for made in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """A token goes to those that its gate is open to; who has no token is not called.

    A gate that is nearly shut lets nearly nothing through, so that rounding decides on nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 3)
        self.experts = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.gate(tokens).relu()
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            own = weights[:, number].nonzero()[:, 0]
            if len(own):
                made = expert(tokens[own]) * weights[own, number, None]
                out = out.index_add(0, own, made.to(out.dtype))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, mlp: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(DIM), Attention()
        self.norm2, self.mlp = nn.LayerNorm(DIM), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Writer(nn.Module):
    """A language model of somebody's own, which writes by asking for one token after the other."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block(Experts if experts else Mlp) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **_: Tensor
    ) -> SimpleNamespace:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return SimpleNamespace(logits=logits, loss=None)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
        for _step in range(max_new_tokens):
            newest = self(input_ids).logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, newest], 1)
        return input_ids


# Data


class Held(pretrained.Texts):
    """Eleven texts that no step has, without padding: each counts as much as the others."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + index)
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def loss_of_layers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss that looks at what a layer in the middle returns, as in distillation."""
    found = model(**batch, output_hidden_states=True)
    assert len(found.hidden_states) == DEPTH + 1, len(found.hidden_states)
    return found.loss + found.hidden_states[2].float().square().mean()


def scores(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Return how sure a model is of its next tokens: a metric of an evaluation."""
    logits = model(**batch).logits.float()
    return {"sure": (logits.softmax(-1).square().sum(), logits.shape[0] * logits.shape[1])}


# A hook


def write(context: Any, when: str) -> None:
    """Continue two prompts, and keep what was written with the logits of it.

    `when` is that of the hook; of steps every second one does.
    """
    if when == "step" and context.step % 2 == 0:
        return
    with context.gathered() as model:
        if not context.runs_model:
            return
        prompt = torch.tensor(PROMPT, device=context.device)
        asked = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        model.eval()
        text = model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            logits = model(input_ids=text).logits
        model.train()
    place = context.run_dir / f"text-{context.step}-{when}-{context.rank}.json"
    place.write_text(json.dumps([text.tolist(), logits.float().tolist()]))
