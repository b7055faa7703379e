"""A whole step of a GPT whose states are on disk, beside the same step in memory and DeepSpeed's.

One rank of one thread in bf16, fp32 masters and moments, AdamW, stage 3; for all of them the heap
and the environment that zrun gives its workers. Every way is a process of its own that stays, and
they take turns. The bound of a step is what its bytes take at the rate of the disk itself, which
reads and writes at once (the best of three times in the same round), or what the step in memory
takes, which computes and updates, whichever is more. Steps are timed while updates are under way.

DeepSpeed runs with `offload_optimizer: nvme`, once as it is of itself and once pipelined. It needs
`--peer-python` (see `requirements.txt`), and libaio with its headers; it compiles for two minutes
at its first use. Its bytes are only those that the kernel counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import torch
from launch import is_installed
from offload_disk import BLOCK, Disk
from render import render

from zrun.job.environment import WORKER_DEFAULTS
from zrun_core.memory.arena import byte_buffer

TARGET = 1.1  # most of a step over its bound
STEPS = 4  # of a turn, that are timed
_HERE = Path(__file__).resolve().parent
ALONE = {  # the place of a rank alone, for those who ask the environment
    **dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
}
_TRACED = ("io_s", "update_s")
_PIPELINED = {"pipeline_read": True, "pipeline_write": True}
WAYS: dict[str, dict[str, Any]] = {
    "in memory": {"system": "zrun", "states": {}},
    "disk": {"system": "zrun", "states": {"optimizer": "disk"}},
    "disk, serial": {"system": "zrun", "states": {"optimizer": "disk", "schedule": "serial"}},
    "all on disk": {"system": "zrun", "states": {"optimizer": "disk", "param": "disk"}},
    "DeepSpeed": {"system": "deepspeed", "states": {}},
    "DeepSpeed, pipelined": {"system": "deepspeed", "states": _PIPELINED},
}


def python_of(way: str, options: argparse.Namespace) -> str:
    """Return the interpreter that runs a way."""
    is_peer = WAYS[way]["system"] == "deepspeed"
    return str(options.peer_python) if is_peer else sys.executable


class Child:
    """A way in its process."""

    def __init__(self, way: str, options: argparse.Namespace, folder: Path) -> None:
        """Start it; it builds beside others. It ends with `close`."""
        size = "tiny" if options.quick else "50m"
        request = WAYS[way] | {"size": size, "folder": str(folder)}
        if request["system"] == "deepspeed":
            nvme = {"device": "nvme", "nvme_path": str(folder), **request["states"]}
            request["states"] = {"offload_optimizer": nvme}
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [python_of(way, options), str(_HERE / "offload_worker.py"), json.dumps(request)],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """Return its next line, or its `error`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return {"error": lines[-1][-300:] if lines else f"exit code {code}"}

    def take(self, num_steps: int) -> dict[str, Any]:
        """Have it train."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{num_steps}\n")
            self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """End it, and wait."""
        self._process.kill()
        self._process.communicate()
        self._log.close()


def _environment() -> dict[str, str]:
    """Return the environment of all ways."""
    return (
        os.environ
        | WORKER_DEFAULTS
        | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(_HERE), str(_HERE.parent)]),
            "DS_ACCELERATOR": "cpu",
        }
        | ALONE
    )


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per way, with what it did in each round and the rates of the disk."""
    rounds = 1 if options.quick else options.rounds
    num_steps = 1 if options.quick else STEPS
    turns: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    errors: dict[str, str] = {}
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))
        children: dict[str, Child] = {}
        for number, way in enumerate(WAYS):
            python = python_of(way, options)
            if WAYS[way]["system"] == "deepspeed" and not is_installed(python, "deepspeed"):
                errors[way] = f"{python} has no DeepSpeed"
                continue
            folder = top / str(number)
            folder.mkdir()
            children[way] = stack.enter_context(closing(Child(way, options, folder)))
        for way, child in list(children.items()):
            found = child.answer() or child.take(1)  # moments, code of products
            if "error" in found:
                errors[way] = found["error"]
                del children[way]
        disk = RawDisk(top, 4 if options.quick else 32)
        raw = []
        for number in range(rounds):
            raw.append(max(disk.rate() for _ in range(3)))  # others use it too
            for way in list(children)[:: 1 if number % 2 == 0 else -1]:
                turns[way].append(children[way].take(num_steps))
                print(f"round {number + 1}  {way}: {turns[way][-1]}", file=sys.stderr, flush=True)
    rows = [{"way": way, "raw": raw, "turns": turns[way]} for way in WAYS if way not in errors]
    return rows + [{"way": way, "error": error} for way, error in errors.items()]


class RawDisk:
    """The disk under a folder, which reads one state while it writes another one."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self._num_bytes = num_blocks * BLOCK
        cpu = torch.device("cpu")
        self._here, self._there = (byte_buffer(self._num_bytes, cpu) for _ in range(2))
        self._here.random_(0, 256)
        self._disk = Disk(folder, self._num_bytes)
        for state in range(2):  # the first write to reserved space is slower
            self._disk.write(self._here, state)()

    def rate(self) -> float:
        """Return bytes per second, of reads and writes together."""
        start = time.perf_counter()
        waits = [self._disk.read(self._there, 1), self._disk.write(self._here, 0)]
        for wait in waits:
            wait()
        return len(waits) * self._num_bytes / (time.perf_counter() - start)


def table(rows: list[dict[str, Any]]) -> str:
    """Return seconds, bytes and overlap of each way, and how near its steps are to their bound."""
    base = next(row for row in rows if row["way"] == "in memory")
    in_memory = [statistics.median(turn["times"]) for turn in base["turns"]]
    lines, failures = [], []
    for row in rows:
        if "error" in row:
            failures.append(f"{row['way']}: {row['error']}")
            continue
        lines.append([row["way"], *_cells(row, in_memory)])
    columns = (
        "way",
        "s/step",
        "range",
        "disk MB/step",
        "counted/plan",
        "kernel/plan",
        "bound s",
        "step/bound",
        "range",
        "I/O s",
        "update s",
        "I/O beside computing",
        f"<= {TARGET}",
    )
    raw = f"the disk, reading and writing: {_of([rate / 1e9 for rate in base['raw']], 2)} GB/s"
    return "\n".join([render(columns, lines), raw, *failures])


def _cells(row: dict[str, Any], in_memory: list[float]) -> list[str]:
    """Return the cells of a row after its name.

    `in_memory` has the seconds of a step whose states stay in memory, by round.
    """
    turns = row["turns"]
    times = [statistics.median(turn["times"]) for turn in turns]
    num_bytes = statistics.median(turn["disk_bytes"] for turn in turns)
    bounds = [
        max(num_bytes / rate, computing)
        for rate, computing in zip(row["raw"], in_memory, strict=True)
    ]
    ratios = [step / bound for step, bound in zip(times, bounds, strict=True)]
    cells = [*_of(times, 3).split(" "), f"{num_bytes / 1e6:.0f}"]
    bounded = [f"{statistics.median(bounds):.3f}", *_of(ratios, 2).split(" ")]
    if "planned_bytes" not in turns[0]:
        return [*cells, "", "", *bounded, "", "", "", ""]
    planned = turns[0]["planned_bytes"]
    steps = len(turns[0]["times"])
    return [
        *cells,
        f"{turns[0]['moved_bytes'] / planned:.4f}",
        f"{num_bytes / planned:.4f}",
        *bounded,
        *(f"{statistics.median(turn[key] for turn in turns) / steps:.3f}" for key in _TRACED),
        f"{statistics.median(turn['beside'] for turn in turns):.0%}",
        "met" if statistics.median(ratios) <= TARGET else "MISSED",
    ]


def _of(values: list[float], digits: int) -> str:
    """Return the median of some values and their range."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} {min(values):.{digits}f}-{max(values):.{digits}f}"
