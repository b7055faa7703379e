"""`zrun ckpt ls|inspect|verify|export|prune`: list, show, check, hand on and remove checkpoints."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zrun.flags import Command, Group
from zrun_core.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zrun_core.checkpoint.folder import SavedStep
    from zrun_core.checkpoint.manifest import Manifest

ckpt = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    help="List, inspect, verify, export and prune checkpoints.",
)


class _Dtype(StrEnum):
    KEEP = "keep"
    FP32 = "fp32"
    BF16 = "bf16"


_Where = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run directory, a run id or prefix, or a job name; a folder of checkpoints; "
        "or one step.",
        show_default=False,
    ),
]
_Step = Annotated[
    str | None,
    typer.Option(metavar="N", help="Step number, or best; default: the newest valid step."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@ckpt.command(cls=Command)
def ls(where: _Where, as_json: _Json = False) -> None:
    """List the steps, newest first, and what is wrong with those that do not count.

    No tensor is read.

    Of a run that was started over with --fresh, those of its earlier attempts follow.

    Exit code 9 if none of them counts. Example: zrun ckpt ls gpt
    """
    from zrun.checkpoints.locate import locate

    place = locate(where)
    aside = [] if place.is_single else place.folder.aside()
    latest, problem = place.folder.latest()
    best, best_problem = place.folder.best()
    if as_json:
        from zrun.checkpoints.step_tables import step_facts

        report = {
            "latest": latest,
            "best": best,
            "steps": [step_facts(found) for found in place.steps],
            "aside": [str(each) for each in aside],
            "attempts": {
                number: [step_facts(found) for found in each.steps]
                for number, each in place.attempts.items()
            },
        }
        _print_json(report)
    else:
        print(place.folder.path)
        _print_steps(place.steps, latest, best)
        for each in aside:
            print(f"set aside: {each.name}")
        for number, earlier in place.attempts.items():
            print(f"attempt {number}: {earlier.folder.path}")
            _print_steps(earlier.steps, earlier.folder.latest()[0], None)
    if problem is not None:
        print(
            f"warning: {problem}; this link is for convenience only, zrun does not rely on it",
            file=sys.stderr,
        )
    if best_problem is not None:
        print(f"warning: {best_problem}; the next best step replaces it", file=sys.stderr)
    place.newest_valid()


@ckpt.command(cls=Command)
def inspect(
    where: _Where,
    step: _Step = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.")] = False,
    as_json: _Json = False,
) -> None:
    """Show what a checkpoint holds: progress, layout, versions, tensors and their states.

    No tensor is read.

    Example: zrun ckpt inspect gpt --tensors
    """
    from zrun.checkpoints import step_tables
    from zrun.checkpoints.locate import locate

    found = locate(where).step(step)
    manifest = found.manifest
    assert manifest is not None
    if as_json:
        _print_json(step_tables.inspect_facts(found, manifest))
        return
    _print(step_tables.summary(found, manifest))
    _print(step_tables.states_table(manifest))
    if tensors:
        _print(step_tables.tensors_table(manifest))


@ckpt.command(cls=Command)
def verify(
    where: _Where,
    step: Annotated[
        int | None, typer.Option(min=0, help="Only this step; default: all steps.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=64, help="Number of parallel readers.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Read every byte and compare it with the digests. Exit code 9 if anything is damaged.

    Example: zrun ckpt verify gpt
    """
    from zrun.checkpoints.locate import locate
    from zrun.checkpoints.upkeep import verify_steps

    place = locate(where)
    steps = place.steps if step is None else [found for found in place.steps if found.step == step]
    if not steps:
        place.step(step)
    problems, seconds = verify_steps(steps, threads)
    if as_json:
        _print_json({str(found.step): wrong for found, wrong in zip(steps, problems, strict=True)})
    else:
        from zrun.checkpoints.step_tables import verify_table

        print(place.folder.path)
        _print(verify_table(steps, problems, seconds))
    if any(problems):
        raise typer.Exit(ExitCode.CHECKPOINT)


@ckpt.command(cls=Command)
def export(
    where: _Where,
    out: Annotated[
        Path,
        typer.Argument(
            help="NAME.safetensors, NAME.pt, or a folder for from_pretrained of transformers.",
            show_default=False,
        ),
    ],
    step: _Step = None,
    dtype: Annotated[
        _Dtype, typer.Option(help="Data type; keep: that of the master weights.")
    ] = _Dtype.KEEP,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest size of one file, when writing a folder.")
    ] = "5GB",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Which model, if a script saved several; default: all, as NAME.TENSOR.",
        ),
    ] = None,
) -> None:
    """Write the weights and buffers of a checkpoint as safetensors or as a plain state_dict.

    Every byte is verified.

    A folder has the config and the tokenizer too, where the model is one of transformers.

    Example: zrun ckpt export gpt model --dtype bf16
    """
    from zrun.checkpoints.locate import locate
    from zrun_core.errors import JobError
    from zrun_core.sizes import format_size, parse_size

    try:
        max_shard_bytes = parse_size(max_shard_size)
    except ValueError as error:
        raise JobError(f"--max-shard-size: {error}") from None
    found = locate(where).step(step)
    manifest = found.manifest
    assert manifest is not None
    from zrun_core.checkpoint.export import export as write

    if model is not None:
        from zrun_core.checkpoint.several_models import part_of

        if not model or model not in manifest.models:
            names = ", ".join(sorted(filter(None, manifest.models))) or "one, without a name"
            raise JobError(f"--model {model}: step {found.step} has {names}")
        manifest = part_of(manifest, model)
    files = write(found.path, manifest, out, dtype.value, max_shard_bytes)
    size = format_size(sum(file.stat().st_size for file in files))
    number = "1 file" if len(files) == 1 else f"{len(files)} files"
    print(f"wrote step {found.step} to {out}: {size} in {number}")
    if out.is_dir():
        print(_use_of(manifest, out))


def _use_of(manifest: Manifest, out: Path) -> str:
    """Return a sentence about how an exported folder is loaded."""
    from zrun_core.checkpoint.model_files import CONFIG, GENERATION_CONFIG

    model = manifest.model
    if model is None or model.obstacle is not None:
        why = "the checkpoint does not record the class of its model"
        if "" not in manifest.models:
            names = ", ".join(sorted(manifest.models))
            why = f"it is of {names}; --model NAME writes one alone, by its own names"
        if model is not None:
            why = f"its model is a {model.class_name}, {model.obstacle}"
        return f"wrote weights only, by their state_dict names, without a config: {why}"
    loads = f'{model.class_name.rpartition(".")[2]}.from_pretrained("{out}") loads it'
    if {file.name for file in manifest.files_beside} - {CONFIG, GENERATION_CONFIG}:
        return f"{loads}, and AutoTokenizer its tokenizer"
    return f"{loads}; for its tokenizer, give the model or the dataset an attribute tokenizer"


@ckpt.command(cls=Command)
def prune(
    where: _Where,
    keep: Annotated[
        int, typer.Option(help="Number of valid steps to keep, at least 2.", show_default=False)
    ],
    aside: Annotated[
        bool, typer.Option("--aside", help="Also remove steps that were set aside.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be removed.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Remove old steps, and what dead saves have left.

    The newest steps that verify stay: every byte of them is read.

    Where a process saves, what it writes stays, and so does what was set aside.

    Example: zrun ckpt prune gpt --keep 3
    """
    from zrun.checkpoints.locate import locate
    from zrun.checkpoints.upkeep import prune_steps
    from zrun_core.checkpoint.folder import LEAST_KEPT
    from zrun_core.errors import JobError

    if keep < LEAST_KEPT:
        raise JobError(
            f"--keep {keep}: at least {LEAST_KEPT} steps stay, in case the newest is damaged"
        )
    place = locate(where)
    if place.is_single:
        raise JobError(f"{where} is one step: give the folder above it")
    pruned = prune_steps(place.folder, keep, aside=aside, dry_run=dry_run)
    if pruned.in_use_by is not None:
        stays = "the step it is writing is kept"
        if aside:
            stays = "the step it is writing and those set aside are kept"
        print(f"{place.folder.path} is in use by {pruned.in_use_by}: {stays}", file=sys.stderr)
    if as_json:
        report = {
            "would_remove" if dry_run else "removed": pruned.steps,
            "aside": [str(each) for each in pruned.aside],
            "in_use_by": pruned.in_use_by,
        }
        _print_json(report)
        return
    names = [f"step {step}" for step in pruned.steps] + [each.name for each in pruned.aside]
    verb = "would remove" if dry_run else "removed"
    print(f"{verb} {', '.join(names)}" if names else "nothing to remove")


def _print_steps(steps: Sequence[SavedStep], latest: int | None, best: int | None) -> None:
    from zrun.checkpoints.step_tables import steps_table

    _print(steps_table(steps, [_saved(found) for found in steps], latest, best))


def _saved(found: SavedStep) -> str:
    """Return when the step was written, in local time."""
    import time

    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.path.lstat().st_mtime))
    except OSError:
        return ""


def _print(renderable: Any) -> None:
    from zrun.watch.console import print_table

    print_table(sys.stdout, renderable)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
