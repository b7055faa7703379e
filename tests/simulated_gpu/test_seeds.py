"""`seeds.py` counts what passed, failed and raced, and no seed that did is taken for a good one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "seeds.py"

TESTS = """
import os

import pytest
import torch

SEED = int(dict(each.split("=") for each in os.environ["SIMULATED_GPU"].split(","))["seed"])

def test_good():
    assert torch.cuda.is_available()

@pytest.mark.skip
def test_left_out():
    pass

def test_racing():
    x = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)
    if SEED != 3:
        torch.cuda.synchronize()
    x * 2

def test_numbers():
    assert SEED != 4
"""


def seeds(folder: Path, *words: str) -> tuple[int, list[str]]:
    """Return its exit code, and what it says of seeds."""
    (folder / "test_them.py").write_text(textwrap.dedent(TESTS))
    command = [sys.executable, str(SCRIPT), *words, "--", "-p", "no:cacheprovider", "test_them.py"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    said = [
        line for line in ended.stdout.splitlines() if line.startswith("seed ") or " seeds" in line
    ]
    return ended.returncode, said or [ended.stderr.strip()]


def test_each_seed_is_told_of_and_all_of_them(tmp_path: Path) -> None:
    code, said = seeds(tmp_path, "2-4")
    assert code == 1
    assert said == [
        "seed 2: 3 passed, 0 failed, 0 races",
        "seed 3: 2 passed, 1 failed, 1 race",
        "seed 4: 2 passed, 1 failed, 0 races",
        "3 seeds: 7 passed, 2 failed, 1 race; look at 3, 4",
    ]


def test_a_good_seed_ends_well_and_nothing_that_ran_does_not(tmp_path: Path) -> None:
    assert seeds(tmp_path, "5") == (0, ["seed 5: 3 passed, 0 failed, 0 races"])
    command = [sys.executable, str(SCRIPT), "5", "--", "test_them.py", "-k", "left_out"]
    assert subprocess.run(command, capture_output=True, cwd=tmp_path).returncode == 1


@pytest.mark.parametrize("words", [["x"], ["3-"], [], ["4-3"]])
def test_what_is_no_seed_is_refused(tmp_path: Path, words: list[str]) -> None:
    code, (said,) = seeds(tmp_path, *words)
    assert code == 1
    assert "write numbers, or a range such as 1-20" in said
