"""Jobs of an asynchronous parameter server, recorded: their pushes, window by window."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import torch
from runs import job, run
from small_jobs import gpt
from toys import world

from zrun_core.parameter_server.messages import Push
from zrun_core.parameter_server.server import Made, Server, WindowRecord
from zrun_core.train.async_windows import AsyncWindows

ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}
SGD = {"name": "sgd", "lr": 0.02, "weight_decay": 0.0, "args": {"momentum": 0.9}}
CLIPPED = {**ADAMW, "clip": 0.3}


def keys_of(staleness: int | str, **keys: Any) -> dict[str, Any]:
    """Return the keys of a job with such a server."""
    return job(
        **{
            "model": gpt(),
            "data": {"call": "runs.py:Plain"},
            "steps": 40,
            "batch": {"global": 12, "micro": 2},
            "optim": ADAMW,
            "hooks": {},
            "checkpoint": None,
            "sync": "async_server",
            "staleness": staleness,
            **keys,
        }
    )


def recorded(
    keys: dict[str, Any], run_dir: str, slow: int | None, **options: Any
) -> dict[str, Any]:
    """Run a job, of which one rank takes its time; return also its pushes, window by window.

    Args:
        slow: number of the rank that takes its time; None: each of them waits for as long as its
            draws say.
    """
    rank, _ = world()
    records: list[list[Made]] = []
    end, compute = Server.end, AsyncWindows._compute
    pauses = torch.Generator().manual_seed(rank)

    def keep(self: Server) -> WindowRecord:
        record = end(self)
        records.append(record.made)
        return record

    def late(self: AsyncWindows, *args: Any) -> tuple[Push, list[torch.Tensor]]:
        result = compute(self, *args)
        if slow is None:
            time.sleep(0.02 * float(torch.rand((), generator=pauses)))
        elif rank == slow:
            time.sleep(0.03)
        return result

    with patch.object(Server, "end", keep), patch.object(AsyncWindows, "_compute", late):
        return {**run(keys, run_dir, **options), "made": records}


def of_steps(found: dict[str, Any], name: str) -> list[Any]:
    """Return a field of the events of all steps."""
    return [event[name] for event in found["events"] if event["type"] == "step"]


def warnings(found: dict[str, Any]) -> list[str]:
    """Return what a rank warns of."""
    return [event["message"] for event in found["events"] if event["type"] == "warning"]
