"""`zrun init`: write a job file to start from, and the code that it names."""

from __future__ import annotations

import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

_PRESETS = files("zrun.job") / "presets"
_CODE = "train.py"  # what the jobs of presets with code call it


def init(
    kind: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="torch|hf",
            help="torch: a plain nn.Module; hf: a causal language model of transformers.",
            show_default="torch",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Print a job: torch, hf, stdlib-gpt, bert or llama.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print every key, with its default and meaning.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write the job to this file; - prints it.",
            show_default="job.yaml",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the job file if it exists.")
    ] = False,
) -> None:
    """Write job.yaml and the train.py that it names: they train as they are.

    A train.py that is there already stays as it is. With --preset or --full
    the job is printed, unless -o names a file.

    Example: zrun init && zrun train job.yaml
    """
    from zrun_core.errors import JobError

    if kind is not None and preset is not None:
        raise JobError("--for and --preset both say which job: keep one of them")
    if kind not in (None, "torch", "hf"):
        raise JobError(
            f"--for {kind}: write torch, for a plain nn.Module (that of a LightningModule too: a "
            "job names a function that returns it), or hf, for a model of transformers"
        )
    name = preset or kind or "torch"
    text = _form(name) if full else _text(name)
    if output is None:
        is_printed = full or preset is not None
    else:
        is_printed = str(output) == "-"
    if is_printed:
        print(text, end="")
        return
    path = output or Path("job.yaml")
    try:
        _write(path, text, force)
    except FileExistsError:
        raise JobError(
            f"{path} exists; choose another name with -o, or replace it with --force"
        ) from None
    notes = [f"wrote {path}", *_write_code(path, name)]
    print("\n".join([*notes, f"next: zrun check {path}, then zrun train {path}"]), file=sys.stderr)


def _text(preset: str) -> str:
    from zrun_core.errors import JobError

    names = sorted(
        entry.name.removesuffix(".yaml")
        for entry in _PRESETS.iterdir()
        if entry.name.endswith(".yaml")
    )
    if preset not in names:
        raise JobError(f"there is no preset {preset!r}; choose one of {', '.join(names)}")
    return (_PRESETS / f"{preset}.yaml").read_text(encoding="utf-8")


def _form(preset: str) -> str:
    from zrun.job.document import Document
    from zrun.job.render import as_form
    from zrun.job.validate import validate

    return as_form(validate(Document.parse(_text(preset), preset, {})))


def _write_code(job: Path, preset: str) -> list[str]:
    """Write the code of a preset next to its job, if it has any. Returns notes for the user."""
    code = _PRESETS / f"{preset}.py.txt"
    path = job.parent / _CODE
    notes = []
    if code.is_file():
        try:
            _write(path, code.read_text(encoding="utf-8"), force=False)
            notes.append(f"wrote {path}")
        except FileExistsError:
            notes.append(f"kept the existing {path}: name its functions in {job}")
    if preset == "hf" and find_spec("transformers") is None:
        notes.append("transformers is not installed: pip install transformers")
    return notes


def _write(path: Path, text: str, force: bool) -> None:
    from zrun_core.errors import JobError

    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}") from None
