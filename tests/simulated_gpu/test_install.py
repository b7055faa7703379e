"""Processes find simulated GPUs by their environment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from scripts import run
from simulated_gpu import build, settings


def test_torch_finds_devices() -> None:
    said = run(
        """
        import torch
        x = torch.randn(5, 3)
        y = (x.cuda() * 2 + 1).relu()
        print(torch.cuda.is_available(), torch.cuda.device_count(), y.device)
        print(torch.equal(y.cpu(), (x * 2 + 1).relu()))
        """,
        devices=3,
        delay_us=100,
    )
    assert said.splitlines() == ["True 3 cuda:0", "True"]


def test_importing_torch_starts_no_thread_and_children_have_streams_of_their_own() -> None:
    said = run(
        """
        import os, torch
        before = len(os.listdir("/proc/self/task"))
        torch.cuda.device_count(), torch.cuda.is_available(), torch.cuda.default_generators
        print(len(os.listdir("/proc/self/task")) - before, flush=True)
        for number in range(2):
            if os.fork() == 0:
                torch.cuda.set_device(number)
                print(float(torch.ones(3, device="cuda").sum()), torch.cuda.current_device())
                os.sys.stdout.flush()
                os._exit(0)
            os.wait()
        """
    )
    assert said.splitlines() == ["0", "3.0 0", "3.0 1"]


def test_a_fork_after_the_first_kernel_is_refused() -> None:
    said = run(
        """
        import os, torch
        x = torch.ones(3, device="cuda")
        if os.fork() == 0:
            try:
                torch.ones(3, device="cuda")
            except RuntimeError as error:
                print(error, torch.cuda._is_in_bad_fork(), flush=True)
            os._exit(0)
        os.wait()
        """
    )
    assert said.startswith("Cannot re-initialize CUDA in forked subprocess.")
    assert said.endswith("True")


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        ("1,-1,2", [1]),
        ("3,9,1", [3]),
        ("1,1", [1]),
        (settings.uuid(2), [2]),
        ("GPU-00000001", [1]),
        ("GPU-0", []),
        ("none", []),
        ("", []),
    ],
)
def test_devices_are_hidden_by_cudas_rules(chosen: str | None, seen: list[int]) -> None:
    assert settings.visible(4, chosen) == seen


def test_a_process_sees_the_devices_that_it_may_see() -> None:
    script = """
        import torch
        print(torch.cuda.device_count(), torch.cuda.is_available())
        if torch.cuda.is_available():
            print(torch.cuda.get_device_properties(0).uuid)
        """
    said = run(script, more={"CUDA_VISIBLE_DEVICES": "1"}, devices=2)
    assert said.splitlines() == ["1 True", settings.uuid(1).removeprefix("GPU-")]
    assert run(script, more={"CUDA_VISIBLE_DEVICES": "7"}, devices=2) == "0 False"


def test_nvml_has_a_board_for_each_device_of_a_command() -> None:
    script = """
        import torch
        from zrun.topology.nvml import read_machine
        found = [board.uuid for board in read_machine().devices]
        of = torch.cuda.get_device_properties
        print(found == [f"GPU-{of(number).uuid}" for number in range(torch.cuda.device_count())])
        print(len(found), {board.memory_bytes for board in read_machine().devices})
        """
    command = [sys.executable, "-m", "simulated_gpu", f"devices=3,memory={5 << 30}", "-c"]
    home = str(settings.STARTUP.parent)
    paths = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["True", f"3 {{{5 << 30}}}"], done.stderr


def test_another_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')\n")
    paths = f"{settings.STARTUP}:{tmp_path}"
    assert run("pass", more={"PYTHONPATH": paths}) == "the other one"


def test_a_setting_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="no setting 'sed'; there are devices, delay_us"):
        settings.environment(sed=3)


def test_another_torch_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.why_not() is None
    monkeypatch.setattr(build, "torch_version", lambda: "2.11.0+cpu")
    assert build.why_not() == "the simulated GPU knows torch 2.13.x, this is 2.11.0+cpu"


def test_the_time_between_two_events_is_told() -> None:
    said = run(
        """
        import torch
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        torch.ones(3, device="cuda").sum()
        second.record(torch.cuda.current_stream())
        second.synchronize()
        print(first.elapsed_time(second) > 0)
        """
    )
    assert said == "True"


def test_a_command_on_simulated_gpus_ends_with_its_own_exit_code() -> None:
    """What may be skipped must not pass where it can run."""
    code = "import sys, torch; print(torch.cuda.device_count()); sys.exit(3)"
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "simulated_gpu", "devices=3", "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (3, "3\n"), done.stderr
