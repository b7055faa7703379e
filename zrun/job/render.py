"""Write a job as YAML: with origins (`zrun config show`), or as a form (`zrun init --full`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zrun.job.load import LoadedJob
from zrun.job.scalars import write
from zrun.job.schema import JobKey, find_key
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.section import Ref, Section

_COMMENT_COLUMN = 32


@dataclass(frozen=True)
class _YamlLine:
    """A key with its value, or the key of a section, whose own lines follow."""

    path: tuple[str, ...]
    value: Any
    given: bool
    margin: str

    def __str__(self) -> str:
        value = "" if isinstance(self.value, Section) else f" {write(self.value)}"
        return f"{self.margin}{self.path[-1]}:{value}"

    def with_comment(self, comment: str) -> str:
        """Return the line with a comment at its end; "": without one."""
        if not comment:
            return str(self)
        return f"{str(self).ljust(_COMMENT_COLUMN - 1)} # {comment}"


def with_origins(job: LoadedJob) -> str:
    """Return every value of `job`, and where it was written. The text is a job file again."""
    lines = [
        line.with_comment(_origin(job, line))
        for line in _lines(job.config, (), "", True, as_form=False)
    ]
    return "\n".join(lines) + "\n"


def as_form(config: JobConfig) -> str:
    """Return every key of a job file with its meaning.

    Keys that `config` was given are set, the others commented out.
    """
    lines = [
        line.with_comment(_meaning(line)) for line in _lines(config, (), "", True, as_form=True)
    ]
    return "\n".join(lines) + "\n"


def _lines(
    config: Section, path: tuple[str, ...], margin: str, given: bool, *, as_form: bool
) -> Iterator[_YamlLine]:
    for name, field in type(config).model_fields.items():
        here = (*path, field.alias or name)
        value = getattr(config, name)
        is_given = given and name in config.model_fields_set
        key = find_key(here)
        assert key is not None
        is_section = key.section is not None and not issubclass(key.section, Ref)
        if as_form and value is None and is_section:
            assert key.section is not None
            value = key.section.model_validate(key.example)  # its keys are worth showing
        here_margin = f"{margin}# " if as_form and given and not is_given else margin
        if isinstance(value, dict):
            value = {name: _short(item) for name, item in value.items()}
        if type(value) is Ref and not value.args:
            value = value.call
        yield _YamlLine(here, value, is_given, here_margin)
        if isinstance(value, Section):
            yield from _lines(value, here, f"{here_margin}  ", is_given, as_form=as_form)


def _short(value: Any) -> Any:
    """Return a reference as a person writes it; anything else as it is."""
    if not isinstance(value, Ref):
        return value
    if value.args:
        return value.model_dump(mode="json")
    return value.call


def _origin(job: LoadedJob, line: _YamlLine) -> str:
    """Return the origin of a value; "" of a section, whose values have origins of their own."""
    if isinstance(line.value, Section):
        return ""
    key = ".".join(line.path)
    inside = [
        origin
        for below, origin in job.origins.items()
        if below == key or below.startswith(f"{key}.")
    ]
    return ", ".join(dict.fromkeys(map(str, inside)))


def _meaning(line: _YamlLine) -> str:
    key = find_key(line.path)
    assert key is not None
    if isinstance(line.value, Section):
        return key.description
    notes = [key.description]
    if not all(word in key.description for word in key.takes.split(" | ")):
        notes.append(f"{key.takes} ({key.unit})" if key.unit else key.takes)
    if key.required:
        notes.append("required")
    elif line.given:
        notes.append(f"default {write(default_of(key))}")
    return "; ".join(notes)


def default_of(key: JobKey) -> Any:
    """Return the default of `key` as plain values; None where it is required."""
    if isinstance(key.default, Section):
        return key.default.model_dump(mode="json", by_alias=True)
    return key.default
