"""A GPU without memory for one batch of unusual length: all ranks drop it (`guards.on_oom: skip`).

The job goes on as if the batch had never been there, to the bit, and its GPUs hold what they held.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hungry_gpu
import pytest
import torch
from gpu_faults import Outcome, launch

STEPS = 8
LR = 1e-2
# One tensor of the unusual row takes 32 MiB. A forward ends with 4 of them and needs 2 beside.
MEMORY = {"forward": 112 << 20, "backward": 200 << 20, "nowhere": 1 << 30}


def train(folder: Path, stage: int, accumulation: int, **more: Any) -> Outcome:
    folder.mkdir()
    keys: dict[str, Any] = {
        "model": "hungry_gpu.py:Net",
        "data": {"call": "hungry_gpu.py:data", "args": more.get("args", {})},
        "hooks": {"on_step": "hungry_gpu.py:told"},
        "steps": more.get("steps", STEPS),
        "batch": {"global": 2 * accumulation, "micro": 1},
        "zero": {"stage": stage, "bucket": 64},
        "optim": {"name": "adamw", "lr": LR, "weight_decay": 0.0, "betas": [0.9, 0.95]},
        "lr": "constant",
        "guards": {"on_oom": "skip"},
        "log": {"every": 1, "ranks": "all"},
    }
    found: Outcome = launch(folder, "none", gpu={"memory": more["memory"]}, **keys)
    assert (found.code, found.left) == (0, {}), found.said
    return found


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["type"] == kind]


def held(folder: Path, rank: int) -> list[int]:
    """Return the bytes that the GPU of a rank held after each step."""
    log = (folder / "run" / "logs" / f"rank-{rank}.log").read_text()
    return [int(each) for each in re.findall(r"^holds (\d+)$", log, re.MULTILINE)]


def trained_plainly(batch: int, without: int) -> list[float]:
    """Return the losses of one process on the CPU that has never seen the batch `without`."""
    model = hungry_gpu.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    rows = hungry_gpu.rows(hungry_gpu.LENGTH)
    losses = []
    for step in range(STEPS):
        if step == without:
            continue
        optimizer.zero_grad()
        loss = torch.stack([model(row) for row in rows[step * batch : (step + 1) * batch]]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("stage", "accumulation", "where"),
    [(0, 2, "backward"), (1, 1, "forward"), (2, 2, "backward"), (2, 1, "backward")],
)
def test_the_batch_is_dropped_on_all_ranks_as_if_it_had_never_been(
    tmp_path: Path, stage: int, accumulation: int, where: str
) -> None:
    batch = 2 * accumulation
    dropped = hungry_gpu.LONG // batch + 1  # the step
    train(tmp_path / "short", stage, accumulation, memory=MEMORY[where])
    (warning,) = [
        event
        for event in events(tmp_path / "short", "warning")
        if "all ranks drop this batch" in event["message"]
    ]
    assert f"step {dropped}: {where} failed" in warning["message"]
    assert "out of memory" in warning["message"]
    assert "activations" in warning["message"]
    steps = events(tmp_path / "short", "step")
    assert [event["step"] for event in steps if event["skipped"]] == [dropped]
    losses = [event["loss"] for event in steps if not event["skipped"]]

    first = (dropped - 1) * batch
    args = {"without": list(range(first, first + batch))}
    train(tmp_path / "without", stage, accumulation, memory=MEMORY["nowhere"], args=args, steps=7)
    assert losses == [event["loss"] for event in events(tmp_path / "without", "step")]
    assert losses == pytest.approx(trained_plainly(batch, dropped - 1), rel=1e-5)

    for rank in range(2):
        own, others = held(tmp_path / "short", rank), held(tmp_path / "without", rank)
        most = max(own[: dropped - 1])
        # Small buffers come and go; one tensor of the dropped batch has 32 MiB.
        assert max(own[dropped:]) == pytest.approx(most, abs=1 << 14), own
        assert max(others) == pytest.approx(most, abs=1 << 14), others


def test_with_memory_for_it_the_batch_is_trained_on(tmp_path: Path) -> None:
    """What the other test takes away is what makes the difference."""
    train(tmp_path / "all", 2, 1, memory=MEMORY["nowhere"])
    steps = events(tmp_path / "all", "step")
    assert [event["skipped"] for event in steps] == [False] * STEPS
