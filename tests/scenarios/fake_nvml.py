"""Builds the library of `fake_nvml.c`, once per test session, and says how a process is made to
load it. `Machine` is one that changes while processes run.
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


class Machine:
    """A machine whose description changes: boards grow hot, errors come, GPUs are lost."""

    def __init__(self, folder: Path, name: str) -> None:
        """Begin with the machine of a scenario; its file lies in `folder`."""
        self.path = folder / "machine.txt"
        self.path.write_text(scenario(name).read_text())

    def say(self, *lines: str) -> None:
        """Add lines, of which a process sees all at once or none."""
        new = self.path.with_suffix(".new")
        new.write_text(self.path.read_text() + "".join(f"{line}\n" for line in lines))
        new.replace(self.path)

    def environment(self, library: Path) -> dict[str, str]:
        """For processes that are to run on it."""
        return environment(library, "zero-gpu") | {"ZRUN_FAKE_NVML": str(self.path)}
