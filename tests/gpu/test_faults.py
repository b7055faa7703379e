"""A rank that dies or stands still on NCCL: the other ends in time, and says what it waited for.

Its host waits in the script's own code, which reads the loss; the library sees that its device
does. `tests/simulated_gpu` has more faults, and those of jobs; here NCCL and torch's watchdog are
the real ones. Ranks of a script have no places along axes but one, which is their number. A rank
ends by itself only: the one that sleeps is for its launcher to end.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import leftovers
import pytest
from test_several_gpus import needs

pytestmark = [pytest.mark.gpu, needs(2)]

SCRIPT = """
    import os, signal, sys, time
    import torch
    from torch import nn
    import zrun_core

    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    run = zrun_core.init(timeout_s=10, device="cuda")
    model = zrun_core.shard(build, zero=3)
    optimizer = zrun_core.optimizer(model, "adamw", lr=1e-3)
    for step in range(6):
        if step == 3 and run.rank == 1:
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "sleep":
                time.sleep(600)
        loss = model(torch.ones(8, 64, device=run.device)).square().mean()
        loss.backward()
        optimizer.step()
        last = loss.item()
    print("loss", run.mean(last), flush=True)
"""
PATIENCE_S = 100


def shares_a_gpu() -> bool:
    """Return whether both ranks have one GPU."""
    import torch

    return torch.cuda.device_count() < 2


def start(folder: Path, fault: str, mark: str) -> list[subprocess.Popen[str]]:
    """Start two ranks, with a GPU each, or both with one.

    Args:
        mark: of what they leave behind.
    """
    (folder / "tmp").mkdir()
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    root = Path(__file__).parents[2]
    shared = shares_a_gpu()
    given = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 10000),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1" if shared else "2",
        "TMPDIR": str(folder / "tmp"),
        "ZRUN_TEST": mark,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    return [
        subprocess.Popen(
            [sys.executable, str(folder / "script.py"), fault],
            env=os.environ
            | given
            | {"RANK": str(rank), "LOCAL_RANK": "0" if shared else str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def end(rank: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a rank; return its exit code, and what it said."""
    said, _ = rank.communicate(timeout=PATIENCE_S)
    return rank.returncode, said


@pytest.mark.parametrize("fault", ["none", "kill", "sleep"])
def test_the_other_rank_ends(tmp_path: Path, fault: str) -> None:
    mark = secrets.token_hex(8)
    shared = set(os.listdir("/dev/shm"))
    ranks = start(tmp_path, fault, mark)
    try:
        code, said = end(ranks[0])
        if fault == "none":
            assert (code, *end(ranks[1])) == (0, 0, said), said
            assert left(tmp_path, mark, shared) == {}
            return
        # Of a rank on its host it sees the process. Ranks that share a GPU are hosts to each other.
        sees_it_end = fault == "kill" and not shares_a_gpu()
        assert code == (5 if sees_it_end else 6), said
        waits = (
            "zrun_core: rank 0 has waited for more than 10 s (timeout_s of init()) for all_gather "
        )
        if sees_it_end:
            waits = "zrun_core: rank 1 has ended (see its log), and this rank waits for all_gather"
        assert waits in said, said
        if not shares_a_gpu():
            assert "'model' (36.0 KiB), which rank 1 has not reached" in said
        assert "script.py:23, last = loss.item()" in said
        if fault == "kill":
            assert ranks[1].wait(PATIENCE_S) == -signal.SIGKILL
        else:
            assert len(leftovers.processes(mark)) == 1  # what sleeps
            ranks[1].kill()
            ranks[1].wait()
        assert left(tmp_path, mark, shared) == {}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def left(folder: Path, mark: str, shared: set[str]) -> dict[str, list[str]]:
    """Return what two ranks have left, but NCCL's own files: those of a rank that is killed stay.

    What they were given for the pages of the host was gone before the first step: `_shared_folder`.
    """
    found = leftovers.find(mark, folder / "tmp", shared)
    own = [name for name in found.pop("/dev/shm", []) if not name.startswith("nccl-")]
    return found | ({"/dev/shm": own} if own else {})
