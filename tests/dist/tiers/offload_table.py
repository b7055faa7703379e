"""States elsewhere change no bit: every stage, placement, format and optimizer, as a table.

    make test-offload                                    prints the table: 10 minutes
    python tests/dist/tiers/offload_table.py --steps 6   a short one

Each cell trains a small model for 30 steps with clipping and three micro-batches, with its states
on the device and with them elsewhere, and compares all losses, masters, moments and parameters.
fp16 begins with a scale so high that its first steps overflow. `apart` is a host tier apart from
the CPU that trains, with copies that come late.

Then a job is killed at step 17, and goes on from its checkpoint of step 15 with its states
elsewhere: once for each placement, all of them the same as the run that nobody killed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what tests of ranks share
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # zrun without installing it

import elsewhere
import torch
import yaml
from pool import RankPool
from toys import data, train_sharded

from zrun_core.memory.buffers import ON_DEVICE, Placement, Tier

FORMATS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": {"compute": "fp16", "loss_scale": {"init": 2.0**40}},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "lamb": {"name": "lamb"},
    "sgd": {"name": "sgd", "args": {"momentum": 0.9}, "betas": None, "eps": None},
}
CLIP = 0.5
STAGES = (0, 1, 2, 3)
KILLED_AT = 17
SAVED_AT = 15


class Row(NamedTuple):
    """One row of the table."""

    num_ranks: int
    stage: int
    states: str
    tier: Tier

    @property
    def placement(self) -> Placement:
        tiers = {"optimizer": self.tier}
        if self.states != "optimizer":
            tiers["grad"] = self.tier
        if self.states == "all":
            tiers["param"] = self.tier
        return Placement(**tiers)


def rows() -> Iterator[Row]:
    """Yield all rows."""
    for num_ranks, stage in itertools.product((1, 2), STAGES):
        for states in ("optimizer", "+ gradients", "all"):
            if states == "all" and stage < 3:
                continue
            yield Row(num_ranks, stage, states, Tier.HOST)
            yield Row(num_ranks, stage, states, Tier.DISK)


def train(stage: int, placement: Placement, settings: dict[str, Any], steps: int) -> Any:
    """Return all losses, and all that a checkpoint would have."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        sharded = elsewhere.sharded_at(stage, placement, folder, settings)
        losses = train_sharded(sharded, data(steps), accumulation=3)
        return losses, elsewhere.parts_of(sharded)


def is_equal(here: list[Any], away: list[Any]) -> bool:
    for (losses, parts), (own_losses, own_parts) in zip(here, away, strict=True):
        if losses != own_losses or parts.keys() != own_parts.keys():
            return False
        if not all(torch.equal(parts[key], own_parts[key]) for key in parts):
            return False
    return True


def compare(steps: int) -> bool:
    """Print the table; return whether all cells are equal."""
    columns = list(itertools.product(FORMATS, OPTIMIZERS))
    heads = [f"{precision} {name}" for precision, name in columns]
    print(f"{'ranks':5} {'stage':5} {'elsewhere':11} {'tier':5} " + " ".join(heads))
    all_equal = True
    on_device: dict[Any, Any] = {}
    for num_ranks, of_ranks in itertools.groupby(rows(), lambda row: row.num_ranks):
        pool = RankPool(num_ranks)
        for row in of_ranks:
            cells = []
            for precision, name in columns:
                if name == "lamb" and row.tier is Tier.DISK:
                    cells.append("refused")
                    continue
                optim = {**OPTIMIZERS[name], "clip": CLIP}
                settings = {"precision": FORMATS[precision], "optim": optim}
                key = (num_ranks, row.stage, precision, name)
                if key not in on_device:
                    on_device[key] = pool.run(train, row.stage, ON_DEVICE, settings, steps)
                away = pool.run(train, row.stage, row.placement, settings, steps)
                same = is_equal(on_device[key], away)
                all_equal = all_equal and same
                cells.append("equal" if same else "DIFFERS")
            shown = " ".join(f"{c:>{len(head)}}" for c, head in zip(cells, heads, strict=True))
            tier = "apart" if row.tier is Tier.HOST else "disk"
            print(f"{row.num_ranks:5} {row.stage:5} {row.states:11} {tier:5} {shown}", flush=True)
        pool.close()
    return all_equal


JOB = {
    "name": "killed",
    "model": {
        "call": "zrun_core.models.gpt:gpt",
        "args": {
            "flavour": "gpt2",
            "vocab_size": 256,
            "dim": 64,
            "depth": 3,
            "heads": 2,
            "seq_len": 32,
        },
    },
    "data": {"call": "zrun_core.data.text:text", "args": {"paths": "stdlib", "seq_len": 32}},
    "steps": 25,
    "batch": {"global": 8, "micro": 2},
    "precision": "bf16",
    "optim": {"clip": CLIP},
    "slots": 2,
    "log": {"every": 1},
    "checkpoint": {"every": SAVED_AT},
}
PLACES: dict[str, list[str]] = {
    "device, zero 3": ["zero=3"],
    "optimizer on disk, zero 1": ["zero=1", "offload.optimizer=disk", "offload.grad=device"],
    "and gradients, zero 2": ["zero=2", "offload=disk"],
    "all, zero 3": ["zero=3", "offload=disk", "offload.param=disk"],
}


def resume_elsewhere(folder: Path) -> bool:
    """Kill a run, and go on in every placement; return whether all losses are the same."""
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    whole = losses_of(folder, "whole", PLACES["all, zero 3"])
    all_equal = True
    print(f"\n{'killed at step 17 with':30} {'gone on with':30}")
    for killed, resumed in zip(PLACES, [*list(PLACES)[1:], next(iter(PLACES))], strict=True):
        name = f"killed-{len(list(folder.iterdir()))}"
        kill_at(folder, name, PLACES[killed])
        saved = folder / name / "checkpoints"
        after = losses_of(folder, f"{name}-on", [*PLACES[resumed], f"resume={saved}"])
        same = after == {step: loss for step, loss in whole.items() if step > SAVED_AT}
        all_equal = all_equal and same
        print(f"{killed:30} {resumed:30} {'equal' if same else 'DIFFERS'}", flush=True)
    return all_equal


def command(folder: Path, name: str, changes: list[str]) -> subprocess.Popen[bytes]:
    """Start a run of the job."""
    root = str(Path(__file__).resolve().parents[3])
    line = [sys.executable, "-m", "zrun", "train", "job.yaml", "--run-dir", str(folder / name)]
    log = (folder / f"{name}.log").open("w")
    return subprocess.Popen(
        [*line, *changes],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": root},
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses_of(folder: Path, name: str, changes: list[str]) -> dict[int, float]:
    """Run to the end; return the loss of each step."""
    code = command(folder, name, changes).wait()
    if code != 0:
        raise SystemExit(f"exit code {code}: {(folder / f'{name}.log').read_text()[-2000:]}")
    return {e["step"]: e["loss"] for e in events(folder, name) if e["type"] == "step"}


def kill_at(folder: Path, name: str, changes: list[str]) -> None:
    """Kill a rank with SIGKILL as soon as step 17 is told."""
    run = command(folder, name, changes)
    while run.poll() is None:
        steps = [each["step"] for each in events(folder, name) if each["type"] == "step"]
        if steps and max(steps) >= KILLED_AT:
            for pid in descendants(run.pid):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"zrun_core.train.worker" in line:
                    os.kill(pid, signal.SIGKILL)
                    break
            break
        time.sleep(0.02)
    run.wait()


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def main() -> int:
    """Print both tables; return 0 if nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    same = compare(options.steps)
    with tempfile.TemporaryDirectory(prefix="zrun-offload-", dir="/var/tmp") as folder:
        goes_on = resume_elsewhere(Path(folder))
    return 0 if same and goes_on else 1


if __name__ == "__main__":
    sys.exit(main())
