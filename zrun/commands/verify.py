"""`zrun verify`: whether a job trains what a plain loop trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def verify(
    job: Annotated[Path, typer.Argument(help="The job file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the file."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=2, max=10_000, metavar="N", help="Steps of each trial.", show_default="6"),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Ranks on this host.",
            show_default="two replicas, on CPUs where GPUs are too few",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Verify the model at its full size.")
    ] = False,
    bisect: Annotated[
        bool,
        typer.Option("--bisect", help="If the results differ, find the feature that causes it."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a job, on your own model and data, with a plain loop on one rank.

    It runs some steps on this host: as fp32, on from a save in another layout, and in the job's
    own format. Compared are samples, losses, gradients, norms, updates and buffers.

    Exit codes: 0 it trains what a plain loop trains; 2 the job is wrong, or cannot be verified;
    11 it trains something else; those of zrun train where it does not train.

    Example: zrun verify job.yaml zero.stage=3 --bisect
    """
    from zrun.verification.verify import STEPS, VerifyRequest
    from zrun.verification.verify import verify as run

    request = VerifyRequest(job, overrides or (), steps or STEPS, slots, whole, bisect, as_json)
    raise typer.Exit(run(request))
