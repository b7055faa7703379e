"""Memory of a save with states on the disk, and with states in memory.

A process of its own trains linears with AdamW in bf16, all states in one place, and saves once:
while the loop waits, or while it makes the next step. The peak of its resident memory is taken over
a step without a save, and over one with it. Both place and way come from the command line.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # zrun without installing it

import torch
from render import render
from torch import nn

from zrun_core.checkpoint.checkpointer import Checkpointer
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.model_state import ModelState
from zrun_core.checkpoint.rank_save import RunInfo
from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.distributed.named_vector import NamedVector
from zrun_core.distributed.rng import Streams
from zrun_core.memory.buffers import Placement, Tier
from zrun_core.memory.state_policy import ZeroPolicy
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.sections.checkpoint import CheckpointConfig
from zrun_core.spine.sections.optim import OptimConfig
from zrun_core.spine.sections.precision import PrecisionConfig
from zrun_core.zero.sharded_model import ShardedModel
from zrun_core.zero.unit.precision import Precision
from zrun_core.zero.wrap.sharding_config import ShardingConfig

WIDTH, DEPTH = 2048, 16
QUICK_WIDTH, QUICK_DEPTH = 256, 2


def make(place: str, width: int, depth: int, folder: str) -> ShardedModel:
    """Return a model whose states are all on `place`, a tier."""
    tier = Tier(place)
    settings = ShardingConfig(
        zero=ZeroPolicy(3),
        precision=Precision.of(PrecisionConfig.model_validate("bf16")),
        optimizer=resolve_optimizer(OptimConfig.model_validate({"lr": 1e-4}), lambda name: None),
        bucket=2 * width * width,
        placement=Placement(param=tier, grad=tier, optimizer=tier),
        disk_folder=folder,
    )
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    comm = Comm(torch.device("cpu"))
    mesh = Mesh.build(0, ["host"], 1)
    return ShardedModel(module, lambda name, param: param.detach(), settings, mesh, comm)


def step(sharded: ShardedModel, width: int) -> None:
    """Train one step, and wait for its update."""
    sharded.begin_step()
    with sharded.forward() as micro:
        loss = sharded.module(torch.ones(1, width)).float().square().mean()
    sharded.backward(loss, micro, boundary=True)
    sums = NamedVector.of(sharded.comm.device, loss=1.0)
    sharded.step(None, sums, lambda sums: torch.ones((), dtype=torch.float64))
    sharded.settle_updates()


def peak_of(clear: bool = False) -> float:
    """Return the peak of this process's resident memory in MiB; begin to take it anew if asked."""
    if clear:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def save_once(place: str, way: str, width: int, depth: int, folder: str) -> dict[str, Any]:
    """Train and save in this process. Returns a row."""
    sharded = make(place, width, depth, folder)
    for _ in range(2):
        step(sharded, width)
    peak_of(clear=True)
    step(sharded, width)
    without = peak_of()
    saves = Checkpointer(
        CheckpointFolder(Path(folder) / "saved"),
        ModelState(sharded),
        Streams(0, sharded.comm.device, dp=0),
        CheckpointConfig(),
        sharded.comm,
        sharded.mesh.world,
        RunInfo("bench", {}, {}),
        lambda **fields: None,
    )
    peak_of(clear=True)
    start = time.perf_counter()
    saves.save(3, dict, "due", wait=way == "waits")
    call = time.perf_counter() - start
    step(sharded, width)
    saves.finish()
    seconds = time.perf_counter() - start
    peak = peak_of()
    saves.close()
    files = Path(folder).glob("saved/*/*.safetensors")
    return {
        "states": place,
        "loop": way,
        "file_mib": sum(file.stat().st_size for file in files) / 2**20,
        "without_mib": without,
        "more_mib": peak - without,
        "call_s": call,
        "seconds": seconds,
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each place and way."""
    size = (QUICK_WIDTH, QUICK_DEPTH) if options.quick else (WIDTH, DEPTH)
    rows = []
    for place in ("disk", "device"):
        for way in ("waits", "goes on"):
            with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                words = [place, way, *map(str, size), folder]
                command = [sys.executable, __file__, *words]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    heads = ["states", "loop", "file MiB", "step MiB", "save: more MiB", "call s", "with a step s"]
    return render(
        heads,
        [
            [
                row["states"],
                row["loop"],
                f"{row['file_mib']:.0f}",
                f"{row['without_mib']:.0f}",
                f"{row['more_mib']:.0f}",
                f"{row['call_s']:.2f}",
                f"{row['seconds']:.2f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    place, way, width, depth, folder = sys.argv[1:]
    print(json.dumps(save_once(place, way, int(width), int(depth), folder)))
