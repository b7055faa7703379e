"""The types of a manifest's fields, each in its range, and the words for a value that is not.

A type here is what pydantic checks while it builds the dataclasses of `manifest` from JSON. Numbers
are strict: `true`, "7" and 7.0 are no integers. Text and lists need not be, since JSON has only one
kind of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from zrun_core.errors import CheckpointError

MANIFEST = "manifest.json"
MAX_BYTES = 2**28  # of a manifest, and of the record of a rank
VALUE = "value"  # the state that is the tensor itself, in the format of its master copy
RANK = "rank"  # what belongs to a rank, not to a tensor of the model: `<kind>/<rank>/<name>`
KINDS = ("param", "frozen", "buffer")
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
LARGEST = 2**62  # of any count: what the file system and torch still take as a signed number

_NUMBER_CLASSES = {
    "float": "float",
    "bfloat": "float",
    "complex": "complex",
    "int": "integer",
    "uint": "integer",
    "bool": "bool",
}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SAMPLE_NUMBER = re.compile(r"\d{1,18}")
_MAX_CHARACTERS = 4096
_MAX_DEPTH = 100  # of what a job, a script or an optimizer adds
_SHOWN = 40  # characters of a wrong value


def is_name(text: str) -> bool:
    """Return whether `text` can be a single component of a path and nothing else."""
    return _NAME.fullmatch(text) is not None and ".." not in text and text != "."


def number_class(dtype: str) -> str:
    """Return the class of a format: within it, values keep their meaning, if not precision."""
    kind = re.match("[a-z]*", dtype)
    assert kind is not None
    return _NUMBER_CLASSES[kind[0]]


def rank_file(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def refuse(problem: str, what: str = MANIFEST) -> NoReturn:
    """Raise the `CheckpointError` that says what is wrong with the manifest, or with `what`."""
    raise CheckpointError(f"{what} {problem}")


def contradict(problem: str, what: str = MANIFEST) -> NoReturn:
    """Raise the `CheckpointError` that says which parts of it contradict each other."""
    refuse(f"is not consistent: {problem}", what)


def first_twice(names: Iterable[str]) -> str | None:
    """Return the first name that is there a second time."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


# Checks of single values


def _wrong(problem: str) -> PydanticCustomError:
    return PydanticCustomError("manifest", problem)


def _check_text(text: str) -> str:
    if not 0 < len(text) <= _MAX_CHARACTERS or not text.isprintable():
        raise _wrong(_PROBLEMS["string_type"])
    return text


def _check_name(text: str) -> str:
    if not is_name(text):
        raise _wrong(f"{text[:140]!r} is not a plain name in the folder")
    return text


def _one_of(known: Collection[str]) -> AfterValidator:
    def check(text: str) -> str:
        if text not in known:
            raise _wrong(f"{text[:_SHOWN]!r} is unknown")
        return text

    return AfterValidator(check)


def _check_sample_number(text: str) -> str:
    if _SAMPLE_NUMBER.fullmatch(text) is None:
        raise _wrong(f"{text[:_SHOWN]!r} is not the number of a sample")
    return text


def _check_not_zero(count: int) -> int:
    if count == 0:
        raise _wrong("0 is too few")
    return count


def _check_positive(number: float) -> float:
    if number <= 0:
        raise _wrong(f"{number} is not more than 0")
    return number


def _check_no_params(options: dict[str, Any]) -> dict[str, Any]:
    if "params" in options:
        raise _wrong("params are no option")
    return options


def _check_depth(tree: dict[str, Any]) -> dict[str, Any]:
    """Check an object of which nothing is known but that it can be walked through."""
    level: list[Any] = [tree]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return tree
    raise _wrong(f"objects inside of more than {_MAX_DEPTH} others")


Count = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
NonZero = Annotated[Count, AfterValidator(_check_not_zero)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
PositiveNumber = Annotated[Number, AfterValidator(_check_positive)]
Text = Annotated[str, AfterValidator(_check_text)]
Name = Annotated[Text, AfterValidator(_check_name)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Dtype = Annotated[Text, _one_of(ITEM_BYTES)]
Kind = Annotated[Text, _one_of(KINDS)]
SampleNumber = Annotated[str, AfterValidator(_check_sample_number)]
Options = Annotated[dict[str, Any], AfterValidator(_check_no_params)]
Tree = Annotated[dict[str, Any], AfterValidator(_check_depth)]


# Of a dataclass: whether it takes keys that it has no field for. What holds it has no say in that.
exact_keys = with_config(ConfigDict(extra="forbid"))
any_keys = with_config(ConfigDict(extra="ignore"))


def matching(kind: type) -> AfterValidator:
    """Return a check that an object fits the dataclass `kind`; the object itself stays as it is."""

    @cache
    def adapter() -> TypeAdapter[Any]:
        return TypeAdapter(kind)

    def check(raw: dict[str, Any]) -> dict[str, Any]:
        adapter().validate_python(raw)
        return raw

    return AfterValidator(check)


# Reading

T = TypeVar("T")


def parse_json(text: bytes, what: str = MANIFEST) -> dict[str, Any]:
    """Return the JSON object that `text` is; numbers are finite, and no key is there twice.

    Args:
        text: in UTF-8.

    Raises:
        CheckpointError: it is none.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key twice")
        return found

    def refuse_constant(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    try:
        raw = json.loads(
            text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant
        )
    except (ValueError, RecursionError) as error:
        refuse(f"is not JSON: {str(error)[:100]}", what)
    if not isinstance(raw, dict):
        refuse("is not a JSON object", what)
    return raw


def read(
    adapter: TypeAdapter[T],
    raw: Any,
    where: str,
    kinds: Mapping[str, type],
    what: str = MANIFEST,
) -> T:
    """Return what `adapter` makes of JSON.

    Args:
        kinds: the dataclasses that are inside, by the field that holds them; `where` is that of
            the outermost.

    Raises:
        CheckpointError: a value is not of its type or not in its range; the message says which.
    """
    try:
        return adapter.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    contradict(_in_words(first, where, kinds), what)


# By the type of pydantic's error.
_PROBLEMS = {
    "string_type": f"not a text of 1 to {_MAX_CHARACTERS} printable characters",
    "string_unicode": f"not a text of 1 to {_MAX_CHARACTERS} printable characters",
    "string_pattern_mismatch": "not a digest of 32 hexadecimal digits",
    "dict_type": "not an object",
    "list_type": "not a list",
    "tuple_type": "not a list",
}
_PROBLEMS_OF_VALUES = {
    "int_type": "is not a whole number from 0 to 2^62",
    "greater_than_equal": "is not a whole number from 0 to 2^62",
    "less_than_equal": "is not a whole number from 0 to 2^62",
    "float_type": "is not a number",
    "finite_number": "is not a number",
    "literal_error": "is unknown",
}
_WRONG_KEYS = ("missing", "unexpected_keyword_argument", "dataclass_type")


def _in_words(error: ErrorDetails, where: str, kinds: Mapping[str, type]) -> str:
    """Return where something is wrong, and what: `the manifest, files[0], name: not a text ...`."""
    kind = error["type"]
    path = error["loc"]
    if kind in ("missing", "unexpected_keyword_argument"):
        path = path[:-1]  # without the key itself
    holder = place = where
    for part in path:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier():  # not what a forger has called it
            holder = part[:_SHOWN]
            place += f", {holder}"
    if kind in _WRONG_KEYS:
        # What is not compared is not in the JSON either.
        keys = ", ".join(field.name for field in fields(kinds[holder]) if field.compare)
        return f"{place} does not have the keys {keys}"
    if kind in _PROBLEMS:
        return f"{place}: {_PROBLEMS[kind]}"
    if kind in _PROBLEMS_OF_VALUES:
        return f"{place}: {_shown(error['input'])} {_PROBLEMS_OF_VALUES[kind]}"
    return f"{place}: {error['msg']}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return repr(str(value)[:_SHOWN])
