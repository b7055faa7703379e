"""Mistakes in a job, each with its place: all of a file are found before the first is reported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from zrun.job.scalars import write
from zrun_core.errors import JobError

# A file with more problems is no job file, and looking for near names in all of it takes minutes.
MAX_SHOWN = 100

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class ValueOrigin:
    """The place where a value was written: in a file, on the command line, or nowhere.

    Attributes:
        kind: "default" and "auto" (resolved by zrun) were written nowhere.
        text: "job.yaml:12:5", the override as it may be shown, or the reason for the
            resolved value.
        line: in a file, from 1.
        column: in a file, from 1.
    """

    kind: Literal["file", "override", "default", "auto"]
    text: str = ""
    line: int = 0
    column: int = 0

    @classmethod
    def in_file(cls, name: str, line: int, column: int) -> ValueOrigin:
        """Return a place in a file.

        Args:
            line, column: the first one is 1.
        """
        return cls("file", f"{name}:{line}:{column}", line, column)

    def __str__(self) -> str:
        match self.kind:
            case "file":
                return self.text
            case "auto":
                return f"auto: {self.text}"
        return self.kind

    @property
    def label(self) -> str:
        """The beginning of a message about this place."""
        if self.kind == "override":
            return f"override {shown_text(self.text)}"
        return str(self)


DEFAULT = ValueOrigin("default")


@dataclass(frozen=True)
class Problem:
    """One mistake.

    Attributes:
        origin: its place.
        path: of the key that it is about; empty: the file as a whole.
        message: what is wrong, and what to write instead.
    """

    origin: ValueOrigin
    path: KeyPath
    message: str

    def __str__(self) -> str:
        key = f"{dotted(self.path)}: " if self.path else ""
        return f"{self.origin.label}: {key}{self.message}"


def job_error(name: str, problems: Iterable[Problem]) -> JobError:
    """Return all problems of the job `name` as one error, a line each.

    In the order of the file, then of the overrides.
    """
    ordered = sorted(
        problems, key=lambda p: (p.origin.kind != "file", p.origin.line, p.origin.column)
    )
    lines = [str(problem) for problem in ordered]
    if len(lines) == 1:
        return JobError(lines[0])
    head = f"{len(lines)} problems in {name}"
    if len(lines) > MAX_SHOWN:
        head += f", the first {MAX_SHOWN} of them"
    return JobError("\n".join([head, *lines[:MAX_SHOWN]]))


def dotted(path: KeyPath) -> str:
    """Return `("optim", "betas", 1)` as `optim.betas[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{shown_text(part)}"
    return text.removeprefix(".")


def shown_text(text: str) -> str:
    """Return `text` on one line of a terminal: control characters escaped, cut at 60 characters."""
    safe = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    if len(safe) <= 60:
        return safe
    return f"{safe[:57]}..."


def shown_value(value: Any) -> str:
    """Return a value of the file as a message shows it: on one line, short."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return shown_text(f'"{value}"')
    return shown_text(write(value))
