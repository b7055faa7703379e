"""What the names in a folder of checkpoints mean.

Leftovers are no steps, and a person's folders are nobody else's.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from zrun_core.checkpoint import names
from zrun_core.errors import CheckpointError

LEFT = (
    "step-00000005.tmp-ab12",
    "step-00000006.aside-ffee0011",
    "latest.tmp-0001",
    "before-gpt.aside-00000001",
)
FOREIGN = (
    "step-5",
    "step-0000000x",
    "step-00000007.old1",
    "step-0000000\u0665",
    "before-refactoring",
    "latest1",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 10 and 20, and everything else that a folder may hold."""
    path = tmp_path / "checkpoints"
    for name in ("step-00000020", "step-00000010", "latest", *LEFT, *FOREIGN):
        (path / name).mkdir(parents=True)
    return path


def test_only_steps_are_steps(folder: Path) -> None:
    assert names.steps_in(folder) == [10, 20]
    assert names.steps_in(folder / "nowhere") == []
    assert names.step_of(names.step_name(7)) == 7
    assert names.step_of(names.step_name(10**12)) == 10**12


def test_names_that_are_made_are_known_again() -> None:
    files = names.LATEST, names.BEST
    aside = names.before_name("gpt"), names.aside_name(names.step_name(3))
    for name in (names.step_name(3), *files, *aside):
        assert names.is_stale(names.tmp_name(name))
        assert not names.is_stale(name)
    assert names.is_aside(names.before_name("gpt.aside-1"))
    assert names.is_aside(names.aside_name(names.step_name(3)))
    for name in FOREIGN:
        assert not any(
            ask(name) for ask in (names.is_aside, names.is_stale, names.belongs_to_steps)
        ), name


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
        names.steps_in(folder)


def test_what_a_killed_save_leaves_is_no_step(folder: Path) -> None:
    """Its nonce may end in a digit, as that of a damaged step."""
    assert max(names.steps_in(folder)) == 20
