"""Settings of torch's allocator in a user's own script: those of a job, unless there are some."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from zrun.job.environment import WORKER_DEFAULTS
from zrun_core.hardware import accelerator
from zrun_core.library import run

NAME = "PYTORCH_ALLOC_CONF"


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NAME, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)


def test_segments_expand_as_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(accelerator, "set_device", lambda device: seen.append(os.environ.get(NAME)))
    assert run._find_device("auto", 0).type == "cuda"
    assert seen == [WORKER_DEFAULTS[NAME]], "before anything asks the device for memory"
    monkeypatch.delenv(NAME)  # of the process, which has other tests


@pytest.mark.parametrize("name", [NAME, "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(accelerator, "set_device", lambda device: None)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    run._find_device("cuda", 0)
    assert {key: value for key, value in os.environ.items() if key.endswith("ALLOC_CONF")} == {
        name: "max_split_size_mb:128"
    }


def test_nothing_is_set_too_late_or_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run._find_device("cpu", 0)
    assert NAME not in os.environ
    monkeypatch.setattr(accelerator, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    run._find_device("auto", 0)
    assert NAME not in os.environ


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch cannot tell"
)
def test_torch_reads_them_when_they_are_first_needed() -> None:
    """Not when it is imported, which comes before `init()`."""
    code = f"""
import os, torch
torch.ones(3) + 1
os.environ["{NAME}"] = "{WORKER_DEFAULTS[NAME]}"
print(torch._C._accelerator_getAllocatorSettings())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == WORKER_DEFAULTS[NAME]
