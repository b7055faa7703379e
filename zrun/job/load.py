"""Load a job file: `load_job(Path("job.yaml"), ["zero.stage=3"]).config`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zrun.job import overrides as command_line
from zrun.job.document import Document
from zrun.job.foreign import refuse_foreign, refuse_script
from zrun.job.other_words import move_rate
from zrun.job.problems import DEFAULT, Problem, ValueOrigin, job_error
from zrun.job.validate import validate
from zrun_core.errors import JobError
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sections.section import Section

MAX_FILE_BYTES = 2**20


@dataclass(frozen=True)
class LoadedJob:
    """A job, and where each of its values was written.

    Attributes:
        config: the job.
        path: of its file.
        origins: by dotted key, of every key that holds a value: "zero.stage", "model.args.dim".
    """

    config: JobConfig
    path: Path
    origins: Mapping[str, ValueOrigin]


@dataclass(frozen=True)
class JobValue:
    """One value of a job.

    Attributes:
        path: of its key.
        value: as validated.
        given: by the file or an override; else it is the default.
    """

    path: tuple[str, ...]
    value: Any
    given: bool

    def __str__(self) -> str:
        return ".".join(self.path)


def load_job(
    path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> LoadedJob:
    """Read a job file.

    Args:
        overrides: "key=value", on top of the file.
        environ: variables for `${env:VAR}`.

    Raises:
        JobError: with every problem of the file and of the overrides, one line each.
    """
    text = _read(path)
    refuse_script(path)
    document = Document.parse(text, str(path), environ)
    refuse_foreign(path, document.value)
    move_rate(document)
    command_line.apply(document, overrides, environ)
    config = validate(document)
    origins = {}
    for value in job_values(config):
        origins[str(value)] = document.origin(value.path) if value.given else DEFAULT
    return LoadedJob(config, path, origins)


def job_values(
    config: Section, path: tuple[str, ...] = (), given: bool = True
) -> Iterator[JobValue]:
    """Yield every value of a section, in the order of the definition.

    Args:
        given: whether the section itself was given.
    """
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        here = (*path, field.alias or name)
        is_given = given and name in config.model_fields_set
        if isinstance(value, Section):
            yield from job_values(value, here, is_given)
        elif isinstance(value, dict) and value:
            for key, item in value.items():
                if isinstance(item, Section):
                    yield from job_values(item, (*here, key), is_given)
                else:
                    yield JobValue((*here, key), item, is_given)
        else:
            yield JobValue(here, value, is_given)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise JobError(
            f"{path}: no such file; `zrun init -o {path}` writes one, with its train.py"
        ) from None
    except IsADirectoryError:
        raise JobError(f"{path} is a directory; name the job file in it") from None
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise JobError(
            f"{path} is larger than 1 MiB, which no job file needs; is it the right file?"
        )
    try:
        return raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode().split("\n")
        place = ValueOrigin.in_file(str(path), len(before), len(before[-1]) + 1)
        raise job_error(
            str(path), [Problem(place, (), "not UTF-8 text; save the file as UTF-8")]
        ) from None
