"""The lock of a folder of checkpoints, held by the process that writes to it or removes from it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zrun_core.errors import SaveError
from zrun_core.spine.folders import make_private

PATIENCE_S = 20.0  # with an earlier attempt, which may be about to end
_FILE = ".lock"  # says which process holds it, or has held it last
_held: set[int] = set()  # descriptors of locks


class InUseError(SaveError):
    """Another process holds the folder."""

    def __init__(self, folder: Path, holder: str, advice: str) -> None:
        """
        Args:
            holder: number of that process, as far as it is known.
        """
        self.holder = f"process {holder or '(unknown)'}"
        super().__init__(
            f"cannot save in {folder}: it is in use by {self.holder} of another run; {advice}"
        )


def hold(
    folder: Path, patience_s: float = PATIENCE_S, *, advice: str = "set checkpoint.dir"
) -> int:
    """Lock a folder of checkpoints for the life of this process.

    Args:
        folder: is made if it is not there.
        patience_s: seconds to wait for another process that holds it.
        advice: what the user can do if it cannot be used; a loop of the user's own has no job keys.

    Returns:
        The descriptor that holds the lock.

    Raises:
        InUseError: another process has had it for all that time.
        SaveError: the folder cannot be made, or its lock not be opened.
    """
    try:
        make_private(folder)
        lock = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SaveError(f"cannot save in {folder}: {error.strerror}; {advice}") from None
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
                os.close(lock)
                raise InUseError(folder, holder, advice) from None
            time.sleep(0.1)
        except OSError as error:  # a file system that knows no locks
            os.close(lock)
            raise SaveError(
                f"cannot save in {folder}: it cannot be locked: {error.strerror}"
            ) from None
        else:
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            _held.add(lock)
            return lock


def release(lock: int) -> None:
    """Give up what `hold` returned."""
    _held.discard(lock)
    os.close(lock)


@contextmanager
def held(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder for the length of a `with` block.

    Args:
        patience_s: as for `hold`.

    Raises:
        InUseError, SaveError: as `hold`.
    """
    lock = hold(folder, patience_s)
    try:
        yield
    finally:
        release(lock)


def _release_in_child() -> None:
    """Close the locks in a forked process, such as a data loader's: it may outlive its parent."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_release_in_child)
