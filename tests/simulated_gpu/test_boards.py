"""The command line on machines of simulated GPUs: seats, links, variables, slices, errors, checks.

NVML tells of the boards of a scenario, and each is a device that ranks really train on.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import simulated_gpu
from simulated_gpu.machine import Machine

TRAIN = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    return list(zip(x, x.sum(dim=1, keepdim=True)))

def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)

def started(context):
    own = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    print("runs on", own, "of", torch.cuda.device_count(), flush=True)
"""
JOB = """
name: boards
model: train.py:model
data: train.py:data
loss: train.py:loss
hooks: {on_start: train.py:started}
steps: 3
batch: 8
zero: 3
log: {every: 1, ranks: all}
"""
TENSOR = """
name: boards
model:
  call: "zrun_core.models.gpt:gpt"
  args: {vocab_size: 32, dim: 16, depth: 1, heads: 4, seq_len: 8}
data: train.py:tokens
hooks: {on_start: train.py:started}
steps: 1
batch: 8
log: {every: 1, ranks: all}
"""
TOKENS = """
def tokens():
    ids = torch.randint(32, (32, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]
"""


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-0000-0000-000000000000"


class Box:
    """A machine, and a folder with a job on it."""

    def __init__(self, folder: Path, name: str, *lines: str) -> None:
        self.folder = folder
        self.machine = Machine(folder, name)
        self.machine.say(*lines)
        (folder / "train.py").write_text(TRAIN + TOKENS)
        (folder / "job.yaml").write_text(JOB)
        (folder / "tensor.yaml").write_text(TENSOR)

    def zrun(self, *argv: str, more: dict[str, str] | None = None) -> Any:
        environ = self.machine.gpu_environment(delay_us=50) | {"ZRUN_ESTIMATE": "off"}
        return subprocess.run(
            [sys.executable, "-m", "zrun", *argv],
            cwd=self.folder,
            env=environ | (more or {}),
            capture_output=True,
            text=True,
            timeout=300,
        )

    def train(self, *argv: str, job: str = "job.yaml", more: dict[str, str] | None = None) -> Any:
        return self.zrun("train", job, "--ui", "plain", "--run-dir", "run", *argv, more=more)

    def on_terminal(self, *argv: str) -> str:
        """Run it on a terminal of 120 columns, and return what was drawn, without its control."""
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
        environ = self.machine.gpu_environment(delay_us=50)
        running = subprocess.Popen(
            [sys.executable, "-m", "zrun", *argv],
            cwd=self.folder,
            env=environ | {"ZRUN_ESTIMATE": "off", "TERM": "xterm-256color"},
            stdin=its,
            stdout=its,
            stderr=its,
        )
        os.close(its)
        drawn = b""
        while part := _read(ours):
            drawn += part
        os.close(ours)
        assert running.wait(timeout=60) == 0, drawn.decode()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode())

    def used(self) -> list[tuple[int, int]]:
        """The board that each rank found to be its device, and how many it saw."""
        boards = []
        for log in sorted((self.folder / "run/logs").glob("rank-*.log")):
            (found,) = re.findall(r"runs on (\w{8})-\S+ of (\d+)", log.read_text())
            boards.append((int(found[0], 16), int(found[1])))
        return boards

    def planned(self) -> list[int]:
        """The board that the plan gives each rank."""
        plan = json.loads((self.folder / "run/plan.json").read_text())
        return [int(place["uuid"][4:12], 16) for place in plan["ranks"]]


def _read(terminal: int) -> bytes:
    """Return what a program has drawn; nothing once it has ended."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # nobody has the other end any more
        return b""


def test_ranks_train_on_the_boards_that_the_plan_gives_them(tmp_path: Path) -> None:
    """Tensor-parallel pairs of a DGX-1 sit on double NVLinks, whatever their numbers."""
    box = Box(tmp_path, "dgx1v")
    done = box.train(
        "parallel.tp=2", "slots=4", "hooks={on_start: train.py:started}", job="tensor.yaml"
    )
    assert done.returncode == 0, done.stderr
    assert box.planned() == [0, 3, 1, 2]
    assert box.used() == [(0, 4), (3, 4), (1, 4), (2, 4)]


def test_groups_on_pcie_stay_below_a_socket(tmp_path: Path) -> None:
    box = Box(tmp_path, "pcie-8-2sockets")
    more = {"CUDA_VISIBLE_DEVICES": "0,4,1,5"}  # two of each socket
    done = box.train("parallel.tp=2", job="tensor.yaml", more=more)
    assert done.returncode == 0, done.stderr
    assert [set(box.planned()[:2]), set(box.planned()[2:])] == [{0, 1}, {4, 5}]
    assert [board for board, _ in box.used()] == box.planned()


def test_sensors_and_memory_of_boards_are_recorded(tmp_path: Path) -> None:
    box = Box(tmp_path, "h100-8", "sensors 0-7 61 402 700 93 1755 1980")
    done = box.train("slots=2")
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    sensed = next(event["gpus"] for event in events if event["type"] == "gpus")
    assert [(each["rank"], each["power_w"]) for each in sensed] == [(0, 402.0), (1, 402.0)]
    memory = [event for event in events if event["type"] == "memory"]
    assert all(event["device_allocated"] > 0 for event in memory)


@pytest.mark.parametrize(
    ("name", "sensors", "shown"),
    [
        ("h100-8", "sensors 0-7 61 402 700 93 1755 1980", ("93%", "402 W", "61 C")),
        ("pcie-8-2sockets", "sensors 0-7 88 71 72 40 900 1410", ("40%", "71 W", "88 C")),
    ],
)
def test_the_panel_shows_the_boards_of_a_dgx_and_of_a_pcie_box(
    tmp_path: Path, name: str, sensors: str, shown: tuple[str, ...]
) -> None:
    box = Box(tmp_path, name, sensors)
    panel = box.on_terminal("train", "job.yaml", "--run-dir", "run", "slots=4", "steps=20")
    last = panel[panel.rindex("step     20/20") :]
    for rank in range(4):
        row = re.search(rf"rank {rank} +\d+ms +(\S+) +(\d+ W) +(\d+ C)", last)
        assert row is not None, last
        assert row.groups() == shown


@pytest.mark.parametrize("wanted", ["6,2", f"{uuid(6)},{uuid(2)}", "GPU-00000006,GPU-00000002"])
def test_the_shell_names_boards_by_number_and_by_uuid(tmp_path: Path, wanted: str) -> None:
    box = Box(tmp_path, "h100-8")
    done = box.train(more={"CUDA_VISIBLE_DEVICES": wanted})
    assert done.returncode == 0, done.stderr
    assert box.used() == [(6, 2), (2, 2)]


@pytest.mark.parametrize(
    ("name", "argv", "more", "words"),
    [
        ("h100-8", (), {"CUDA_VISIBLE_DEVICES": "0,8"}, "CUDA_VISIBLE_DEVICES: '8' is no GPU of"),
        ("h100-8", (), {"CUDA_VISIBLE_DEVICES": "GPU-9"}, "'GPU-9' is no GPU of this host, which"),
        ("h100-8", (), {"CUDA_VISIBLE_DEVICES": "1,1"}, "names 1 twice, and then CUDA shows no"),
        ("a100-mig-7", (), {"CUDA_VISIBLE_DEVICES": "MIG-1"}, "'MIG-1' is no GPU of this host"),
        (
            "h100-8",
            ("device=cuda",),
            {"CUDA_VISIBLE_DEVICES": "-1"},
            "device: cuda, but vm has no usable GPU (CUDA_VISIBLE_DEVICES=-1 hides its 8 GPUs): "
            "unset it, or write device: cpu",
        ),
        (
            "lost-gpu",
            ("device=cuda",),
            {"CUDA_VISIBLE_DEVICES": ""},
            "no usable GPU (CUDA_VISIBLE_DEVICES='' hides its 7 GPUs; GPU ",
        ),
        ("h100-8", ("slots=9",), {}, "slots: 9, but vm has 8 GPUs: write slots: 8 or device: cpu"),
        ("lost-gpu", ("slots=8",), {}, "slots: 8, but vm has 7 GPUs: write slots: 7 or device"),
        (
            "h100-8",
            ("env.CUDA_VISIBLE_DEVICES='0'", "slots=2"),
            {},
            "but vm has 1 GPU: write slots",
        ),
        ("mixed-4", (), {}, "NVIDIA A100-PCIE-40GB (40 GiB) on vm (GPU 0, 1) and NVIDIA GeForce"),
        ("zero-gpu", ("device=cuda",), {}, "no usable GPU (NVIDIA driver 550.54.15 sees none: co"),
        (
            "a100-mig-7",
            ("slots=2",),
            {},
            "ranks 0 and 1 would be on MIG slices of one GPU, GPU 0 of vm, and NCCL takes a GPU",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, name: str, argv: tuple[str, ...], more: dict[str, str], words: str
) -> None:
    """With exit code 3, before anything starts."""
    done = Box(tmp_path, name).train(*argv, more=more)
    assert done.returncode == 3, done.stderr
    assert words.replace(" vm", f" {os.uname().nodename}") in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("hides", ["-1", ""])
def test_a_run_on_cpus_says_that_gpus_are_hidden(tmp_path: Path, hides: str) -> None:
    """With `device: auto` they may be hidden on purpose, so that it is a note."""
    done = Box(tmp_path, "h100-8").train(
        "hooks={}", "log.ranks=[0]", more={"CUDA_VISIBLE_DEVICES": hides}
    )
    assert done.returncode == 0, done.stderr
    shown = hides or "''"
    here = os.uname().nodename
    assert (
        f"note: {here} trains on its CPUs, for CUDA_VISIBLE_DEVICES={shown} hides its 8 GPUs\n"
        in done.stderr
    )
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert [place["device"] for place in plan["ranks"]] == ["cpu"]


def test_a_rank_trains_on_a_slice(tmp_path: Path) -> None:
    box = Box(tmp_path, "a100-mig-7")
    part = "MIG-00000000-0000-0000-0000-000000000004"
    done = box.train(more={"CUDA_VISIBLE_DEVICES": part})
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert [(place["uuid"], place["device"]) for place in plan["ranks"]] == [(part, "cuda:0")]
    assert box.used() == [(0, 1)]


@pytest.mark.parametrize(
    ("name", "messages", "found"),
    [
        ("no-links-told", "ok", "GB/s"),
        ("h100-8", "failed", "of 370.8 GB/s that the links could do"),
        ("pcie-8-2sockets", "failed", "of 12.0 GB/s that the links could do"),
    ],
)
def test_doctor_trains_on_all_gpus(tmp_path: Path, name: str, messages: str, found: str) -> None:
    """Messages of simulated GPUs are slower than any link that NVML tells of."""
    box = Box(tmp_path, name, "gpus 2", "node 0 0-1 0-31", "memory 512")
    done = box.zrun("doctor", "--gpu", "--json")
    assert done.returncode == (0 if messages == "ok" else 3), done.stdout
    (rows,) = json.loads(done.stdout)["gpu_checks"].values()
    assert found in rows[-1]["found"]
    assert [(row["check"], tuple(row["gpus"]), row["verdict"]) for row in rows] == [
        *(
            (check, (number,), "ok")
            for number in (0, 1)
            for check in ("arithmetic", "repetition", "memory", "training")
        ),
        ("ZeRO-3", (0, 1), "ok"),
        ("optimizer on the host", (0, 1), "ok"),
        ("parameters on the host", (0, 1), "ok"),
        ("all-reduce", (0, 1), messages),
    ]


def test_ranks_train_on_amd_s_boards(tmp_path: Path) -> None:
    """ROCm's devices are torch's `cuda`; its driver chooses them by a variable of its own."""
    box = Box(tmp_path, "zero-gpu")
    boards = [{"serial": hex(0xABC0 + n), "bdf": f"0000:{5 + n:02x}:00.0"} for n in range(8)]
    path = tmp_path / "amd.json"
    path.write_text(json.dumps({"boards": boards, "links": {"all": [64000, 64000]}}))
    fake = Path(__file__).parents[1] / "scenarios" / "fake_amdsmi"
    environ = simulated_gpu.environment(devices=8, delay_us=50)
    more = {
        "SIMULATED_GPU": environ["SIMULATED_GPU"],
        "ZRUN_FAKE_AMDSMI": str(path),
        "ZRUN_FAKE_NVML": "/nowhere",
        "PYTHONPATH": os.pathsep.join((environ["PYTHONPATH"], str(fake))),
        "HIP_VISIBLE_DEVICES": "5,2",
    }
    with (tmp_path / "train.py").open("a") as code:
        code.write(
            "def started(context):\n"
            "    import os\n"
            "    names = ('ROCR_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES')\n"
            "    seen = [os.environ[name] for name in names]\n"
            "    print('sees', *seen, torch.cuda.device_count(), flush=True)\n"
        )
    done = box.train(more=more)
    assert done.returncode == 0, done.stderr
    uuids = [f"GPU-{0xABC0 + number:016x}" for number in (5, 2)]
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert [place["uuid"] for place in plan["ranks"]] == uuids
    log = (tmp_path / "run/logs/rank-1.log").read_text()
    assert f"sees {','.join(uuids)} 0,1 2\n" in log
    wrong = box.train(more=more | {"HIP_VISIBLE_DEVICES": "8"})
    assert wrong.returncode == 3
    assert "HIP_VISIBLE_DEVICES: '8' is no GPU of this host" in wrong.stderr
