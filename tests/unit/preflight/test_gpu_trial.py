"""`zrun doctor --gpu`: what its processes come to, and the verdict on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "scenarios"))
import fake_nvml

from zrun.agent import gpu_check
from zrun.agent.gpu_check import CheckedGpu, Row
from zrun.cli import app
from zrun.hosts.cluster import HostFacts, simulate
from zrun.preflight import gpu_trial, inspection
from zrun.preflight.gpu_trial import Verdict, judge, trial_lines
from zrun.preflight.host_report import Finding
from zrun.topology.scenario import Scenario
from zrun_core.library import device_check

CPU = torch.device("cpu")


def gpus(*uuids: str) -> list[CheckedGpu]:
    return [CheckedGpu(uuid, index, 1 << 30, False) for index, uuid in enumerate(uuids)]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are fake, and have less time."""
    monkeypatch.setattr(gpu_check, "_RANK", "fake_device_check")
    monkeypatch.setattr(gpu_check, "_LIMIT_S", 2.0)
    monkeypatch.setattr(gpu_check, "_OTHERS_S", 0.2)
    path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", path)


def told(rows: list[Row]) -> list[tuple[str, tuple[int, ...], str | None]]:
    return [(row.check, row.gpus, row.problem) for row in rows]


def test_gpus_are_checked_alone_in_pairs_and_together(ranks: None) -> None:
    rows = gpu_check.check(gpus(*["GPU-good"] * 3), "cuda")
    single = [
        (check, (number,), None) for number in range(3) for check in ("first of alone", "second")
    ]
    three = (0, 1, 2)  # nobody is left over
    assert told(rows) == [
        *single,
        ("first of training", three, None),
        ("second", three, None),
        ("first of messages", three, None),
        ("second", three, None),
    ]


def test_groups_are_pairs_of_neighbours() -> None:
    found = [[gpu.index for gpu in group] for group in gpu_check._pairs(gpus(*"abcdefg"))]
    assert found == [[0, 1], [2, 3], [4, 5, 6]]
    assert [len(group) for group in gpu_check._pairs(gpus("a"))] == [1]


def test_slices_exchange_no_data(ranks: None) -> None:
    slices = [replace(gpu, is_slice=True) for gpu in gpus("GPU-good", "GPU-good")]
    checks = {(row.check, row.gpus) for row in gpu_check.check(slices, "cuda")}
    assert ("first of training", (1,)) in checks
    assert not any(check == "first of messages" for check, _ in checks)


def test_what_one_rank_finds_counts(ranks: None) -> None:
    rows = gpu_check._turn("training", [gpus("GPU-good", "GPU-wrong")], "cuda")
    assert told(rows) == [("first of training", (0, 1), None), ("second", (0, 1), "2 is 3")]


def test_a_process_that_crashes_is_told_with_what_it_said(ranks: None) -> None:
    """The other rank waits for it, and is ended."""
    rows = gpu_check._turn("messages", [gpus("GPU-good", "GPU-crash")], "cuda")
    assert told(rows) == [
        ("first of messages", (0, 1), None),
        ("messages", (0, 1), "RuntimeError: unhandled system error"),
    ]
    assert rows[-1].lines[0] == "NCCL WARN a cable is loose"


def test_a_process_that_stands_still_tells_where(ranks: None) -> None:
    rows = gpu_check._turn("alone", [gpus("GPU-good"), gpus("GPU-stuck")], "cuda")
    assert [row.problem for row in rows] == [None, None, None, "it made no progress for 2 s"]
    assert any("fake_device_check.py" in line for line in rows[-1].lines)


# The verdict.


def host(name: str) -> HostFacts:
    return simulate(Scenario.read(fake_nvml.scenario(name))).hosts[0]


@pytest.mark.parametrize(
    ("name", "numbers", "rate", "verdict", "of"),
    [
        ("dgx1v", (0, 3), 38e9, Verdict.OK, "40.0"),
        ("dgx1v", tuple(range(8)), 36e9, Verdict.OK, "40.0"),  # a ring of double NVLinks
        ("pcie-8-2sockets", tuple(range(8)), 3e9, Verdict.SLOW, "6.0"),
        ("h100-8", (2, 3), 12e9, Verdict.FAILED, "370.8"),  # it went over PCIe
        ("no-links-told", (0, 1), 1e9, Verdict.OK, None),
    ],
)
def test_messages_are_judged_by_the_links(
    name: str, numbers: tuple[int, ...], rate: float, verdict: Verdict, of: str | None
) -> None:
    row = Row("all-reduce", numbers, f"{rate / 1e9:.1f} GB/s", rate=rate)
    found = judge(row, host(name))
    assert found.verdict is verdict
    expected = f" of {of} GB/s that the links could do" if of else ""
    assert found.found == f"{rate / 1e9:.1f} GB/s{expected}"
    assert bool(found.advice) == (verdict is not Verdict.OK)


def test_gpus_of_which_the_same_is_said_share_a_line() -> None:
    rows = [Row("memory", (number,), "1024 MiB are read as they were written") for number in (0, 1)]
    rows.append(Row("memory", (2,), "7 numbers were read back otherwise", "7 numbers were"))
    rows.append(Row("memory", (3,), "1024 MiB are read as they were written"))
    rows.append(Row("ZeRO-3", (0, 1), "6 losses within 1e-06"))
    rows.append(Row("alone", (2,), "it ended", "it ended", lines=("its last word",)))
    lines = trial_lines("node1", [judge(row, host("dgx1v")) for row in rows])
    assert [" ".join(line.split()) for line in lines] == [
        "node1: check GPUs found",
        "memory 0-1,3 1024 MiB are read as they were written ok",
        "memory 2 7 numbers were read back otherwise failed",
        "ZeRO-3 0 and 1 6 losses within 1e-06 ok",
        "alone 2 it ended failed",
        "node1: memory: leave that GPU out, and have it looked at: what it computes cannot be "
        "trusted (nvidia-smi -q -d ECC, dmesg)",
        "node1: alone: report it, with what zrun doctor --gpu --json prints",
        "its last word",
    ]


def test_a_host_without_gpus_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zrun", "doctor", "--gpu"],
        env=fake_nvml.environment(fake_nvml.build(tmp_path), "zero-gpu"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert "it has no usable GPU: NVIDIA driver 550.54.15 sees none" in done.stdout


def test_a_check_that_fails_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no check fails it is 0, also if messages are slow."""
    wrong = Row("memory", (2,), "7 numbers were read back", "7 numbers were read back")
    slow = Row("all-reduce", (0, 1), "5.0 GB/s", rate=5e9)
    finding = Finding("node1", None, (), ())
    monkeypatch.setattr(inspection, "inspect_hosts", lambda agents, needs: [finding])
    for rows, code in (([slow], 0), ([slow, wrong], 3)):
        judged = [judge(row, host("pcie-bridges")) for row in rows]
        monkeypatch.setattr(gpu_trial, "try_gpus", lambda *_, found=judged: {"node1": found})
        result = CliRunner().invoke(app, ["doctor", "--gpu", "--json"])
        assert result.exit_code == code, result.output
        told = json.loads(result.stdout)["gpu_checks"]["node1"]
        assert told[0]["verdict"] == "slow"
        assert told[0]["found"] == "5.0 GB/s of 10.0 GB/s that the links could do"


# What a rank computes.


def test_operators_of_the_cpu_are_right() -> None:
    for dtype in device_check._TOLERATED:
        for operator in device_check._operators().values():
            source = torch.randn(256, 256, generator=torch.Generator().manual_seed(5)) / 16
            assert operator(source.to(dtype).double()).isfinite().all()
    outcome = device_check._compare_operators(CPU, 256)
    assert (outcome.check, outcome.problem) == ("arithmetic", None)


def test_a_wrong_operator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = device_check._operators()

    def wrong(x: torch.Tensor) -> torch.Tensor:
        product = x @ x.t()
        if x.dtype is torch.bfloat16:
            product[3, 4] += product.abs().max() * 0.1
        return product

    changed: dict[str, Any] = {"sum": operators["sum"], "product": wrong}
    monkeypatch.setattr(device_check, "_operators", lambda: changed)
    outcome = device_check._compare_operators(CPU, 256)
    assert outcome.problem is not None
    assert outcome.problem.startswith("product in bfloat16 is off by")


def test_losses_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = device_check._plain_losses()
    assert right[-1] < 0.9 * right[0]  # it learns, so that a stale parameter shows
    changed = [*right[:3], right[3] * 1.01, *right[4:]]
    monkeypatch.setattr(device_check, "_losses", lambda run, settings: changed)
    outcome = device_check._train_and_compare("ZeRO-3", None)  # type: ignore[arg-type]
    assert outcome.problem is not None
    assert outcome.problem.startswith(f"the loss of step 4 is {changed[3]:.5f}, and plain torch")
    monkeypatch.setattr(device_check, "_losses", lambda run, settings: [float("nan")] * 6)
    nan = device_check._train_and_compare("ZeRO-3", None)  # type: ignore[arg-type]
    assert nan.problem is not None
    assert "the loss of step 1 is nan" in nan.problem


def test_memory_that_forgets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "_BLOCK", 1 << 12)
    assert device_check._fill_memory(CPU, 1 << 16).problem is None
    real = torch.Tensor.bitwise_xor
    calls = iter(range(100))

    def forgetful(self: torch.Tensor, key: int) -> torch.Tensor:
        found = real(self, key)
        if next(calls) == 2:
            found[7] ^= 64
        return found

    monkeypatch.setattr(torch.Tensor, "bitwise_xor", forgetful)
    problem = device_check._fill_memory(CPU, 1 << 16).problem
    assert problem == "1 numbers were read back from its memory otherwise than written"
