"""What is wrong with a job, and where: every mistake of a file is found before the first is reported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from zrun.job.scalars import write
from zrun_core.errors import JobError

MAX_SHOWN = 100  # what has more problems is no job file, and looking for near names in all of it would take minutes

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class ValueOrigin:
    """Where a value was written: a place in a file, an override on the command line, or nowhere.

    What is written nowhere is the default, or was resolved from auto.
    """

    kind: Literal["file", "override", "default", "auto"]
    text: str = ""  # "job.yaml:12:5", the override as typed, or the reason for the resolved value
    line: int = 0
    column: int = 0

    @classmethod
    def in_file(cls, name: str, line: int, column: int) -> ValueOrigin:
        """A place in the file `name`; the first line and the first column are 1."""
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
        """How a message about this place starts."""
        return f"override {shown_text(self.text)}" if self.kind == "override" else str(self)


DEFAULT = ValueOrigin("default")


@dataclass(frozen=True)
class AutoValue:
    """A key that the job left open, the value it got, and why."""

    key: str
    value: str
    why: str


@dataclass(frozen=True)
class Problem:
    """One mistake: where it stands, the key it is about (empty: the file as a whole), and what to write instead."""

    origin: ValueOrigin
    path: KeyPath
    message: str

    def __str__(self) -> str:
        key = f"{dotted(self.path)}: " if self.path else ""
        return f"{self.origin.label}: {key}{self.message}"


def job_error(name: str, problems: Iterable[Problem]) -> JobError:
    """All problems of the job `name` as one error, a line each, in the order of the file, then of the overrides."""
    ordered = sorted(
        problems, key=lambda p: (p.origin.kind != "file", p.origin.line, p.origin.column)
    )
    lines = [str(problem) for problem in ordered]
    if len(lines) == 1:
        return JobError(lines[0])
    head = f"{len(lines)} problems in {name}{f', of which the first {MAX_SHOWN}' if len(lines) > MAX_SHOWN else ''}"
    return JobError("\n".join([head, *lines[:MAX_SHOWN]]))


def dotted(path: KeyPath) -> str:
    """`("optim", "betas", 1)` as `optim.betas[1]`."""
    text = "".join(
        f"[{part}]" if isinstance(part, int) else f".{shown_text(part)}" for part in path
    )
    return text.removeprefix(".")


def shown_text(text: str) -> str:
    """`text` on one line of a terminal: control characters escaped, cut at 60 characters."""
    safe = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return safe if len(safe) <= 60 else f"{safe[:57]}..."


def shown_value(value: Any) -> str:
    """A value of the file as a message shows it: on one line, short."""
    if value is None:
        return "nothing"
    return shown_text(f'"{value}"' if isinstance(value, str) else write(value))
