"""The model of a `config.json` of transformers, with fresh weights, and blank text for it.

    model: {call: "zrun_core.models.transformers_config:model", args: {config: {model_type: llama}}}
    data: {call: "zrun_core.models.transformers_config:text", args: {config: {model_type: llama}}}

Both are for estimates: a job that trains names code of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from zrun_core.errors import JobError

# Of a type that several of these know, the first one: BERT has a masked head.
_HEADS = (
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
)
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_JOB = "estimate a job that builds this model"


def model(config: Mapping[str, Any]) -> nn.Module:
    """Return the language model of a config: that of its `architectures`, or its type's first one.

    Raises:
        JobError: transformers is not installed or does not know it, it does not take tokens alone,
            or its values do not go together.
    """
    transformers = _transformers()
    read = _read(config)
    kind = read.model_type
    mappings = [getattr(transformers, name) for name in _HEADS]
    found = [mapping[type(read)] for mapping in mappings if type(read) in mapping]
    # A type may have several classes with one kind of head.
    classes = [each for one in found for each in (one if isinstance(one, tuple) else (one,))]
    if not classes:
        raise JobError(f"{kind} is no language model of transformers: {_JOB}")
    named = [each for each in classes if each.__name__ in (read.architectures or ())]
    chosen = (named or classes)[0]
    if chosen.main_input_name != "input_ids":
        raise JobError(
            f"{chosen.__name__} takes {chosen.main_input_name}, not tokens alone: {_JOB}"
        )
    try:
        built: nn.Module = chosen(read)
    except Exception as error:
        raise _unlike(kind, error) from error
    return built.train()


def text(config: Mapping[str, Any], seq_len: int | None = None) -> list[dict[str, Tensor]]:
    """Return one blank sample for the model of a config.

    Args:
        seq_len: tokens of it; None: as many as the model takes.

    Raises:
        JobError: transformers is not installed or does not know it, or the config does not say how
            long its samples are.
    """
    if seq_len is None:
        read = _read(config)
        lengths = [getattr(read, name, None) for name in _LENGTHS]
        seq_len = next((each for each in lengths if isinstance(each, int) and each > 0), None)
    if seq_len is None:
        raise JobError(f"{config['model_type']} does not say how long its samples are: add --seq N")
    tokens = torch.zeros(seq_len, dtype=torch.int64)
    return [{"input_ids": tokens, "labels": tokens}]


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise JobError(
            f"transformers builds the model, and cannot be imported ({error}): "
            "pip install 'zrun[hf]'"
        ) from None


def _read(config: Mapping[str, Any]) -> Any:
    """Return the config as transformers has it."""
    known = _transformers().CONFIG_MAPPING
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise JobError(
            f"transformers {_transformers().__version__} knows no model_type {kind!r}: {_JOB}"
        )
    try:
        return known[kind].from_dict(dict(config))
    except Exception as error:
        raise _unlike(kind, error) from error


def _unlike(kind: str, error: Exception) -> JobError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = "; ".join(lines)[:300] or type(error).__name__
    return JobError(f"these values do not describe a {kind}: {what}")
