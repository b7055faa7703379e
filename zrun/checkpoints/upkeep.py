"""Verify and remove the steps of a folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zrun_core.checkpoint.folder import CheckpointFolder, SavedStep


def verify_steps(
    steps: Sequence[SavedStep], num_threads: int | None
) -> tuple[list[list[str]], list[float]]:
    """Read every byte of `steps` and compare it with the digests.

    Args:
        num_threads: that read at once; None: as many as suits.

    Returns:
        The problems of each step, none if it is whole; and the seconds that each took.
    """
    from zrun_core.checkpoint.verify import verify

    problems: list[list[str]] = []
    seconds: list[float] = []
    for found in steps:
        start = time.perf_counter()
        if found.manifest is None:
            problems.append([found.problem or ""])
        else:
            problems.append(verify(found.path, found.manifest, num_threads))
        seconds.append(time.perf_counter() - start)
    return problems, seconds


@dataclass(frozen=True)
class PrunedSteps:
    """The steps and folders that were removed, or would be.

    Attributes:
        aside: folders of steps that had been set aside.
        in_use_by: a process that saves there, whose files stay; None: there is none.
    """

    steps: list[int]
    aside: list[Path]
    in_use_by: str | None = None


def prune_steps(folder: CheckpointFolder, keep: int, *, aside: bool, dry_run: bool) -> PrunedSteps:
    """Remove old steps, and what saves of dead processes have left.

    Args:
        keep: number of valid steps that stay; every byte of them is read.
        aside: remove what was set aside too.
    """
    from zrun_core.checkpoint.folder_lock import InUseError, held

    steps = folder.prune(keep, thorough=True, dry_run=dry_run)
    if dry_run:
        return PrunedSteps(steps, folder.aside() if aside else [])
    try:
        with held(folder.path):
            removed = folder.remove_aside() if aside else []
            folder.sweep()
    except InUseError as error:
        return PrunedSteps(steps, [], error.holder)
    return PrunedSteps(steps, removed)
