"""Checkpoints as tables for a terminal and as JSON. Pure: nothing is read here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from zrun.watch.formatting import count
from zrun_core.sizes import format_size
from zrun_core.spine.printable import printable

if TYPE_CHECKING:
    from zrun_core.checkpoint.folder import SavedStep
    from zrun_core.checkpoint.manifest import Manifest

_FOR_RESUMING = ("skips_in_a_row", "helpless_skips", "marks", "owes_evaluation")


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _problem(found: SavedStep, text: str) -> Text:
    short = text.replace(f"{found.path}/", "").replace(f"{found.path}: ", "")
    return Text(printable(short), style="red")


def steps_table(
    steps: Sequence[SavedStep], saved: Sequence[str], latest: int | None, best: int | None = None
) -> Table:
    """Return a row per step.

    Args:
        steps: newest first.
        saved: when each was saved, in words.
        latest, best: the steps that are marked so; None: there is none.
    """
    columns = ("step", "saved", "size", "ranks", "run", "state")
    table = _table(*columns, right=("step", "size", "ranks"))
    for found, time in zip(steps, saved, strict=True):
        if found.manifest is None:
            table.add_row(str(found.step), time, "", "", "", _problem(found, found.problem or ""))
        else:
            words = {"latest": latest, "best": best}
            marks = [word for word, step in words.items() if step == found.step]
            state = Text(", ".join(["complete", *marks]), style="green")
            size = format_size(found.manifest.num_bytes)
            ranks = str(found.manifest.world_size)
            table.add_row(str(found.step), time, size, ranks, found.manifest.run_id, state)
    return table


def step_facts(found: SavedStep) -> dict[str, Any]:
    """Return a step for JSON, without what it holds."""
    manifest = found.manifest
    facts: dict[str, Any] = {"step": found.step, "path": str(found.path), "problem": found.problem}
    if manifest is not None:
        facts |= {
            "bytes": manifest.num_bytes,
            "world_size": manifest.world_size,
            "run_id": manifest.run_id,
        }
    return facts


def summary(found: SavedStep, manifest: Manifest) -> Table:
    """Return what a checkpoint is of, in two columns."""
    layout, *others = manifest.layouts
    kinds = Counter(tensor.kind for tensor in manifest.tensors)
    elements = sum(tensor.numel for tensor in manifest.tensors)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    numbers = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    rows = {
        "checkpoint": str(found.path),
        "step": str(manifest.step),
        "run": manifest.run_id,
        "job": str(manifest.job.get("name", "")),
        "model": manifest.model.class_name if manifest.model is not None else "",
        "written by": versions,
        "ranks": str(manifest.world_size),
    }
    for name, cut in manifest.models.items():
        rows[f"layout of {name}" if name else "layout"] = _pairs(layout if not name else cut)
    if others:
        rows["other parts"] = "; ".join(_pairs(_differing(each, layout)) for each in others)
    rows |= {
        "progress": _pairs(_told(manifest.progress)),
        "tensors": f"{len(manifest.tensors)} with {count(elements)} elements: {numbers}",
        "files": f"{len(manifest.files)} with {format_size(manifest.num_bytes)}",
    }
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    return table


def _differing(layout: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in layout.items() if value != first.get(key)}


def _told(progress: dict[str, Any]) -> dict[str, Any]:
    """Return of the progress what says something to a person; --json has all of it."""
    return {
        key: value
        for key, value in progress.items()
        if key not in _FOR_RESUMING and value is not None
    }


def _pairs(facts: dict[str, Any]) -> str:
    """Return nested facts on one line: `samples 6400, cursor.epoch 1`."""
    flat: list[str] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), item)
        else:
            flat.append(f"{prefix} {value}")

    walk("", facts)
    return ", ".join(flat)


def states_table(manifest: Manifest) -> Table:
    """Return a row per kind of state, with the bytes that it takes."""
    from zrun_core.checkpoint.manifest_fields import ITEM_BYTES, RANK

    num_bytes: Counter[tuple[str, str]] = Counter()
    tensors: Counter[tuple[str, str]] = Counter()
    for info in manifest.tensors:
        for key in info.states.items():
            num_bytes[key] += info.numel * ITEM_BYTES[key[1]]
            tensors[key] += 1
    table = _table("state", "format", "tensors", "size", right=("tensors", "size"))
    for key, total in num_bytes.most_common():
        table.add_row(Text(printable(key[0])), key[1], str(tensors[key]), format_size(total))
    own_bytes = sum(file.own_bytes for file in manifest.files)
    table.add_row(RANK, "", "", format_size(own_bytes))  # of every rank: random numbers, buffers
    return table


def tensors_table(manifest: Manifest) -> Table:
    """Return a row per tensor of the model, with the states that are kept of it."""
    table = _table("tensor", "shape", "format", "kind", "states")
    for tensor in manifest.tensors:
        names = "\n".join((tensor.name, *(f"= {alias}" for alias in tensor.aliases)))
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        kept = Text(printable(" ".join(tensor.states)))
        table.add_row(Text(printable(names)), shape, tensor.dtype, tensor.kind, kept)
    return table


def inspect_facts(found: SavedStep, manifest: Manifest) -> dict[str, Any]:
    """Return everything in a manifest but how units lie in files, for JSON."""
    facts = asdict(replace(manifest, divisions=[], source=None))
    del facts["divisions"], facts["source"]
    return {"path": str(found.path), **facts}


def verify_table(
    steps: Sequence[SavedStep], problems: Sequence[Sequence[str]], seconds: Sequence[float]
) -> Table:
    """Return a row per step that was read whole.

    Args:
        problems: of each step; none: it is as it was saved.
        seconds: that reading each step took.
    """
    table = _table("step", "size", "read at", "result", right=("step", "size", "read at"))
    for found, wrong, time in zip(steps, problems, seconds, strict=True):
        num_bytes = found.manifest.num_bytes if found.manifest is not None else 0
        rate = f"{format_size(num_bytes / time)}/s" if num_bytes and time > 0 else ""
        result = Text("every byte as saved", style="green")
        if wrong:
            result = _problem(found, "\n".join(wrong))
        size = format_size(num_bytes) if num_bytes else ""
        table.add_row(str(found.step), size, rate, result)
    return table
