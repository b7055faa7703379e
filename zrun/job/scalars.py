"""Read and write scalars of YAML 1.2: `resolve("1e-4") == 0.0001`, `write(1e-4) == "0.0001"`.

PyYAML follows YAML 1.1, where `1e-4` is text, `no` is false, `1:20` is 80 and `0777` is 511. Here,
in the core schema, they are a number, text, text and 777. https://yaml.org/spec/1.2.2/#103-core-schema
"""

from __future__ import annotations

import math
import re
from typing import Any

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")
_PLAIN = re.compile(r"[\w./~](?:[\w./@+~ -]|:(?![ ]|$))*(?<! )")

_MAX_NUMBER_CHARS = 64  # Python refuses to print integers of more than 4300 digits


def resolve(text: str) -> bool | int | float | str | None:
    """Return the value of a plain scalar.

    Raises:
        ValueError: a number of absurd length.
    """
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    number = _number(text)
    return text if number is None else number


def _number(text: str) -> int | float | None:
    for pattern, base in ((_INT, 10), (_OCTAL, 8), (_HEX, 16)):
        if pattern.fullmatch(text):
            return int(_short(text).removeprefix("0o").removeprefix("0x"), base)
    if _FLOAT.fullmatch(text):
        return float(_short(text))
    if match := _INFINITY.fullmatch(text):
        return -math.inf if match.group(1) == "-" else math.inf
    return math.nan if _NAN.fullmatch(text) else None


def _short(text: str) -> str:
    if len(text) > _MAX_NUMBER_CHARS:
        raise ValueError(f"a number of {len(text)} characters; the longest is {_MAX_NUMBER_CHARS}")
    return text


def write(value: Any) -> str:
    """Return `value` on one line of YAML, such that reading it gives `value` again."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float() if math.isinf(value):
            return "-.inf" if value < 0 else ".inf"
        case float() if math.isnan(value):
            return ".nan"
        case int() | float():
            return repr(value)
        case str():
            return _write_text(value)
        case dict():
            items = ", ".join(f"{write(key)}: {write(item)}" for key, item in value.items())
            return "{" + items + "}"
        case list() | tuple():
            return "[" + ", ".join(write(item) for item in value) + "]"
    raise TypeError(f"{type(value).__name__} has no YAML form")


def _write_text(text: str) -> str:
    if _PLAIN.fullmatch(text) and resolve(text) == text:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() else f"\\U{ord(char):08x}"
