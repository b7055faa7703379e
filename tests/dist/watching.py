"""Hooks that tests give to a run: what they were called with lies in `seen-<rank>.jsonl` of it."""

from __future__ import annotations

import json
from typing import Any

import torch

from zrun_core.train.user_hooks import HookContext


def note(context: HookContext, hook: str, stop: list[int] | None = None) -> None:
    """Write down what `hook` was called with, record two metrics, and ask for the end.

    Args:
        stop: step and rank at which to ask for it.
    """
    fields = ("step", "loss", "lr", "grad_norm", "reason", "rank", "world_size", "is_main")
    seen: dict[str, Any] = {"hook": hook, **{name: getattr(context, name) for name in fields}}
    seen["metrics"] = dict(context.metrics)
    seen["saved"] = context.saved and context.saved.name
    assert context.saved is None or (context.saved / "manifest.json").is_file()
    seen["mean"] = context.mean(torch.tensor(context.rank + 0.25))
    context.metric("own", 10.0 + context.rank)
    context.metric("everyones", seen["mean"])
    with (context.run_dir / f"seen-{context.rank}.jsonl").open("a") as file:
        file.write(json.dumps(seen) + "\n")
    if stop == [context.step, context.rank]:
        context.stop("well\nenough")


def count_even(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Exact counts, a mean, and a number that only some batches have samples for."""
    labels = batch["labels"]
    first = (batch["index"] == 0).sum()
    return {
        "even": ((labels % 2 == 0).sum(), labels.numel()),
        "again": model(**batch),
        "first": (7.0 * first, first),
    }


def own_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"loss": (torch.tensor(2.5), 1), "calls": (1, 1)}


def by_rank(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {f"of-{torch.distributed.get_rank()}": 1.0}


CURVE = [5.0, 4.0, 4.5, 3.0, 3.5, 3.25, 3.75, 2.0]


def curve(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A number that falls and rises with the evaluations; buffers are what a run goes on with."""
    count = int(model.get_buffer("norm.num_batches_tracked"))
    return {"curve": CURVE[count % len(CURVE)]}
