"""The removal of older steps, in a thread of rank 0 that nothing waits for."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.errors import CheckpointError, SaveError


class Pruned(NamedTuple):
    """The result of one or more removals."""

    removed: list[int]
    warnings: list[str]


class Pruner:
    """Removals that were asked for, one after the other. Only rank 0 asks for any."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zrun-prune")
        self._pending: deque[Future[Pruned]] = deque()

    @property
    def last(self) -> Future[Pruned] | None:
        """The newest removal, if one is not reported yet."""
        return self._pending[-1] if self._pending else None

    def start(self, keep: int) -> None:
        """Remove all but `keep` steps, as `CheckpointFolder.prune` does, in the thread."""
        self._pending.append(self._pool.submit(self._prune, keep))

    def wait(self) -> None:
        """Return when no removal is under way."""
        wait(self._pending)

    def take_results(self) -> Pruned:
        """Return the results of removals that have ended since this was called last."""
        found = Pruned([], [])
        while self._pending and self._pending[0].done():
            pruned = self._pending.popleft().result()
            found.removed.extend(pruned.removed)
            found.warnings.extend(pruned.warnings)
        return found

    def close(self) -> None:
        """Wait for what is under way; nothing comes after this."""
        self._pool.shutdown()

    def _prune(self, keep: int) -> Pruned:
        """Remove older steps, in the thread."""
        known = set(self._folder.damaged)
        found = Pruned([], [])
        try:
            found.removed.extend(self._folder.prune(keep))
        except (SaveError, CheckpointError, OSError) as error:
            found.warnings.append(str(error))
        for step, problem in self._folder.damaged.items():
            if step not in known:
                found.warnings.append(
                    f"step {step} is not valid, so an older one is kept in its place: {problem}"
                )
        return found
