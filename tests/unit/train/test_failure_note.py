"""What the note of a failure says of exceptions that are no bugs of the runtime."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zrun_core.errors import ExitCode, UserCodeError
from zrun_core.train import failure_note
from zrun_core.user_code.user import user_code

KILLED = "DataLoader worker (pid 322) is killed by signal: Killed. "
SAID = "a data-loading process died; data.workers: 0 has the rank itself do its work"


def note_of(error: BaseException, folder: Path) -> dict[str, object]:
    code = failure_note.report(error, folder, 3, "optimizer", None)
    assert code == ExitCode.WORKER
    (note,) = (folder / "failures").iterdir()
    found: dict[str, object] = json.loads(note.read_text())
    return found


def test_a_loader_that_dies_while_the_runtime_works_is_no_bug_of_it(tmp_path: Path) -> None:
    """Torch raises wherever the main thread is when the system tells of the process."""
    note = note_of(RuntimeError(KILLED), tmp_path)
    assert note["kind"] == "user"
    assert note["message"] == f"optimizer failed: {SAID}: {KILLED.strip()}"


def test_a_loader_that_dies_while_a_module_computes_is_named() -> None:
    with pytest.raises(UserCodeError) as caught, user_code("forward failed"):
        raise RuntimeError(KILLED)
    assert SAID in str(caught.value)
