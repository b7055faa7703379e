"""Validate a document: a `JobConfig`, or every problem, told once in the words of the job file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from zrun.job.document import Document
from zrun.job.hidden import is_hidden
from zrun.job.nearest import nearest, nearest_key, siblings
from zrun.job.other_words import advice, is_known, is_section, value_called
from zrun.job.problems import (
    MAX_SHOWN,
    KeyPath,
    Problem,
    ValueOrigin,
    dotted,
    job_error,
    shown_value,
)
from zrun.job.scalars import write
from zrun.job.schema import JobKey, find_key
from zrun_core.spine.config import JobConfig


def validate(document: Document) -> JobConfig:
    """Return the job that `document` describes.

    Raises:
        JobError: with every problem of the document.
    """
    if not isinstance(document.value, dict):
        raise job_error(document.name, document.problems or [_not_a_mapping(document)])
    config, found = _attempt(document, document.value)
    if found:
        # Rules between keys are only checked once each key is right by itself: put those right and
        # look again.
        found += _attempt(document, _mended(document.value, found))[1]
    problems = _without_echoes([*document.problems, *found])
    if config is None or problems:
        raise job_error(document.name, problems)
    return config


def _not_a_mapping(document: Document) -> Problem:
    if document.value is None:
        message = "the file is empty; `zrun init -o -` prints a job to start from"
    else:
        value = shown_value(document.value)
        message = f"a job is a mapping of keys, such as name: gpt-1b, but this is {value}"
    return Problem(document.origin(()), (), message)


def _attempt(
    document: Document, value: Mapping[str, Any]
) -> tuple[JobConfig | None, list[Problem]]:
    try:
        return JobConfig.model_validate(value), []
    except ValidationError as error:
        return None, _explain(document, error)


def _mended(value: Mapping[str, Any], problems: Iterable[Problem]) -> dict[str, Any]:
    """Return `value` with a good example under each top-level key that has a problem."""
    mended = dict(value)
    for name in {str(problem.path[0]) for problem in problems if problem.path}:
        mended.pop(name, None)
        key = find_key((name,)) or find_key((nearest_key((name,)) or (name,))[:1])
        if key is not None and (key.name == name or key.name not in mended):
            mended[key.name] = key.example
    return mended


def _without_echoes(problems: Iterable[Problem]) -> list[Problem]:
    """Return the first problem of each key: one in the YAML itself makes others at its place."""
    first: dict[tuple[ValueOrigin, KeyPath], Problem] = {}
    for problem in problems:
        first.setdefault((problem.origin, problem.path), problem)
    return list(first.values())


@dataclass(frozen=True)
class _Mistake:
    """A mistake that pydantic found at one key.

    Attributes:
        path: of the key, without branches of unions.
        kind: pydantic's type of error.
        message: pydantic's.
        value: that is wrong.
    """

    path: KeyPath
    kind: str
    message: str
    value: Any


def _explain(document: Document, error: ValidationError) -> list[Problem]:
    found = _one_per_key(
        [_mistake(detail) for detail in error.errors(include_url=False)[:MAX_SHOWN]]
    )
    mistakes = [each for mistake in found for each in _by_key_of_others(mistake)]
    unknown = {
        mistake.path: nearest_key(mistake.path)
        for mistake in mistakes
        if mistake.kind == "extra_forbidden"
    }
    problems = []
    for mistake in mistakes:
        if mistake.path in unknown:
            problems.append(_unknown_key(document, mistake, unknown[mistake.path]))
        elif mistake.kind == "missing" and mistake.path in unknown.values():
            continue  # it is there, misspelt
        elif mistake.kind == "missing":
            problems.append(_missing_key(document, mistake.path))
        elif mistake.kind == "value_error":
            problems.append(_broken_rule(document, mistake))
        else:
            problems.append(_wrong_value(document, mistake))
    return problems


def _mistake(detail: ErrorDetails) -> _Mistake:
    """Return an error of pydantic's; names of union branches, which are no keys, are dropped."""
    path: KeyPath = ()
    is_branch = False
    for part in detail["loc"]:
        if is_branch:
            is_branch = False
            continue
        path = (*path, part)
        key = find_key(path)
        is_branch = key is not None and key.is_union and key.path == path
    kind = detail["type"]
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "missing" and isinstance(path[-1], int):
        return _Mistake(path[:-1], "too_short", message, detail["input"])
    return _Mistake(path, kind, message, detail["input"])


def _one_per_key(mistakes: Iterable[_Mistake]) -> list[_Mistake]:
    """Return one mistake per key, where each branch of a union reports its own.

    The branch that got furthest into the value is the one that was meant: for `precision: {x: 1}`
    the branch that takes a mapping says that x is unknown, and the one that takes a word, that this
    is no word. The second one is left out.
    """
    by_path: dict[KeyPath, list[_Mistake]] = {}
    for mistake in mistakes:
        by_path.setdefault(mistake.path, []).append(mistake)
    chosen = []
    for path, rivals in by_path.items():
        above = [by_path[path[:depth]][0] for depth in range(len(path)) if path[:depth] in by_path]
        if any(not isinstance(mistake.value, dict | list) for mistake in above):
            continue  # a branch took the value for a short form; none of them fits
        below = any(len(other) > len(path) and other[: len(path)] == path for other in by_path)
        if below and isinstance(rivals[0].value, dict | list):
            continue  # the branch that takes a mapping or a list got further
        if below or len(rivals) > 1:
            chosen.append(_Mistake(path, "union", "", rivals[0].value))
        else:
            chosen.append(rivals[0])
    return chosen


def _by_key_of_others(mistake: _Mistake) -> list[_Mistake]:
    """Return a mistake for each known key of a section of another tool; else the mistake itself."""
    is_other = mistake.kind == "extra_forbidden" and is_section(str(mistake.path[-1]))
    if not is_other or not isinstance(mistake.value, dict):
        return [mistake]
    below = [
        _Mistake((*mistake.path, *path), mistake.kind, mistake.message, value)
        for path, value in _leaves(mistake.value)
        if is_known(".".join(map(str, (mistake.path[-1], *path))))
    ]
    return below[:MAX_SHOWN] or [mistake]


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from (((name, *path), leaf) for path, leaf in _leaves(value))
        else:
            yield (name,), value


def _unknown_key(document: Document, mistake: _Mistake, meant: KeyPath | None) -> Problem:
    origin = document.key_origin(mistake.path)
    name = ".".join(map(str, mistake.path))
    parent = mistake.path[:-1]
    key = find_key(meant) if meant is not None else None
    instead, found = advice(name), value_called(name, mistake.value)
    if instead is not None:
        message = f"unknown key; {instead}"
    elif found is not None and found.value is None:
        message = f"unknown key; leave it out: without {dotted(found.path)} it is off"
    elif found is not None:
        example = "" if found.is_exact else "for example "
        message = f"unknown key; write {example}{_to_write(origin, found.path, found.value)}"
    elif key is None:
        owner = f"{dotted(parent)} has" if find_key(parent) else "a job has"
        message = f"unknown key; {owner} {', '.join(siblings(parent))}"
    else:
        why = None if is_hidden(mistake.path) else _why_not_taken(key.path, mistake.value)
        is_shown = why is None and not is_hidden(mistake.path)
        value = mistake.value if is_shown else key.example
        is_below = len(key.path) > len(parent) and key.path[: len(parent)] == parent
        below = key.path[len(parent) :] if is_below else key.path
        example = "" if is_shown else "for example "
        instead = why or f"write {example}{_to_write(origin, key.path, value, below)}"
        message = f'unknown key; did you mean "{".".join(below)}"? {instead}'
    return Problem(origin, mistake.path, message)


def _why_not_taken(path: tuple[str, ...], value: Any) -> str | None:
    """Return why the key at `path` does not take a value by itself; None: it does.

    Empty: the value is of another kind.
    """
    if not isinstance(value, str | int | float | list):
        return ""
    job: Any = value
    for name in reversed(path):
        job = {name: job}
    try:
        JobConfig.model_validate(job)
    except ValidationError as error:
        found = [
            detail
            for detail in error.errors(include_url=False)
            if detail["loc"][:1] == path[:1] and detail["type"] != "missing"
        ]
        if found and found[0]["type"] != "value_error":
            return ""
        if found and isinstance(value, str):  # a number may be refused for what stands beside it
            return found[0]["msg"].removeprefix("Value error, ")
    return None


def _to_write(origin: ValueOrigin, path: KeyPath, value: Any, below: KeyPath = ()) -> str:
    """Return a key and its value as the user writes them: in the file, or on the command line.

    `below` is the part of the path that the file has yet to say; empty: all of it.
    """
    if origin.kind == "override":
        return shlex.quote(f"{dotted(path)}={write(value)}")
    return _line(below or path, value)


def _missing_key(document: Document, path: KeyPath) -> Problem:
    key = find_key(path)
    assert key is not None
    message = f"missing key ({key.description}); write {_line(key.path[-1:], key.example)}"
    return Problem(document.key_origin(path[:-1]), path, message)


def _broken_rule(document: Document, mistake: _Mistake) -> Problem:
    if mistake.path:
        return Problem(
            document.origin(mistake.path), _written(document, mistake.path), mistake.message
        )
    # A rule between keys: point at the last of those that it names.
    named = [
        document.key_origin((name,))
        for name in document.value
        if name in re.findall(r"\w+", mistake.message)
    ]
    return Problem(named[-1] if named else document.origin(()), (), mistake.message)


def _wrong_value(document: Document, mistake: _Mistake) -> Problem:
    path = _written(document, mistake.path)
    key = find_key(path)
    assert key is not None
    is_element = len(path) > len(key.path)
    wanted = key.item_takes if is_element else key.takes
    if key.most is not None and not is_element and _exceeds(mistake.value, key.most):
        wanted = f"{wanted}, at most {key.most:g}"
    found = _kind(mistake.value) if is_hidden(mistake.path) else shown_value(mistake.value)
    origin = document.origin(mistake.path)
    message = f"expected {wanted}, found {found}; {_what_to_write(origin, path, key, mistake)}"
    return Problem(origin, path, message)


def _kind(value: Any) -> str:
    """Return what a value is, where the value itself is not shown."""
    kinds = {dict: "a mapping", list: "a list", str: "text", type(None): "nothing"}
    return kinds.get(type(value), "a number" if type(value) in (int, float) else "true or false")


def _exceeds(value: Any, most: float) -> bool:
    return type(value) in (int, float) and value > most


def _what_to_write(origin: ValueOrigin, path: KeyPath, key: JobKey, mistake: _Mistake) -> str:
    is_item = isinstance(path[-1], int)
    below = (key.name if is_item else str(path[-1]),)
    if isinstance(mistake.value, str):
        choice = nearest(mistake.value, key.choices)
        if choice is not None:
            return f'did you mean "{choice}"? write {_to_write(origin, path, choice, below)}'
    if mistake.kind == "string_type" and isinstance(mistake.value, bool | int | float):
        if is_hidden(mistake.path):
            return "put it in quotes"
        quoted = f'"{write(mistake.value)}"'
        is_named = len(mistake.path) > len(key.path) and key.item_takes is not None
        name = mistake.path[-1] if is_named else below[0]  # a name of the user's, in a mapping
        return f"write {quoted}" if is_item else f"write {name}: {quoted}"
    if len(path) > len(key.path):
        return f"write for example {_to_write(origin, key.path, key.example, key.path[-1:])}"
    return f"write for example {_to_write(origin, path, key.example, below)}"


def _written(document: Document, path: KeyPath) -> KeyPath:
    """Return `path` as the file has it.

    `precision: bf61` is about `precision`, although `precision.compute` is wrong.
    """
    is_there = path in document.values or isinstance(path[-1], int)
    if is_there or path[:-1] not in document.values:
        return path
    return path[:-1]


def _line(path: tuple[str, ...] | KeyPath, value: Any) -> str:
    """Return `zero: {bucket: 64MiB}` for `("zero", "bucket")`."""
    head, *rest = (str(part) for part in path)
    for name in reversed(rest):
        value = {name: value}
    return f"{head}: {write(value)}"
