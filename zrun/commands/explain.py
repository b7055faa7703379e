"""`zrun explain [KEY]`: the meaning of a key of the job file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from zrun.job.schema import JobKey


def explain(
    key: Annotated[
        str | None, typer.Argument(help="A key, such as zero.stage; none: all of them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a key of the job file means, takes and defaults to.

    Example: zrun explain zero.bucket
    """
    from zrun.job.schema import find_key, keys

    found = list(keys()) if key is None else [find_key(tuple(key.split("."))) or _refuse(key)]
    if as_json:
        print(json.dumps([_facts(known) for known in found], indent=2))
    elif key is not None:
        _print(found[0])
    else:
        width = max(len(str(known)) for known in found)
        for known in found:
            print(f"{known!s:{width}}  {known.description}")


def _facts(key: JobKey) -> dict[str, Any]:
    from zrun.job.render import default_of

    return {
        "key": str(key),
        "description": key.description,
        "takes": key.takes,
        "unit": key.unit,
        "required": key.required,
        "default": default_of(key),
        "example": key.example,
        "values": key.values,
    }


def _print(key: JobKey) -> None:
    from zrun.job.render import default_of
    from zrun.job.scalars import write

    print(f"{key}: {key.description}")
    print(f"  takes    {key.takes}")
    if key.unit is not None:
        print(f"  unit     {key.unit}")
    default = "none, the key is required" if key.required else write(default_of(key))
    print(f"  default  {default}")
    print(f"  example  {key.name}: {write(key.example)}")
    if key.values:
        width = max(map(len, key.values))
        print("  values")
        for word, meaning in key.values.items():
            print(f"    {word:{width}}  {meaning}")
    if key.section is not None:
        print(f"  keys     {', '.join(name for name in _names_below(key))}")


def _names_below(key: JobKey) -> list[str]:
    from zrun.job.schema import keys

    assert key.section is not None
    depth = len(key.path) + 1
    return [str(below) for below in keys(key.section, key.path) if len(below.path) == depth]


def _refuse(text: str) -> NoReturn:
    from zrun.job.nearest import nearest_key
    from zrun_core.errors import JobError

    near = nearest_key(tuple(text.split(".")))
    hint = "`zrun explain` lists them all"
    if near is not None:
        hint = f"did you mean {'.'.join(map(str, near))}?"
    raise JobError(f"a job has no key {text!r}; {hint}")
