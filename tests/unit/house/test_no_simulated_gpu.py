"""Where there can be no simulated GPU, its commands say why in one line, and `make` goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def simulated(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m simulated_gpu`, with what lies in `folder` in front of what is installed."""
    paths = (str(folder), str(ROOT / "tests" / "simulated_gpu"))
    return subprocess.run(
        [sys.executable, "-m", "simulated_gpu", *arguments],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "SIMULATED_GPU_BUILD": str(folder / "built")}
        | more,
        capture_output=True,
        text=True,
        timeout=120,
    )


def put_torch(folder: Path, version: str, *libraries: str) -> None:
    """Lay down what `simulated_gpu` looks at of an installed torch."""
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (folder / "torch" / "version.py").write_text(f"__version__ = {version!r}\n")
    for name in libraries:
        (folder / "torch" / "lib" / name).touch()


@pytest.mark.parametrize(
    "arguments", [("--build",), ("seed=1,devices=4", "script.py"), ("script.py",)]
)
@pytest.mark.parametrize(
    ("version", "libraries", "reason"),
    [
        ("2.12.1+cpu", (), "the simulated GPU knows torch 2.13.x, this is 2.12.1+cpu"),
        (
            "2.13.0+cu130",
            ("libtorch_cuda.so",),
            "the simulated GPU needs torch's wheel for CPUs, this one has CUDA of its own",
        ),
        ("2.13.0+cpu", (), "the simulated GPU needs g++ (apt-get install g++)"),
    ],
)
def test_the_reason_is_said_and_nothing_runs(
    tmp_path: Path,
    version: str,
    libraries: tuple[str, ...],
    reason: str,
    arguments: tuple[str, ...],
) -> None:
    put_torch(tmp_path, version, *libraries)
    (tmp_path / "script.py").write_text("raise SystemExit('the script has run')\n")
    chosen = [str(tmp_path / each) if each == "script.py" else each for each in arguments]
    done = simulated(tmp_path, *chosen, PATH=str(tmp_path))  # without g++
    assert (done.returncode, done.stdout, done.stderr) == (0, f"skipped: {reason}\n", "")
    assert not (tmp_path / "built").exists()


def test_what_does_not_compile_is_no_reason_to_skip(tmp_path: Path) -> None:
    """It would hide that the sources are wrong."""
    put_torch(tmp_path, "2.13.0+cpu")
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = simulated(tmp_path, "--build", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 1
    assert "g++ does not compile the simulated GPU:\nno such header" in done.stderr
