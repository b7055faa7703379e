"""Text of users, workers and hosts, before it reaches a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrun import cli
from zrun.launch.failures import Failure, FailureNote, WorkerExit
from zrun.system.output import say
from zrun.watch.plain import message_line, start_line
from zrun_core.spine.printable import printable
from zrun_core.spine.spec import LaunchPlan, RankPlace

EVIL = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m\u202etxt"
SHOWN = "^[]0;title^Gred\\u202etxt"


@given(st.text())
def test_what_is_printable_is_so_line_by_line_and_stays_so(text: str) -> None:
    once = printable(text)
    assert all(line.isprintable() for line in once.split("\n"))
    assert printable(once) == once


def test_plain_text_stays_what_it_is() -> None:
    assert printable("loss 0.5\n  größer ▁▂▃") == "loss 0.5\n  größer ▁▂▃"
    assert printable(EVIL) == SHOWN


def test_what_workers_say_does_a_terminal_no_harm() -> None:
    log = {"type": "log", "rank": 0, "message": EVIL}
    assert message_line(log) == f"rank 0: {SHOWN}"
    assert f"note: {SHOWN}" in start_line({"type": "start", "params": 1, "notes": [EVIL]})


@pytest.mark.thorough
def test_an_error_of_a_command_does_a_terminal_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: x\nmodel: train.py:build\ndata: train.py:build\nsteps: 1\nbatch: 1\ndevice: cpu\n"
    )
    (tmp_path / "train.py").write_text(f"def build():\n    raise ValueError({EVIL!r})\n")
    monkeypatch.setattr(sys, "argv", ["zrun", "check", str(tmp_path / "job.yaml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 5
    assert f"ValueError: {SHOWN}" in capsys.readouterr().err


def test_a_failure_is_cleaned_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    note = FailureNote(
        rank=0, kind="user", type="ValueError", message=EVIL, exit_code=5, traceback=f"a\n{EVIL}"
    )
    plan = LaunchPlan(ranks=[RankPlace(rank=0, host="h", local_rank=0, device="cpu")])
    told = Failure(WorkerExit(0, 5, 1.0, note=note), plan, 0, Path("log")).describe()
    say(told, sys.stderr)
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert f"a\n{SHOWN}\n" in said
