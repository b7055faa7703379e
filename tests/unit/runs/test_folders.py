"""Who may write to the folders that are made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from zrun.runs.rundir import RunDir
from zrun_core.spine.folders import make_private


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("no_umask")
def test_nobody_else_may_write_to_a_run_or_above_it(tmp_path: Path) -> None:
    with RunDir.claim("gpt", None, tmp_path / "a" / "runs") as rundir:
        assert mode(rundir.path) == 0o700
        assert [mode(folder) for folder in list(rundir.path.parents)[:3]] == [0o775] * 3
        assert all(mode(each) & 0o077 == 0 for each in rundir.path.iterdir())


@pytest.mark.usefixtures("no_umask")
def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(0o777)
    make_private(shared / "mine")
    make_private(shared)
    assert (mode(shared), mode(shared / "mine")) == (0o777, 0o700)


def test_a_stricter_umask_counts(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert mode(tmp_path / "a") == 0o700
