"""Merge `key=value` of the command line into a document: `apply(document, ["zero.stage=3"], env)`.

Values are read like those of the file. A short form on the way is expanded first:

    zero: 2    and    zero.bucket=32MiB    is    zero: {stage: 2, bucket: 32MiB}

A number for `lr`, which is the schedule, is the rate: `optim.lr`. Of `steps`, `tokens` and `epochs`
one that is given here takes the place of the file's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zrun.job.document import Document
from zrun.job.hidden import is_hidden, shown_override
from zrun.job.other_words import RATE, is_rate, key_called
from zrun.job.problems import Problem, ValueOrigin, dotted, shown_value
from zrun.job.schema import find_key
from zrun_core.errors import JobError

LENGTHS = ("steps", "tokens", "epochs")
_UNREADABLE = (
    "not valid YAML: put the value in quotes within those of the shell; or write null, which takes "
    "it from the shell's environment"
)


def apply(document: Document, overrides: Iterable[str], environ: Mapping[str, str]) -> None:
    """Merge `overrides` into `document`; of one key, the last one wins.

    Args:
        document: the job. Mistakes are added to its problems.
        overrides: "key=value".
        environ: variables for `${env:VAR}`.
    """
    if not isinstance(document.value, dict):
        return  # nothing to merge into; validation says so
    for text in overrides:
        origin = ValueOrigin("override", shown_override(text))
        name, equals, value = text.partition("=")
        path = tuple(name.strip().split("."))
        if not equals or not all(path):
            document.problems.append(
                Problem(origin, (), "expected key=value, such as zero.stage=3")
            )
            continue
        try:
            parsed = Document.parse(value, "value", environ)
        except JobError as error:
            message = _UNREADABLE if is_hidden(path) else str(error)
            document.problems.append(Problem(origin, path, message))
            continue
        document.problems.extend(
            Problem(origin, (*path, *inner.path), inner.message) for inner in parsed.problems
        )
        if is_rate(path, parsed.value):
            path = RATE
        if _is_length(path):
            _forget_lengths(document)
        _merge(document, origin, path, parsed.value)


def _is_length(path: tuple[str, ...]) -> bool:
    """Return whether a key says how long to train, in our words or in those of others.

    Below another key none does: `model.args.num_steps` is the model's, `trainer.max_steps` unknown.
    """
    meant = key_called(path[0]) or path
    return len(path) == 1 and meant in [(name,) for name in LENGTHS]


def _forget_lengths(document: Document) -> None:
    """Leave out what the file says of how long to train: the command line says it anew."""
    for name in LENGTHS:
        if document.origin((name,)).kind == "file":
            document.value.pop(name, None)


def _merge(document: Document, origin: ValueOrigin, path: tuple[str, ...], value: Any) -> None:
    node = document.value
    for depth, name in enumerate(path[:-1], start=1):
        above = path[:depth]
        below = _long_form(above, node.get(name))
        if not isinstance(below, dict):
            key = dotted(above)
            message = f"{key} is {shown_value(below)}, which has no keys; write {key}=value"
            document.problems.append(Problem(origin, path, message))
            return
        node[name] = below
        node = below
        document.keys.setdefault(above, origin)
        document.values.setdefault(above, origin)
    node[path[-1]] = value
    document.place(path, origin)


def _long_form(path: tuple[str, ...], value: Any) -> Any:
    """Return `value` of the key at `path` as a mapping, if it may be one."""
    key = find_key(path)
    if key is not None and key.section is not None:
        value = key.section.expand(value)
    return {} if value is None else value
