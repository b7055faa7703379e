"""Saves beside an asynchronous parameter server: what is in them, and how soon they are there."""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from async_jobs import CLIPPED, keys_of, recorded, warnings
from runs import losses, run

from zrun_core.checkpoint.checkpointer import Checkpointer, SaveConsensus
from zrun_core.train.async_windows import AsyncWindows


@pytest.mark.parametrize("staleness", [0, "any"])
@pytest.mark.at_most(1)
def test_saves_beside_training_hold_the_end_of_a_window(
    ranks, tmp_path: Path, staleness: int | str
) -> None:
    """What pushes change while bytes are written is not in them."""
    keys = keys_of(
        staleness,
        optim=CLIPPED,
        steps=24,
        checkpoint={"every": 8, "keep": 9, "async": True, "busy": "wait"},
    )
    once = ranks(2).run(recorded, keys, str(tmp_path / "run"), 1)
    assert once[0]["error"] == ""
    folder = tmp_path / "run" / "checkpoints"
    saved = sorted(each.parent.name for each in folder.glob("*/manifest.json"))
    assert saved == ["step-00000008", "step-00000016", "step-00000024"]
    if staleness == 0:
        early = {**keys, "sync": "server", "checkpoint": None}
        plain = ranks(2).run(run, early, str(tmp_path / "plain"))
        rest = ranks(2).run(run, early, str(tmp_path / "rest"), {"folder": str(folder), "step": 8})
        digests = [[each["digest"] for each in found] for found in (once, rest)]
        assert digests == [[each["digest"] for each in plain]] * 2


def lengths(keys: dict[str, Any], run_dir: str, turns: int, *args: Any) -> dict[str, Any]:
    """Run a job whose files of saves are on the disk by the given turn after they were begun.

    The rest is as of `run`. Returns also the steps of each window.
    """
    seen: list[int] = []
    contribution, read = Checkpointer.contribution, AsyncWindows.read
    asked = {"of": None, "times": 0}

    def late(self: Checkpointer, is_asked: bool = False) -> SaveConsensus:
        current = self._current
        if current is None:
            return contribution(self, is_asked)
        wait([current.writing])
        asked.update(
            of=current.step, times=asked["times"] + 1 if asked["of"] == current.step else 1
        )
        told = contribution(self, is_asked)
        return told if asked["times"] >= turns else told._replace(written=0.0, settled=0.0)

    def counted(self: AsyncWindows, steps: int) -> list[Any]:
        found = read(self, steps)
        seen.append(len(found))
        return found

    with (
        patch.object(Checkpointer, "contribution", late),
        patch.object(AsyncWindows, "read", counted),
    ):
        return {**run(keys, run_dir, *args), "lengths": seen}


BESIDE: dict[str, Any] = {
    "model": "runs.py:Speaker",
    "data": {"call": "runs.py:Tokens", "shuffle": True},
    "optim": CLIPPED,
    "steps": 24,
    "checkpoint": {"every": 9, "async": True},
    "hooks": {"on_step": "runs.py:on_step"},
}


@pytest.mark.parametrize("staleness", [0, "any"])
@pytest.mark.at_most(1)
def test_a_save_beside_training_is_there_long_before_the_next_one(
    ranks, tmp_path: Path, staleness: int | str
) -> None:
    """Or a run that dies has nothing of all the steps between two saves."""
    keys = keys_of(staleness, **BESIDE)
    cut = ranks(2).run(lengths, keys, str(tmp_path / "cut"), 1, None, 18)
    assert cut[0]["lengths"] == [9, 1, 8]
    saves = [each for each in cut[0]["events"] if each["type"] in ("save", "step")]
    assert [each["step"] for each in saves if each["type"] == "save"] == [9]
    assert saves.index(next(each for each in saves if each["type"] == "save")) == 10
    rest = ranks(2).run(run, keys, str(tmp_path / "cut"), {})
    assert [each["error"] for each in rest] == ["", ""]
    assert list(losses(rest[0])) == list(range(10, 25))
    if staleness == 0:
        once = ranks(2).run(run, {**keys, "sync": "server"}, str(tmp_path / "once"))
        assert [each["digest"] for each in rest] == [each["digest"] for each in once]


def test_windows_get_longer_while_a_disk_is_slow(ranks, tmp_path: Path) -> None:
    checkpoint = {"every": 20, "async": True, "busy": "skip", "keep": 9}
    keys = keys_of("any", **{**BESIDE, "steps": 50, "checkpoint": checkpoint})
    found = ranks(2).run(lengths, keys, str(tmp_path / "run"), 4)
    assert found[0]["error"] == ""
    assert [each["lengths"] for each in found] == [[20, 1, 1, 2, 4, 12, 1, 1, 2, 4, 2]] * 2
    assert warnings(found[0]) == []
    assert [e["step"] for e in found[0]["events"] if e["type"] == "save"] == [20, 40, 50]
