"""`zrun config show` and `zrun config schema`: the resolved job, and the shape of every job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from zrun.flags import Command, Group

config = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Show a resolved job, or the schema of job files.",
)


@config.command(cls=Command)
def show(
    job: Annotated[Path, typer.Argument(help="The job file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every value of a job and where it was written. The text is a job file again.

    Example: zrun config show job.yaml zero.stage=3
    """
    from zrun.job.hidden import without_secrets
    from zrun.job.load import load_job
    from zrun.job.render import with_origins

    loaded = load_job(job, overrides or ())
    loaded = replace(loaded, config=without_secrets(loaded.config))
    if as_json:
        config = loaded.config.model_dump(mode="json", by_alias=True)
        origins = {key: str(origin) for key, origin in loaded.origins.items()}
        print(json.dumps({"config": config, "origins": origins}, indent=2))
    else:
        print(with_origins(loaded), end="")


@config.command(cls=Command)
def schema() -> None:
    """Print the JSON schema of job files, for editors.

    Example: zrun config schema > job.schema.json
    """
    from zrun.job.schema import job_schema

    print(json.dumps(job_schema(), indent=2))
