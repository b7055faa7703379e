"""Run a piece of Python on several ranks, each with a simulated GPU of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from typing import Any

import simulated_gpu

TIMEOUT_S = 120

_HEAD = """
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
def say(what):
    print("said " + json.dumps(what), flush=True)
def join(**options):
    store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, **options)
"""


@dataclass
class Ended:
    """How a rank ended.

    Attributes:
        code: negative: the signal that ended it.
        said: what it gave to `say`.
        error: its stderr.
    """

    code: int
    said: list[Any]
    error: str


def run(
    script: str,
    size: int,
    *,
    more: dict[str, str] | None = None,
    joins: bool = True,
    timeout_s: float = TIMEOUT_S,
    **settings: Any,
) -> list[Ended]:
    """Run a script on every rank; return how each ended, once all have.

    It finds `rank`, `size`, `device`, `say` for what the test is to hear, and has joined the others
    by `join`.

    Args:
        script: its source text.
        more: variables of their environment.
        joins: false: the script calls `join` itself.
        timeout_s: seconds after which ranks are ended.
        settings: of the simulated GPUs.
    """
    source = _HEAD + ("join()\n" if joins else "") + textwrap.dedent(script)
    source += "\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)\n"
    environment = {**simulated_gpu.environment(devices=size, **settings), **(more or {})}
    with tempfile.TemporaryDirectory() as folder:
        variables = {"STORE": f"{folder}/store", "WORLD_SIZE": str(size)}
        outputs = [
            (_new(f"{folder}/{rank}.out"), _new(f"{folder}/{rank}.err")) for rank in range(size)
        ]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", source],
                env={**environment, **variables, "RANK": str(rank)},
                stdout=output,
                stderr=error,
            )
            for rank, (output, error) in enumerate(outputs)
        ]
        deadline = time.monotonic() + timeout_s
        try:
            for process in ranks:
                process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [
            Ended(process.returncode, _said(output), _text(error))
            for process, (output, error) in zip(ranks, outputs, strict=True)
        ]


def _new(path: str) -> Any:
    return open(path, "w+", encoding="utf-8")


def _text(file: Any) -> str:
    with file:
        file.seek(0, os.SEEK_SET)
        return str(file.read())


def _said(file: Any) -> list[Any]:
    lines = _text(file).splitlines()
    return [json.loads(line.removeprefix("said ")) for line in lines if line.startswith("said ")]
