"""Read `job.yaml` of a run: each key, its value, and where that came from.

The launcher writes the origin of a value as a comment behind it (`zrun.job.render`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from zrun.job.document import Document
from zrun.job.problems import KeyPath
from zrun_core.errors import JobError

Kind = Literal["file", "override", "auto", "default", ""]

_COMMENT = " # "


class RecordedKey(NamedTuple):
    """A key of a job as it ran.

    Attributes:
        kind: of its origin; empty: it tells none.
        origin: `job.yaml:12:5`, `override`, `auto: why`, `default`; empty: it tells none.
    """

    path: KeyPath
    value: Any
    kind: Kind
    origin: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


def recorded_keys(text: str) -> list[RecordedKey]:
    """Return the keys of a job with their values.

    Raises:
        JobError: the text is not YAML.
    """
    document = Document.parse(text, "job.yaml", {})
    lines = text.split("\n")
    found = []
    for path, value in _leaves(document, (), document.value):
        place = document.values[path]
        origin = _comment(lines[place.line - 1], place.column - 1, value)
        found.append(RecordedKey(path, value, _kind(origin), origin))
    return found


def _leaves(document: Document, path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield what is written on the line of its key; the lines of a section follow it."""
    is_section = isinstance(value, dict) and (
        not path or document.values[path].line != document.keys[path].line
    )
    if not is_section:
        if path:
            yield path, value
        return
    for name, inside in value.items():
        yield from _leaves(document, (*path, name), inside)


def _comment(line: str, column: int, value: Any) -> str:
    """Return the comment behind a value, which may hold a `#` itself."""
    end = line.find(_COMMENT, column)
    while end >= 0:
        if _reads_as(line[column:end], value):
            return line[end + len(_COMMENT) :].strip()
        end = line.find(_COMMENT, end + 1)
    return ""


def _reads_as(text: str, value: Any) -> bool:
    try:
        return bool(Document.parse(text, "", {}).value == value)
    except JobError:
        return False


def _kind(origin: str) -> Kind:
    match origin.partition(":")[0]:
        case "":
            return ""
        case "default":
            return "default"
        case "auto":
            return "auto"
    # Of a mapping that has both, the command line came last.
    return "override" if "override" in origin.split(", ") else "file"
