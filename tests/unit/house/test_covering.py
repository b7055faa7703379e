"""What `--covering` runs of a table of tests, and what it leaves to `make test-all`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TABLES = """
import pytest

@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize(("stage", "size"), [(0, 1), (1, 1), (2, 2), (3, 4)])
def test_pairs(name, stage, size):
    pass

@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_list(name):
    pass

@pytest.mark.at_most(3)
@pytest.mark.parametrize("number", range(7))
def test_limited(number):
    pass

@pytest.mark.at_most(2)
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_limited_pairs(name, stage):
    pass

@pytest.mark.parametrize("name", ["a", pytest.param("b", marks=pytest.mark.covering), "c"])
@pytest.mark.parametrize("stage", [0, 1])
def test_chosen(name, stage):
    pass

@pytest.mark.thorough
def test_thorough():
    pass

def test_alone():
    pass
"""


def collected(folder: Path, *options: str) -> list[str]:
    root = Path(__file__).parents[2]
    shutil.copy(root / "conftest.py", folder)
    (folder / "test_tables.py").write_text(TABLES)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, "-W", "ignore", "-c", "/dev/null", "--rootdir", ".", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.partition("::")[2] for line in found.stdout.splitlines() if "::" in line]


def test_few_rows_have_all_values(tmp_path: Path) -> None:
    assert collected(tmp_path, "--covering") == [
        "test_pairs[0-1-a]",
        "test_pairs[1-1-b]",
        "test_pairs[2-2-c]",
        "test_pairs[3-4-a]",
        "test_list[a]",
        "test_list[b]",
        "test_list[c]",
        "test_limited[4]",
        "test_limited[5]",
        "test_limited[6]",
        "test_limited_pairs[2-a]",
        "test_limited_pairs[3-b]",
        "test_chosen[0-b]",
        "test_chosen[1-b]",
        "test_alone",
    ]


def test_without_it_all_run(tmp_path: Path) -> None:
    assert len(collected(tmp_path)) == 12 + 3 + 7 + 8 + 6 + 1 + 1
