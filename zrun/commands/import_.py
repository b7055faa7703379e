"""`zrun import FILE`: a configuration of another tool as a job file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from zrun.peers.importing import Imported


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="ds_config.json, accelerate's or axolotl's YAML, torchtitan's TOML.",
            show_default=False,
        ),
    ],
    tool: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TOOL",
            help="deepspeed, accelerate, torchtitan or axolotl; its keys say which.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            min=1,
            help="Ranks that train, where the file does not say: for the samples of a step.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the job to this file.", show_default="print it"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the job file if it exists.")
    ] = False,
) -> None:
    """Make a job of a configuration of DeepSpeed, accelerate, torchtitan or axolotl.

    What has no counterpart is listed, with why.

    Example: zrun import ds_config.json -o job.yaml
    """
    from zrun.peers.importing import import_file

    found = import_file(file, tool, ranks)
    if output is None or str(output) == "-":
        print(found.text, end="")
    else:
        _write(output, found.text, force)
    print(_told(file, found, output), file=sys.stderr)


def _write(path: Path, text: str, force: bool) -> None:
    from zrun_core.errors import JobError

    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise JobError(
            f"{path} exists; choose another name with -o, or replace it with --force"
        ) from None
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}") from None


def _told(file: Path, found: Imported, output: Path | None) -> str:
    """Return what the user reads beside the job: what was left out, and what to do next."""
    keys = (
        "1 key of the job comes"
        if found.num_keys == 1
        else f"{found.num_keys} keys of the job come"
    )
    lines = [f"{file} is a configuration of {found.tool}: {keys} from it"]
    if found.left:
        width = max(map(len, found.left))
        lines += ["left out:", *(f"  {key:{width}}  {why}" for key, why in found.left.items())]
    job = "job.yaml" if output is None or str(output) == "-" else str(output)
    lines.append(f"next: name your model and data in {job}, then zrun check {job}")
    return "\n".join(lines)
