"""Text from a language model: `generate`, and the hook `sample`, which shows some.

After every evaluation, from a job file:

hooks: {on_eval: {call: "zrun_core.models.generate:sample", args: {prompt: "def "}}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zrun_core.data.tokenizer import open_tokenizer
from zrun_core.errors import JobError
from zrun_core.models.gpt import GPT

_PROMPT, _NUM_TOKENS, _TEMPERATURE = "def ", 200, 0.8  # of `sample`, where a job says nothing else
_LENGTHS = 64  # tokens: a model is called with multiples of it


class EvalContext(Protocol):
    """The part of the context of a hook that `sample` uses."""

    model: nn.Module
    device: torch.device

    @property
    def runs_model(self) -> bool:
        """True on the ranks that call the model together."""
        ...

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
        model: in any mode; it is put back.
        prompt_ids: int64 [B, T], T at least 1.
        max_new_tokens: how many to add to each prompt.
        temperature: divides the logits; 0 takes the likeliest token.
        generator: on the model's device; None: torch's global one.

    Returns:
        int64 [B, T + max_new_tokens], the prompts first.
    """
    ids = prompt_ids
    with _evaluation_mode(model):
        for _ in range(max_new_tokens):
            seen = ids[:, -model.config.seq_len :]
            chosen = _next_token(model, seen, temperature, generator)
            ids = torch.cat((ids, chosen), dim=1)
    return ids


def _next_token(
    model: GPT, ids: Tensor, temperature: float, generator: torch.Generator | None
) -> Tensor:
    """Return the token [B, 1] that follows `ids` [B, T]; arguments as of `generate`."""
    logits = _next_logits(model, ids).float()  # [B, V]
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    probabilities = (logits / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)


def _next_logits(model: GPT, ids: Tensor) -> Tensor:
    """Return the logits [B, V] of the token that follows `ids` [B, T].

    The model is called with few lengths: a library of kernels makes code for each that it meets,
    and keeps some of it (200 MiB of a CPU's memory for 160 lengths in bf16). No token sees what is
    added behind it.
    """
    length = ids.shape[1]
    padded = min(-(-length // _LENGTHS) * _LENGTHS, model.config.seq_len)
    logits: Tensor = model(F.pad(ids, (0, padded - length)))
    return logits[:, length - 1]


def sample(
    context: EvalContext,
    prompt: str = _PROMPT,
    num_tokens: int = _NUM_TOKENS,
    temperature: float = _TEMPERATURE,
    tokenizer: str | None = None,
    seed: int = 0,
) -> None:
    """Log a continuation of `prompt` by the model as it is now.

    The draws are the same after every evaluation.

    Args:
        context: that the loop gives to a hook.
        prompt: the text to continue.
        num_tokens: how many to add to it.
        temperature: as for `generate`.
        seed: of the draws.
        tokenizer: path of the `tokenizers` JSON file that the training data uses; None: bytes.
    """
    model = _as_gpt(context.model, "sample")
    with context.gathered():
        if not context.runs_model:
            return
        prompt_ids = _prompt_ids(model, prompt, tokenizer, "sample").to(context.device)  # [T]
        generator = torch.Generator(context.device).manual_seed(seed)
        ids = generate(model, prompt_ids[None], num_tokens, temperature, generator)[0]
    context.log(open_tokenizer(tokenizer).decode(ids.tolist()))


def check_sample(model: nn.Module, args: Mapping[str, Any], key: str) -> None:
    """Check, before anything trains, that `sample` can continue its prompt by a model.

    Args:
        args: of `sample`, as a job has them.
        key: that names it in the job.

    Raises:
        JobError: it is no GPT, or the prompt is not text that it knows.
        UserCodeError: the tokenizer cannot be read.
    """
    gpt = _as_gpt(model, key)
    _prompt_ids(gpt, args.get("prompt", _PROMPT), args.get("tokenizer"), key)


def last_step_of_sample(model: nn.Module, args: Mapping[str, Any]) -> Callable[[], object]:
    """Return the step of `sample` that holds most: the one that makes its last token.

    Args:
        args: of `sample`, as a job has them.

    Raises:
        JobError: it cannot continue its prompt by the model.
        UserCodeError: the tokenizer cannot be read.
    """
    gpt = _as_gpt(model, "sample")
    of_prompt = len(_prompt_ids(gpt, args.get("prompt", _PROMPT), args.get("tokenizer"), "sample"))
    length = min(of_prompt + args.get("num_tokens", _NUM_TOKENS) - 1, gpt.config.seq_len)

    def step() -> object:
        with _evaluation_mode(gpt):
            ids = torch.zeros(1, length, dtype=torch.int64)
            return _next_token(gpt, ids, args.get("temperature", _TEMPERATURE), None)

    return step


def _as_gpt(model: nn.Module, key: str) -> GPT:
    if not isinstance(model, GPT):
        raise JobError(
            f"{key}: sample continues text by a GPT of zrun's, not by a {type(model).__name__}: "
            "write a hook of your own, which calls generate of the model within "
            "context.gathered(), or leave this one out"
        )
    return model


def _prompt_ids(model: GPT, prompt: str, tokenizer: str | None, key: str) -> Tensor:
    """Return the tokens of a prompt, int64 [T]."""
    encoded = open_tokenizer(tokenizer).encode(prompt.encode()).astype("int64")
    if not len(encoded):
        raise JobError(f"{key}: the prompt {prompt!r} has no tokens to continue: write some text")
    most = model.config.vocab_size
    if encoded.max() >= most:
        reader = "bytes (no tokenizer is named)" if tokenizer is None else tokenizer
        raise JobError(
            f"{key}: the prompt has token {encoded.max()}, read as {reader}, and the model knows "
            f"{most} tokens: name the tokenizer of the training data, as args: {{tokenizer: PATH}}"
        )
    return torch.from_numpy(encoded)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and afterwards each into the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
