"""Settings of the C library's heap for a loop whose steps allocate the same memory again."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# Numbers of glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_NEVER = -1
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TUNABLES = "GLIBC_TUNABLES"


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory instead of handing it back to the kernel; return whether it does.

    By default blocks of 32 MiB and more are mapped anew for each allocation, so that every step
    faults its activations in again. Nothing changes where the environment says how the heap is to
    behave, or where there is another C library.
    """
    if os.environ.get(TUNABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


def give_back_freed_memory() -> None:
    """Hand what was freed, and is not in use again, back to the kernel once, where this is glibc.

    A heap that keeps what is freed keeps the holes too that building a model has left in it, which
    no later allocation may fit into.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # musl, macOS, Windows
        return
    trim(0)


def lacks_huge_pages() -> bool:
    """Return whether the kernel gives huge pages to heaps that ask, and it is too late to ask.

    Only `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`, set before the process starts, makes glibc ask.
    """
    try:
        mode = _HUGE_PAGES.read_text()
    except OSError:
        return False
    return "[madvise]" in mode and "glibc.malloc.hugetlb" not in os.environ.get(TUNABLES, "")
