"""`key=value` from the command line, merged into a document: `apply(document, ["zero.stage=3", "optim.lr=3e-4"], env)`.

Values are read like those of the file. A short form on the way is expanded first, so that `zero.bucket=32MiB` on top of
`zero: 2` keeps the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zrun.job.document import Document
from zrun.job.problems import Problem, ValueOrigin, dotted, shown_value
from zrun.job.schema import find_key
from zrun_core.errors import JobError


def apply(document: Document, overrides: Iterable[str], environ: Mapping[str, str]) -> None:
    """Merge `overrides` into `document`, the last one of a key winning. Mistakes are added to its problems."""
    if not isinstance(document.value, dict):
        return  # nothing to merge into; validation says so
    for text in overrides:
        origin = ValueOrigin("override", text)
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
            document.problems.append(Problem(origin, path, str(error)))
            continue
        document.problems.extend(
            Problem(origin, (*path, *inner.path), inner.message) for inner in parsed.problems
        )
        _merge(document, origin, path, parsed.value)


def _merge(document: Document, origin: ValueOrigin, path: tuple[str, ...], value: Any) -> None:
    node = document.value
    for depth, name in enumerate(path[:-1], start=1):
        above = path[:depth]
        below = _long_form(above, node.get(name))
        if not isinstance(below, dict):
            what = f"{dotted(above)} is {shown_value(below)}, which has no keys; write {dotted(above)}=value"
            document.problems.append(Problem(origin, path, what))
            return
        node[name] = node = below
        document.keys.setdefault(above, origin)
        document.values.setdefault(above, origin)
    node[path[-1]] = value
    document.place(path, origin)


def _long_form(path: tuple[str, ...], value: Any) -> Any:
    key = find_key(path)
    if key is not None and key.section is not None:
        value = key.section.expand(value)
    return {} if value is None else value
