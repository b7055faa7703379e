"""A YAML document as plain values, with the place of every key and value.

    document = Document.parse(text, "job.yaml", os.environ)

Only what a job file needs: mappings with text keys, sequences, and the scalars of YAML 1.2.
Anchors, aliases and tags are refused, depth is limited, and no object is constructed, so a hostile
file can neither explode nor run code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from zrun.job.problems import KeyPath, Problem, ValueOrigin, job_error
from zrun.job.scalars import resolve

MAX_DEPTH = 64

_ENV = re.compile(r"\$\{env:([^}]*)\}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# What PyYAML says of the usual slips, and what to write instead.
_HINTS = (
    (r"character '\t'", "indent with spaces, not with tabs"),
    (
        "mapping values are not allowed",
        'put quotes around text that holds ": ", and check the indentation',
    ),
    ("could not find expected ':'", 'write ": " after the key'),
    ("expected ',' or", "close the bracket, or put a comma between the items"),
    ("did not find expected", "check the indentation and the brackets of the lines above"),
    ("<block end>", "align this line with the keys of its mapping"),
    ("found unexpected end of stream", "close the quote"),
)


class _EventStream(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser):
    """PyYAML without its composer, resolver and constructor."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)

    def take(self) -> Any:
        """Return the next event, and move on."""
        return self.get_event()  # type: ignore[no-untyped-call]

    def at(self, kind: type[yaml.Event]) -> bool:
        """Return whether the next event is of this kind."""
        return isinstance(self.peek_event(), kind)  # type: ignore[no-untyped-call]


@dataclass
class Document:
    """Values, and where they were written. Overrides are merged into it before it is validated.

    Attributes:
        name: of the file, for messages.
        value: of the document.
        keys: origins of keys, by path.
        values: origins of values, by path.
        problems: mistakes that did not keep the rest from being read.
    """

    name: str
    value: Any = None
    keys: dict[KeyPath, ValueOrigin] = field(default_factory=dict)
    values: dict[KeyPath, ValueOrigin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str, name: str, environ: Mapping[str, str]) -> Document:
        """Read a document.

        Args:
            environ: variables for `${env:VAR}`.

        Raises:
            JobError: the text is not YAML, or not one document. Smaller mistakes are collected in
                `problems`.
        """
        document = cls(name)
        try:
            events = _EventStream(text)
        except yaml.reader.ReaderError as error:
            before = text[: error.position].split("\n")
            message = f"character U+{ord(text[error.position]):04X} is not allowed in YAML"
            raise document._fatal(len(before), len(before[-1]) + 1, message) from None
        try:
            _YamlReader(document, events, environ).read()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            assert mark is not None
            problem = error.problem or error.context or ""
            hint = next((f"; {write}" for slip, write in _HINTS if slip in problem), "")
            raise document._fatal(
                mark.line + 1, mark.column + 1, f"not valid YAML: {problem}{hint}"
            ) from None
        except (ValueError, OverflowError):  # PyYAML passes an impossible "\U99999999" to chr()
            mark = events.get_mark()
            raise document._fatal(
                mark.line + 1, mark.column + 1, "not valid YAML: no such character"
            ) from None
        return document

    def origin(self, path: KeyPath) -> ValueOrigin:
        """Return where the value at `path` was written, or else the nearest mapping around it."""
        return _nearest(self.values, path)

    def key_origin(self, path: KeyPath) -> ValueOrigin:
        """Return where the key at `path` was written, or else the nearest one around it."""
        return _nearest(self.keys, path)

    def place(self, path: KeyPath, origin: ValueOrigin) -> None:
        """Record that the value at `path`, with all below it, now comes from `origin`."""
        for origins in (self.keys, self.values):
            for below in [known for known in origins if known[: len(path)] == path]:
                del origins[below]
            origins[path] = origin

    def _fatal(self, line: int, column: int, message: str) -> Exception:
        return job_error(
            self.name,
            [*self.problems, Problem(ValueOrigin.in_file(self.name, line, column), (), message)],
        )


def _resolve_or_text(text: str) -> Any:
    try:
        return resolve(text)
    except ValueError:
        return text


def _nearest(origins: Mapping[KeyPath, ValueOrigin], path: KeyPath) -> ValueOrigin:
    while path not in origins and path:
        path = path[:-1]
    return origins[path]


class _YamlReader:
    """Turns events into the document's value, one recursive step per node."""

    def __init__(
        self, document: Document, events: _EventStream, environ: Mapping[str, str]
    ) -> None:
        self._document = document
        self._events = events
        self._environ = environ

    def read(self) -> None:
        self._document.keys[()] = ValueOrigin.in_file(self._document.name, 1, 1)
        self._document.values[()] = self._document.keys[()]
        events = self._events
        events.take()  # stream start
        if events.at(yaml.StreamEndEvent):
            return
        events.take()  # document start
        self._document.value = self._node(())
        events.take()  # document end
        if not events.at(yaml.StreamEndEvent):
            self._problem((), events.take(), "a second document starts here; a job file holds one")

    def _node(self, path: KeyPath) -> Any:
        event = self._events.take()
        if path:
            self._document.values[path] = self._place(event)
        if isinstance(event, yaml.AliasEvent):
            self._problem(path, event, "aliases (*name) are not supported; write the value again")
            return None
        self._refuse_extras(path, event)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(path, event)
        if len(path) >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=event.start_mark
            )
        if isinstance(event, yaml.SequenceStartEvent):
            return list(self._items(path))
        return self._mapping(path)

    def _refuse_extras(self, path: KeyPath, event: Any) -> None:
        if event.anchor is not None:
            self._problem(path, event, "anchors (&name) are not supported; remove it")
        if event.tag is not None:
            self._problem(
                path,
                event,
                "tags (!name) are not supported; remove it, and quote a value that is text",
            )

    def _items(self, path: KeyPath) -> Iterator[Any]:
        index = 0
        while not self._events.at(yaml.SequenceEndEvent):
            yield self._node((*path, index))
            index += 1
        self._events.take()

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._events.at(yaml.MappingEndEvent):
            event = self._events.take()
            key = self._key(path, event)
            if key in found:
                first = self._document.keys[(*path, key)].line
                self._problem(
                    (*path, key), event, f"duplicate key, first on line {first}; keep one of them"
                )
            self._document.keys[(*path, key)] = self._place(event)
            found[key] = self._node((*path, key))
        self._events.take()
        return found

    def _key(self, path: KeyPath, event: Any) -> str:
        if isinstance(event, yaml.ScalarEvent):
            self._refuse_extras(path, event)
            if event.style is not None or isinstance(_resolve_or_text(event.value), str):
                return str(event.value)
            self._problem(
                (*path, event.value), event, f'a key must be text; write "{event.value}" in quotes'
            )
            return str(event.value)
        self._problem(path, event, "a key must be text; quote it if it holds brackets, * or ?")
        self._skip(event)
        return ""

    def _skip(self, event: Any) -> None:
        """Pass over the rest of the node that `event` starts."""
        depth = 0
        while True:
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth == 0:
                return
            event = self._events.take()

    def _scalar(self, path: KeyPath, event: Any) -> Any:
        text = _ENV.sub(lambda match: self._variable(path, event, match.group(1)), event.value)
        if any("\ud800" <= char <= "\udfff" for char in text):
            self._problem(
                path,
                event,
                "half of a surrogate pair; write the character itself, or \\U and 8 digits",
            )
            return None
        if event.style is not None:
            return text
        try:
            return resolve(text)
        except ValueError as error:
            self._problem(path, event, str(error))
            return None

    def _variable(self, path: KeyPath, event: Any, name: str) -> str:
        if not _ENV_NAME.fullmatch(name):
            self._problem(
                path,
                event,
                f"{name!r} is not the name of an environment variable; write ${{env:NAME}}",
            )
        elif name not in self._environ:
            self._problem(
                path, event, f"environment variable {name} is not set; export {name}=... first"
            )
        return self._environ.get(name, "")

    def _place(self, event: Any) -> ValueOrigin:
        mark = event.start_mark
        return ValueOrigin.in_file(self._document.name, mark.line + 1, mark.column + 1)

    def _problem(self, path: KeyPath, event: Any, message: str) -> None:
        self._document.problems.append(Problem(self._place(event), path, message))
