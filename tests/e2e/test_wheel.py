"""A wheel of torch for CPUs on a host with GPUs, which a library of the tests shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import PATIENCE_S

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))
import fake_nvml

ROOT = Path(__file__).parents[2]
MODEL = "import torch\ndef model(): return torch.nn.Linear(2, 2)\ndef data(): return []\n"
JOB = "name: wheel\nmodel: train.py:model\ndata: train.py:data\nsteps: 1\nbatch: 2\nslots: 2\n"


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="torch computes on GPUs here")
@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.thorough
def test_the_wheel_to_install_is_named(tmp_path: Path, command: str) -> None:
    machine = fake_nvml.Machine(tmp_path, "h100-8")
    library = fake_nvml.build(tmp_path)
    (tmp_path / "train.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(JOB)
    done = subprocess.run(
        [sys.executable, "-m", "zrun", command, "job.yaml"],
        cwd=tmp_path,
        env=machine.environment(library) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 3, done.stderr
    release, _, label = torch.__version__.partition("+")
    assert f"device: cuda, but torch {torch.__version__}" in done.stderr
    assert "device: cpu trains without" in done.stderr
    if label == "cpu":
        assert f"pip install --force-reinstall torch=={release} --index-url" in done.stderr
    assert "Traceback" not in done.stderr
