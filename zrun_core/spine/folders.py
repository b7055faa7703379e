"""Folders that only their owner may write to, whatever the umask says."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def make_private(path: Path) -> None:
    """Make a folder for its owner alone.

    Missing folders above it are made, too: others may read them, and not write to them.

    Raises:
        OSError: it cannot be made.
    """
    for folder in reversed(path.absolute().parents):
        if not folder.exists():
            with suppress(FileExistsError):  # another process was faster
                os.mkdir(folder, 0o775)
    path.mkdir(mode=0o700, exist_ok=True)
