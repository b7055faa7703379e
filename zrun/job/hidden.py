"""Values that are neither shown nor stored: those of variables whose names look like secrets.

A job file may hold them, and so may a command line. The job that a run records, the command that
goes on with it, and messages about mistakes leave them out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from zrun.job.document import Document
from zrun.job.environment import is_secret
from zrun.job.problems import KeyPath
from zrun.job.scalars import write
from zrun.job.schema import find_key
from zrun_core.spine.config import JobConfig

_ENV = "env"
_HIDDEN = "***"
_SECRET = re.compile(
    r"(^|[_.-])((api|access|auth|private|secret)_?key|key|token|secret|passw\w*|credentials?)$",
    re.IGNORECASE,
)
_FROM_SHELL = re.compile(r"\s*(~|null|Null|NULL|\$\{env:\w+\})?\s*")


def without_secrets(job: JobConfig) -> JobConfig:
    """Return `job` as it may be written to disk, or printed: it takes secrets from the shell."""
    shown = {name: None if is_secret(name) else value for name, value in job.env.items()}
    return job.model_copy(update={"env": shown})


def is_hidden(path: KeyPath) -> bool:
    """Return whether the value of a key is not shown: of what may be meant for `env`, too."""
    if str(path[0]).lower().startswith(_ENV):
        return len(path) == 1 or is_secret(str(path[1]))
    return find_key(path) is None and any(is_secret(str(name)) for name in path)


def shown_override(text: str) -> str:
    """Return an override as messages show it."""
    name, equals, _ = text.partition("=")
    if not equals:
        is_meant = text.lower().startswith(_ENV) and is_secret(text)
        return f"{_ENV}.***" if is_meant else text
    return f"{name}=***" if is_hidden(_path(name)) else text


def without_secret_values(
    overrides: Iterable[str], environ: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Leave the secrets out of overrides that were read: they take them from the shell instead.

    Args:
        overrides: "key=value", each without a mistake.
        environ: variables for `${env:VAR}`.

    Returns:
        The overrides, and the names of variables whose values were left out.
    """
    kept = []
    names = []
    for text in overrides:
        name, _, value = text.partition("=")
        path = _path(name)
        if path[0] == _ENV and is_hidden(path):
            inside = Document.parse(value, "value", environ).value
            if len(path) == 2:
                if not _FROM_SHELL.fullmatch(value):
                    names.append(path[1])
                    text = f"{name}=null"
            elif isinstance(inside, dict):
                secret = [each for each in inside if inside[each] is not None and is_secret(each)]
                if secret:
                    names += secret
                    text = f"{name}={write({**inside, **dict.fromkeys(secret)})}"
        kept.append(text)
    return kept, names


# What is handed around, such as a page or the numbers of a tracker, leaves out more.


def may_be_secret(name: str) -> bool:
    """Return whether the value of a key or an argument is not handed around, by its name."""
    return _SECRET.search(name) is not None


def shown_value(name: str, value: Any) -> str:
    """Return a value as YAML has it, without secrets inside of it."""
    if may_be_secret(name):
        return _HIDDEN
    return write(_without_secrets(value))


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _HIDDEN if may_be_secret(str(key)) else _without_secrets(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    return value


def shown_command(command: str) -> str:
    """Return a command with `***` for the values of `env` and of what is named like a secret."""
    return shlex.join(_shown_word(word) for word in shlex.split(command))


def _shown_word(word: str) -> str:
    key, is_override, _ = word.partition("=")
    is_hidden = key == _ENV or key.startswith(f"{_ENV}.") or may_be_secret(key)
    return f"{key}={_HIDDEN}" if is_override and is_hidden else word


def _path(name: str) -> tuple[str, ...]:
    return tuple(name.strip().split("."))
