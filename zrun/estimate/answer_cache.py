"""Answers of earlier questions: the same question about the same code is answered from a cache.

They are read without torch, and without the model's code. All that an answer depends on is in its
key, but for the files of the job's own code, whose digests lie beside it.
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

# What was asked, at each stage, of a search, the cheapest change, the fastest that is trained; why
# it does not fit; parameters, tokens of a sample, and samples of the data.
Parts: TypeAlias = (
    "tuple[Estimate, tuple[Estimate, ...], SearchResult | None, Estimate | None, str, int, "
    "int | None, int | None]"
)
_KEPT = 100  # answers in the cache


def key_of(facts: Mapping[str, Any]) -> str:
    """Return a digest of `facts`, of this version of zrun and of torch."""
    from zrun.hosts.probe import own_code, version_of

    versions = {"zrun": own_code(), "torch": version_of("torch")}
    text = json.dumps({**facts, **versions}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read(key: str) -> Parts | None:
    """Return the answer that was kept, if the files that it came from have not changed."""
    try:
        found = json.loads((cache_folder("answers") / f"{key}.json").read_bytes())
        if not are_unchanged(found["files"]):
            return None
        parts = _with_buffers(found["parts"], found["buffers"].__getitem__)
        return _adapter().validate_python(parts)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ValidationError):
        return None  # not there, damaged, or of another version


def write(key: str, parts: Any, files: Mapping[str, str]) -> None:
    """Keep an answer.

    Args:
        key: of `key_of`.
        parts: the answer as plain data. Its buffers are written once each: most ranks have the
            same.
        files: digests of the job's own code, by path.
    """
    numbers: dict[str, int] = {}  # by buffer, as JSON

    def number_of(buffer: Any) -> int:
        return numbers.setdefault(json.dumps(buffer), len(numbers))

    numbered = _with_buffers(parts, number_of)
    buffers = [json.loads(each) for each in numbers]
    answer = {"files": dict(files), "buffers": buffers, "parts": numbered}
    text = json.dumps(answer, separators=(",", ":"))
    write_cached(cache_folder("answers") / f"{key}.json", text, _KEPT)


def _with_buffers(value: Any, put: Callable[[Any], Any]) -> Any:
    """Return `value` with `put(buffer)` in place of each buffer in it."""
    if isinstance(value, list):
        return [_with_buffers(item, put) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_buffers(item, put) for key, item in value.items() if key != "buffers"}
    if "buffers" in value:
        found["buffers"] = [put(each) for each in value["buffers"]]
    return found


@cache
def _adapter() -> TypeAdapter[Parts]:
    from zrun_core.plan.answer.outcome import Estimate, SearchResult

    return TypeAdapter(
        tuple[
            Estimate,
            tuple[Estimate, ...],
            SearchResult | None,
            Estimate | None,
            str,
            int,
            int | None,
            int | None,
        ]
    )
