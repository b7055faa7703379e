"""A configuration of another tool as a job: read, told by its keys, written, and loaded again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from zrun.job.document import Document
from zrun.job.foreign import tool_of
from zrun.job.problems import shown_text
from zrun.job.validate import validate
from zrun.peers import accelerate, axolotl, deepspeed, torchtitan
from zrun.peers.draft import Draft
from zrun.peers.job_text import job_text
from zrun.peers.read_file import read_file
from zrun.peers.source import Source
from zrun_core.errors import JobError
from zrun_core.spine.sections.section import NAME_PATTERN

# By the name that `--from` takes, which is also that of `tool_of` in small letters.
TOOLS: Final[Mapping[str, tuple[str, Callable[[Source], None]]]] = MappingProxyType(
    {
        "deepspeed": ("DeepSpeed", deepspeed.write),
        "accelerate": ("accelerate", accelerate.write),
        "torchtitan": ("torchtitan", torchtitan.write),
        "axolotl": ("axolotl", axolotl.write),
    }
)


@dataclass(frozen=True)
class Imported:
    """A job that was made of a configuration.

    Attributes:
        text: of the job file.
        tool: whose configuration it was.
        num_keys: that the job has from it.
        left: keys without a counterpart, each with why.
    """

    text: str
    tool: str
    num_keys: int
    left: Mapping[str, str]


def import_file(path: Path, tool: str | None = None, ranks: int | None = None) -> Imported:
    """Return the job that a configuration means.

    Args:
        tool: whose it is, as `TOOLS` has it; None: its keys say so.
        ranks: that train, over all hosts; None: the file says so, or nobody does.

    Raises:
        JobError: there is no such file, it is none of these, or what it says is no job.
    """
    if tool is not None and tool not in TOOLS:
        raise JobError(f"--from {shown_text(tool)}: write one of {', '.join(TOOLS)}")
    value = read_file(path)
    if not isinstance(value, dict):
        raise JobError(f"{path} holds no mapping of keys, as a configuration does; is it whole?")
    title, write = TOOLS[tool or _told(path, value)]
    draft = Draft(str(path), ranks)
    write(Source(path, title, value, draft))
    made = f"Made by zrun import from {path.name}, a configuration of {title}."
    text = job_text(_job_name(path), made, draft)
    _refuse_what_is_no_job(path, text, draft)
    return Imported(text, title, len(draft.keys), draft.left)


def _told(path: Path, value: Mapping[str, object]) -> str:
    found = tool_of(value)
    if found is not None:
        return found.lower()
    if {"model", "data"} <= value.keys():
        raise JobError(f"{path} is a job already: zrun check {path}")
    raise JobError(
        f"{path}: its keys are those of no configuration of DeepSpeed, accelerate, torchtitan or "
        f"axolotl; if it is one, say whose: --from {' | '.join(TOOLS)}"
    )


def _job_name(path: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")[:128]
    return name if re.fullmatch(NAME_PATTERN, name) else "imported"


def _refuse_what_is_no_job(path: Path, text: str, draft: Draft) -> None:
    """Load the job as `zrun check` does, and say mistakes in the words of the configuration."""
    try:
        validate(Document.parse(text, "job", os.environ))
    except JobError as error:
        lines = [re.sub(r"^job:\d+:\d+: ", "", line) for line in str(error).splitlines()]
        told = [_in_its_words(line, draft) for line in lines if not line.endswith("in job")]
        head = (
            f"{path}: as a job, " if len(told) == 1 else f"{path}: {len(told)} problems as a job\n"
        )
        raise JobError(head + "\n".join(told)) from None


def _in_its_words(message: str, draft: Draft) -> str:
    """Return a message about keys of the job, with what the configuration calls them."""
    whole = [key for key in draft.keys if re.search(rf"\b{re.escape(key)}\b", message)]
    section = message.partition(":")[0]
    named = whole or [key for key in draft.keys if key.partition(".")[0] == section]
    if not named:
        return message
    return f"{message}; here {', '.join(f'{key} is {draft.keys[key].origin}' for key in named)}"
