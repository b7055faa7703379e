"""Files of configurations as plain values: JSON, TOML or YAML, by the end of their names."""

from __future__ import annotations

import json
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from zrun.job.document import Document
from zrun.job.problems import job_error, shown_text
from zrun_core.errors import JobError

_MAX_BYTES = 2**20
_ENV = re.compile(r"\$\{env:([^}]*)\}")


def read_file(path: Path) -> Any:
    """Return what a file says.

    Raises:
        JobError: it is not there, or not valid.
    """
    text = _text(path)
    if path.suffix == ".py":
        raise JobError(
            f"{path} is a script, and a configuration is JSON, YAML or TOML; a script that trains "
            f"by itself is launched by zrun run {path}"
        )
    match path.suffix:
        case ".json":
            try:
                return json.loads(text, object_pairs_hook=partial(_once_each, path))
            except json.JSONDecodeError as error:
                place = f"{path}:{error.lineno}:{error.colno}"
                raise JobError(
                    f"{place}: not valid JSON: {error.msg}; look for a comma, a quote or a comment "
                    "there"
                ) from None
            except RecursionError:
                raise JobError(f"{path}: nested too deep for a configuration") from None
        case ".toml":
            try:
                return tomllib.loads(text)
            except tomllib.TOMLDecodeError as error:
                raise JobError(
                    f"{path}: not valid TOML: {error}; write key = value below a [section]"
                ) from None
            except RecursionError:
                raise JobError(f"{path}: nested too deep for a configuration") from None
    # Variables that the text names stay as they are: they are a job's own.
    names = {name: f"${{env:{name}}}" for name in _ENV.findall(text)}
    document = Document.parse(text, str(path), names)
    if document.problems:
        raise job_error(str(path), document.problems)
    return document.value


def _once_each(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of JSON, and refuse a key that it has twice: the last would count."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise JobError(f"{path}: {shown_text(key)} is there twice; keep one of them")
        found[key] = value
    return found


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise JobError(
            f"{path}: no such file; give a configuration of DeepSpeed, accelerate, torchtitan or "
            "axolotl: zrun import ds_config.json"
        ) from None
    except IsADirectoryError:
        raise JobError(f"{path} is a directory; name the configuration in it") from None
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > _MAX_BYTES:
        raise JobError(f"{path} is larger than 1 MiB, which no configuration is; name another file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise JobError(f"{path} is not UTF-8 text; save the file as UTF-8") from None
