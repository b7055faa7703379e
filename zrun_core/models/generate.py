"""Text from a language model: `generate`, and the hook `sample` that shows some after every evaluation:

hooks: {on_eval: {call: "zrun_core.models.generate:sample", args: {prompt: "def "}}}
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from zrun_core.data.tokenizer import open_tokenizer
from zrun_core.errors import JobError
from zrun_core.models.gpt import GPT


class EvalContext(Protocol):
    """What `sample` uses of the context that the loop gives to a hook."""

    model: nn.Module
    device: torch.device
    is_main: bool

    def log(self, text: str) -> None:
        """Print on the terminal of the run."""
        ...

    def gathered(self) -> AbstractContextManager[object]:
        """Make every parameter whole; entered on all ranks."""
        ...


@torch.no_grad()
def generate(
    model: GPT,
    prompt_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each prompt token by token, attending to the last `seq_len` tokens.

    Args:
        prompt_ids: int64 [B, T], T at least 1.
        temperature: divides the logits; 0 takes the likeliest token.
        generator: on the model's device; None: torch's global one.

    Returns:
        int64 [B, T + max_new_tokens], the prompts first.
    """
    ids = prompt_ids
    with _evaluation_mode(model):
        for _ in range(max_new_tokens):
            logits = model(ids[:, -model.config.seq_len :])[:, -1].float()  # [B, V]
            if temperature == 0:
                chosen = logits.argmax(dim=-1, keepdim=True)
            else:
                chosen = torch.multinomial(
                    (logits / temperature).softmax(dim=-1), 1, generator=generator
                )
            ids = torch.cat((ids, chosen), dim=1)
    return ids


def sample(
    context: EvalContext,
    prompt: str = "def ",
    num_tokens: int = 200,
    temperature: float = 0.8,
    tokenizer: str | None = None,
    seed: int = 0,
) -> None:
    """Log a continuation of `prompt` by the model as it is now. The draws are the same after every evaluation.

    Args:
        tokenizer: path of the `tokenizers` JSON file that the training data uses; None: bytes.
    """
    if not isinstance(context.model, GPT):
        raise JobError(
            f"hooks.on_eval: sample continues text by a GPT, not by a {type(context.model).__name__}"
        )
    with context.gathered():
        if not context.is_main:
            return
        encoding = open_tokenizer(tokenizer)
        prompt_ids = torch.from_numpy(encoding.encode(prompt.encode()).astype("int64")).to(
            context.device
        )  # [T]
        generator = torch.Generator(context.device).manual_seed(seed)
        ids = generate(context.model, prompt_ids[None], num_tokens, temperature, generator)[0]
    context.log(encoding.decode(ids.tolist()))


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode; afterwards each in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
