"""Builds the library of `fake_nvml.c`, once per test session, and says how a process is made to
load it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCENARIOS = Path(__file__).parent
NAMES = sorted(path.stem for path in SCENARIOS.glob("*.txt"))


def scenario(name: str) -> Path:
    return SCENARIOS / f"{name}.txt"


def build(folder: Path, *options: str) -> Path:
    """The folder of a libnvidia-ml.so.1; skips the test where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the fake libnvidia-ml.so.1 with")
    target = folder / "libnvidia-ml.so.1"
    source = SCENARIOS / "fake_nvml.c"
    linking = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run(
        [compiler, "-Wall", *options, *linking, "-o", str(target), str(source)], check=True
    )
    return folder


def environment(library: Path, name: str) -> dict[str, str]:
    """For a process of its own: a running one reads LD_LIBRARY_PATH no more."""
    clean = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return clean | {"LD_LIBRARY_PATH": str(library), "ZRUN_FAKE_NVML": str(scenario(name))}
