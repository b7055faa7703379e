"""`zrun verify` as a user calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ZRUN = [sys.executable, "-m", "zrun"]
JOB = """
name: small
model: net.py:Net
data: net.py:data
steps: 100
batch: {global: 16, micro: 2}
device: cpu
zero: 2
optim: {lr: 1e-2, clip: 1.0}
"""
NET = """
import os

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, doubled: bool = False, waits: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        self.doubled = doubled
        self.waits = waits

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.waits and "RANK" not in os.environ:  # in the plain loop
            import time

            print("waits", flush=True)
            time.sleep(600)
        loss = nn.functional.mse_loss(self.layers(x), y)
        return loss * 2 if self.doubled and os.environ.get("RANK") == "1" else loss


class Block(nn.Module):
    def __init__(self, rolls: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.rolls = rolls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        return x + self.down(h.roll(1, -1) if self.rolls else h)


class Divided(nn.Module):
    def __init__(self, rolls: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(rolls) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), y)


def data() -> torch.utils.data.Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    return torch.utils.data.TensorDataset(x, x[:, :1])


def one() -> torch.utils.data.Dataset:
    return torch.utils.data.Subset(data(), [0])


class One(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([data()[0]])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def zrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ZRUN, *words], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )


def left_in(folder: Path) -> list[Path]:
    return list(folder.glob("zrun-verify-*"))


def test_a_job_is_verified_and_then_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    ran = zrun(folder, "train", "job.yaml", "steps=3", "--verify")
    assert ran.returncode == 0, ran.stderr
    assert "your configuration trains what a plain loop trains: 5 steps, 4 parameters" in ran.stdout
    assert "as fp32, rank 0 sent 32.0 KiB and held 37.3 KiB, to the byte as planned" in ran.stdout
    assert "verify small: 2 ranks on CPUs: tp 1, dp 2, pp 1, 3 steps of 8 samples" in ran.stderr
    assert [run.name for run in (folder / "runs").iterdir()] == ["small"]
    assert not left_in(folder)


VALUES = [
    *("check", "job.yaml", "--values", "--slots=2", "model.call=net.py:Divided", "parallel.tp=2"),
    'parallel.plan={"*.up": colwise, "*.down": rowwise}',
]


@pytest.mark.parametrize("rolls", [False, True])
@pytest.mark.at_most(1)
def test_values_are_compared_without_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rolls: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    ran = zrun(folder, *VALUES, f"model.args.rolls={str(rolls).lower()}")
    assert not (folder / "runs").exists()
    if rolls:
        assert ran.returncode == 2, ran.stderr
        differs = "parallel.tp 2: blocks.0 computes something else than in the whole model"
        assert differs in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    told = "values: the 2 ranks (tp 2, pp 1) match the whole model on the first micro-batch, "
    assert ran.stdout.endswith(f"{told}gradients included\n")
    assert not left_in(folder)


@pytest.mark.thorough
def test_what_differs_is_traced_to_a_feature(folder: Path) -> None:
    ran = zrun(
        folder, "verify", "job.yaml", "--steps=2", "--bisect", "--json", "model.args.doubled=true",
        "precision=bf16",
    )  # fmt: skip
    assert ran.returncode == 11, ran.stderr
    found = json.loads(ran.stdout)
    assert found["bisected"] == "the cause is 2 data-parallel ranks: without it, results agree"
    (first,) = found["passes"].values()
    assert first["difference"]["what"] == "loss"
    assert first["difference"]["step"] == 1


def test_what_cannot_be_verified_is_told_in_one_line(folder: Path) -> None:
    schedule = ["parallel.pp=2", "parallel.schedule=pipedream", "optim.clip=null", "zero=0"]
    ran = zrun(folder, "verify", "job.yaml", *schedule)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "a plain loop trains something else" in ran.stderr


def test_a_model_without_room_is_told_before_a_trial(folder: Path) -> None:
    ran = zrun(folder, "verify", "job.yaml", "limits.memory=4KiB")
    assert ran.returncode == 2
    assert (
        "the plain loop does not fit: it holds the whole model on one rank, once for " in ran.stderr
    )
    assert (
        "more than the 4.0 KiB of limits.memory: give net.py:Net arguments that make " in ran.stderr
    )
    assert "the model stays as large as it is: no argument of net.py:Net has the us" in ran.stderr
    assert "rank" not in ran.stderr.splitlines()[-1].partition("the plain loop")[0]
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("data", ["one", "One"])
@pytest.mark.thorough
def test_data_of_one_sample_are_verified(folder: Path, data: str) -> None:
    ran = zrun(folder, "verify", "job.yaml", "--steps=2", f"data.call=net.py:{data}")
    assert ran.returncode == 0, ran.stderr
    assert "your configuration trains what a plain loop trains: 3 steps" in ran.stdout


@pytest.mark.thorough
def test_ctrl_c_in_the_plain_loop_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    words = [*ZRUN, "verify", "job.yaml", "--steps=2", "model.args.waits=true"]
    process = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 120
    while not (found := _plain_loops(process.pid)) and time.monotonic() < limit:
        time.sleep(0.2)
    assert found
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "SIGINT: stopped while a run was compared" in told
    assert not any(Path(f"/proc/{pid}").exists() for pid in found)
    assert not left_in(folder)


def _plain_loops(parent: int) -> list[int]:
    """The comparisons that a process has started."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"zrun_core.verification" in words and int(status[1]) == parent:
            found.append(int(pid))
    return found
