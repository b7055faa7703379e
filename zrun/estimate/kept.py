"""Answers of earlier questions: the same question about the same code on the same hardware is not worked out again.

They are read without torch, and without the model's code. What an answer depends on is in its key, but for the files of
the job's own code, whose digests lie beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from zrun_core.spine.cache import are_unchanged, cache_folder, write_cached

if TYPE_CHECKING:
    from zrun_core.plan.answer.outcome import Estimate, SearchResult

# What was asked, at each stage, of a search, the cheapest change, the fastest that is trained; why it does not fit;
# parameters, tokens of a sample, and samples of the data.
Parts: TypeAlias = (
    "tuple[Estimate, tuple[Estimate, ...], SearchResult | None, Estimate | None, Estimate | None, str, int, int | None, "
    "int | None]"
)
_KEPT = 100  # answers in the cache


def key_of(facts: Mapping[str, Any]) -> str:
    """What is equal for equal facts, of this version of zrun and of torch."""
    from zrun.hosts.probe import own_code, version_of

    text = json.dumps(
        {**facts, "zrun": own_code(), "torch": version_of("torch")}, sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read(key: str) -> Parts | None:
    """What was kept, if the files that it came from are what they were."""
    try:
        found = json.loads((cache_folder("answers") / f"{key}.json").read_bytes())
        if not are_unchanged(found["files"]):
            return None
        return _adapter().validate_python(
            _with_buffers(found["parts"], found["buffers"].__getitem__)
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ValidationError):
        return None  # not there, damaged, or of another version


def write(key: str, parts: Any, files: Mapping[str, str]) -> None:
    """Keep an answer, as plain data, for whoever asks the same."""
    numbers: dict[str, int] = {}  # by buffer: most ranks have the same ones
    parts = _with_buffers(
        parts, lambda buffer: numbers.setdefault(json.dumps(buffer), len(numbers))
    )
    buffers = [json.loads(each) for each in numbers]
    text = json.dumps(
        {"files": dict(files), "buffers": buffers, "parts": parts}, separators=(",", ":")
    )
    write_cached(cache_folder("answers") / f"{key}.json", text, _KEPT)


def _with_buffers(value: Any, put: Callable[[Any], Any]) -> Any:
    """`value` with `put` in place of each of the buffers in it."""
    if isinstance(value, dict):
        return {
            key: [put(each) for each in item] if key == "buffers" else _with_buffers(item, put)
            for key, item in value.items()
        }
    return [_with_buffers(item, put) for item in value] if isinstance(value, list) else value


@cache
def _adapter() -> TypeAdapter[Parts]:
    from zrun_core.plan.answer.outcome import Estimate, SearchResult

    maybe = Estimate | None
    return TypeAdapter(
        tuple[
            Estimate,
            tuple[Estimate, ...],
            SearchResult | None,
            maybe,
            maybe,
            str,
            int,
            int | None,
            int | None,
        ]
    )
