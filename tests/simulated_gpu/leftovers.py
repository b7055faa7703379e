"""What a launch, or ranks of a script, leave on this host: processes, files, shared memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def find(mark: str, temporary: Path, shared: set[str]) -> dict[str, list[str]]:
    """Return what is still there, by where; it may be nothing.

    Args:
        mark: of processes, which have ZRUN_TEST=mark in their environment.
        temporary: their folder of temporary files.
        shared: files of /dev/shm that were there before: those that nobody has open count.
    """
    found = {
        "processes": processes(mark),
        "temporary files": temporary_files(temporary),
        "/dev/shm": _unused(set(os.listdir("/dev/shm")) - shared),
    }
    return {where: each for where, each in found.items() if each}


def processes(mark: str) -> list[str]:
    """Return the command lines of what runs with ZRUN_TEST=mark in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"ZRUN_TEST={mark}".encode() in (
                entry / "environ"
            ).read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def temporary_files(folder: Path) -> list[str]:
    """Return what lies in a folder of temporary files, but torch's cache of what it compiles."""
    return [each.name for each in folder.iterdir() if not each.name.startswith("torchinductor_")]


def _unused(names: set[str]) -> list[str]:
    """Return the files of /dev/shm that no process has mapped or open: other jobs run here too."""
    used: set[str] = set()
    for entry in Path("/proc").iterdir() if names else ():
        with suppress(OSError):
            if entry.name.isdigit():
                used |= {
                    name for name in names if f"/dev/shm/{name}" in (entry / "maps").read_text()
                }
                used |= {Path(os.readlink(each)).name for each in (entry / "fd").iterdir()}
    return sorted(name for name in names - used if Path("/dev/shm", name).exists())
