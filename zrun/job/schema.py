"""The keys of a job file as data, from pydantic's models: `find_key(("zero", "stage"))`, `keys()`.

All that a user is told about a key (by `zrun explain`, `zrun init --full`, an error message, an
editor) comes from here, and so from `zrun_core.spine`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from zrun.job.problems import KeyPath
from zrun.job.scalars import write
from zrun_core.sizes import SIZE_PATTERN
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.section import Section

_FORMATS = {"regex": "regular expression", "reference": "module:attr"}
_WORDS = {"boolean": "true | false", "null": "null", "string": "text", None: "any value"}
_OBVIOUS = 10_000  # a maximum from here on is told only if it is exceeded
_JSON_NAMES = {int: "integer", str: "string", list: "array"}


@dataclass(frozen=True)
class JobKey:
    """One key of the job file.

    Attributes:
        path: of the key.
        takes: the allowed values in words: "whole number > 0 | auto".
        most: the largest number that it takes, where `takes` does not say so.
        item_takes: as `takes`, for items of a list, or values of a mapping with free keys.
        choices: the words among the allowed values.
        default: None where the key is required.
        required: whether a job must give it.
        unit: of its number; None: it has none.
        description: its meaning.
        example: a value that it takes.
        section: the keys below this one.
        is_union: whether pydantic reports its branches one by one.
        values: words that a text of it may begin with, and the meaning and an example of each.
    """

    path: tuple[str, ...]
    takes: str
    most: float | None
    item_takes: str | None
    choices: tuple[str, ...]
    default: Any
    required: bool
    unit: str | None
    description: str
    example: Any
    section: type[Section] | None
    is_union: bool
    values: Mapping[str, str]

    def __str__(self) -> str:
        return ".".join(self.path)

    @property
    def name(self) -> str:
        return self.path[-1]


def keys(section: type[Section] = JobConfig, path: tuple[str, ...] = ()) -> Iterator[JobKey]:
    """Yield every key below `path` in the order of the file, a section before its own keys."""
    for name in fields(section):
        key = _key(section, (*path, name))
        yield key
        if key.section is not None:
            yield from keys(key.section, key.path)


@cache
def fields(section: type[Section]) -> dict[str, FieldInfo]:
    """Return the fields of `section` by the names that a job file uses."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def find_key(path: KeyPath) -> JobKey | None:
    """Return the key at `path`; None: there is none.

    Inside a list, or a mapping with free keys, it is the key that holds it.
    """
    section: type[Section] | None = JobConfig
    key = None
    for depth, name in enumerate(path):
        if section is None:
            is_container = key is not None and key.item_takes is not None
            return key if is_container else None
        if name not in fields(section):
            if key is None or key.item_takes is None:
                return None
            continue  # a name of the user's, with the same keys below it
        key = _key(section, tuple(str(part) for part in path[: depth + 1]))
        section = key.section
    return key


@cache
def job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job file for editors.

    Unlike pydantic's own, it allows the short forms, and sizes with a unit.
    """
    schema = JobConfig.model_json_schema()
    for section in schema["$defs"].values():
        for fragment in section.get("properties", {}).values():
            if "oneOf" in fragment:  # as pydantic writes a union that says which branch is meant
                fragment["anyOf"] = fragment.pop("oneOf")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for section in _sections_below(JobConfig):
        if section.short is not None:
            long_form = schema["$defs"][section.__name__]
            name, kind = section.short
            short = long_form["properties"][name]
            branches = [
                part
                for part in short.get("anyOf", [short])
                if part.get("type") in (None, _JSON_NAMES[kind])
            ]
            schema["$defs"][section.__name__] = {"anyOf": [*branches, long_form]}
    _allow_units(schema)
    return schema


def _allow_units(schema: Any) -> None:
    """Let every size in a schema, or a part of one, be a text too."""
    if isinstance(schema, list):
        for part in schema:
            _allow_units(part)
    elif isinstance(schema, dict):
        if schema.get("unit") == "bytes":
            schema |= {"type": ["integer", "string"], "pattern": SIZE_PATTERN}
        for part in schema.values():
            _allow_units(part)


def _sections_below(section: type[Section]) -> set[type[Section]]:
    children = {_section_in(field.annotation) for field in section.model_fields.values()} - {None}
    return {
        below
        for child in children
        if child is not None
        for below in (child, *_sections_below(child))
    }


def _properties(section: type[Section]) -> dict[str, Any]:
    schema = job_schema() if section is JobConfig else job_schema()["$defs"][section.__name__]
    long_form = schema["anyOf"][-1] if "anyOf" in schema else schema
    properties: dict[str, Any] = long_form["properties"]
    return properties


@cache
def _key(section: type[Section], path: tuple[str, ...]) -> JobKey:
    field = fields(section)[path[-1]]
    fragment = _properties(section)[path[-1]]
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return JobKey(
        path=path,
        takes=_describe(fragment),
        most=_most(fragment),
        item_takes=_describe_items(fragment),
        choices=_choices(fragment),
        default=default,
        required=field.is_required(),
        unit=_unit(fragment, path[-1]),
        description=field.description or "",
        example=field.examples[0] if field.examples else default,
        section=_section_in(field.annotation),
        is_union=len(_members(field.annotation)) > 1,
        values=dict(fragment.get("values", ())),
    )


def _members(annotation: Any) -> list[Any]:
    """Return the branches of a union without None; of anything else, itself."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [
            member
            for arg in get_args(annotation)
            if arg is not type(None)
            for member in _members(arg)
        ]
    return [annotation]


def _section_in(annotation: Any) -> type[Section] | None:
    sections = (
        member
        for member in _members(annotation)
        if isinstance(member, type) and issubclass(member, Section)
    )
    return next(sections, None)


def _unit(fragment: dict[str, Any], name: str) -> str | None:
    units = {part.get("unit") for part in (fragment, *fragment.get("anyOf", ()))} - {None}
    if units:
        return str(units.pop())
    return "seconds" if name.endswith("_s") else None


def _describe_items(fragment: dict[str, Any]) -> str | None:
    if "prefixItems" in fragment:
        return _describe(fragment["prefixItems"][0])
    if "anyOf" in fragment:
        described = (_describe_items(part) for part in fragment["anyOf"])
        return next((takes for takes in described if takes is not None), None)
    elements = fragment.get("items", fragment.get("additionalProperties"))
    if elements is None:
        return None
    return _describe(elements) if isinstance(elements, dict) else "any value"


def _choices(fragment: dict[str, Any]) -> tuple[str, ...]:
    if "$ref" in fragment:
        return _choices(_definition(fragment))
    words = [*fragment.get("enum", ()), fragment.get("const")]
    below = (word for part in fragment.get("anyOf", ()) for word in _choices(part))
    return (*(word for word in words if isinstance(word, str)), *below)


def _definition(fragment: dict[str, Any]) -> dict[str, Any]:
    definition: dict[str, Any] = job_schema()["$defs"][fragment["$ref"].rpartition("/")[2]]
    return definition


def _describe(fragment: dict[str, Any]) -> str:
    """Return a type of the JSON schema in words."""
    if "anyOf" in fragment:
        return " | ".join(_describe(part) for part in fragment["anyOf"])
    if "$ref" in fragment:
        return _describe(_definition(fragment))
    if "enum" in fragment or "const" in fragment:
        return " | ".join(write(choice) for choice in fragment.get("enum", [fragment.get("const")]))
    return _describe_plain(fragment)


def _describe_plain(fragment: dict[str, Any]) -> str:
    match fragment.get("type"):
        case "array" if "prefixItems" in fragment:
            return f"[{', '.join(_describe(item) for item in fragment['prefixItems'])}]"
        case "array":
            return f"[{_describe(fragment['items'])}, ...]"
        case "object" if "properties" in fragment:
            return "{" + ", ".join(fragment["properties"]) + "}"
        case "object":
            return f"mapping of names to {_describe_items(fragment)}"
        case _ if fragment.get("unit") == "bytes":
            return "size such as 64MiB"
        case "integer":
            return f"whole number{_bounds(fragment)}"
        case "number":
            return f"number{_bounds(fragment)}"
        case "string" if "format" in fragment:
            return _FORMATS[fragment["format"]]
        case "string" if "pattern" in fragment:
            return f"text matching {fragment['pattern']}"
    return _WORDS[fragment.get("type")]


def _most(fragment: dict[str, Any]) -> float | None:
    for part in (*fragment.get("anyOf", ()), *fragment.get("prefixItems", ())):
        most = _most(part)
        if most is not None:
            return most
    maximum: float = fragment.get("maximum", fragment.get("le", 0))  # le: of a size, which is text
    return maximum if maximum >= _OBVIOUS else None


def _bounds(fragment: dict[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "maximum": "<=", "exclusiveMaximum": "<"}
    found = {sign: fragment[name] for name, sign in signs.items() if name in fragment}
    if found.get("<=", 0) >= _OBVIOUS:
        del found["<="]
    return " and".join(f" {sign} {bound}" for sign, bound in found.items())
