"""When a save is due."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

from zrun_core.checkpoint.checkpointer import Checkpointer, RunInfo, _Save
from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.distributed.transport import Group
from zrun_core.spine.config import CheckpointConfig


def test_a_save_that_is_skipped_is_not_due_again_at_once(tmp_path: Path) -> None:
    """It is written for longer than `minutes`: one warning each time they have passed, not after every step."""
    told: list[dict[str, Any]] = []
    config = CheckpointConfig.model_validate({"minutes": 60, "async": True, "busy": "skip"})
    saves = Checkpointer(
        CheckpointFolder(tmp_path),
        cast(Any, None),
        cast(Any, None),
        config,
        cast(Any, None),
        Group("world", (0,), 0, None),
        RunInfo("run", {}, {}),
        lambda **fields: told.append(fields),
    )
    saves._current = _Save(1, "due", tmp_path, {}, {}, [], 0.0, Future(), prunes=True)
    saves._last_save = time.monotonic() - 3601
    for step in (2, 3, 4):
        saves.update(saves.contribution())
        saves.after_step(step, dict)
    assert told == [{"warning": "step 2 is not saved: step 1 is still being written"}]
    saves.close()
