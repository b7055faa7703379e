"""`zrun init`: a job file to start from."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

_PRESETS = files("zrun.job") / "presets"


def init(
    preset: Annotated[str, typer.Option(metavar="NAME", help="minimal, stdlib-gpt, bert or llama.")] = "minimal",
    full: Annotated[bool, typer.Option("--full", help="Every key, with its default and meaning.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Print a job file to start from, or write it.

    Example: zrun init --preset stdlib-gpt -o job.yaml
    """
    text = _form(preset) if full else _text(preset)
    if output is None:
        print(text, end="")
        return
    _write(output, text, force)
    print(f"wrote {output}; next: zrun check {output}", file=sys.stderr)


def _text(preset: str) -> str:
    from zrun_core.errors import JobError

    names = sorted(entry.name.removesuffix(".yaml") for entry in _PRESETS.iterdir())
    if preset not in names:
        raise JobError(f"there is no preset {preset!r}; choose one of {', '.join(names)}")
    return (_PRESETS / f"{preset}.yaml").read_text(encoding="utf-8")


def _form(preset: str) -> str:
    from zrun.job.document import Document
    from zrun.job.render import as_form
    from zrun.job.validate import validate

    return as_form(validate(Document.parse(_text(preset), preset, {})))


def _write(path: Path, text: str, force: bool) -> None:
    from zrun_core.errors import JobError

    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise JobError(f"{path} exists; choose another name, or replace it with --force") from None
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}") from None
