"""How much memory there is: of the host, and of this process's control group.

A read that says nothing, as on another kernel, is None, or no limit.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as the largest page-aligned number


def host_total() -> int:
    """Bytes of memory that the host has, or that the control group may hold."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, group_limit() or total)


def host_available(*, swap: bool = False) -> int:
    """Bytes that may still be taken on the host by the control group; what the kernel can drop of files counts.

    Args:
        swap: those that lie on a disk count too.
    """
    info = dict(_lines(Path("/proc/meminfo")))
    left = 1024 * sum(info.get(name, 0) for name in ("MemAvailable:", "SwapFree:")[: 1 + swap])
    group = group_available()
    return left if group is None else min(left, group)


def resident_bytes(pids: Iterable[int]) -> int:
    """Bytes of memory that processes hold, without those of files."""
    found = (dict(_lines(f"/proc/{pid}/status")) for pid in pids)
    return 1024 * sum(each.get("RssAnon:", 0) + each.get("RssShmem:", 0) for each in found)


def peak_resident() -> int | None:
    """The most bytes of memory that this process has held so far, without those of files; None: nobody tells."""
    found = dict(_lines("/proc/self/status"))
    highest = found.get("VmHWM:", 0) - found.get("RssFile:", 0)
    return 1024 * highest if highest > 0 else None


def limit_growth(num_bytes: int) -> None:
    """What would make this process take more from now on fails, before the kernel looks for somebody to kill."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    data = int(text("/proc/self/statm").split()[5]) * resource.getpagesize()
    limits = [limit for limit in (soft, data + num_bytes) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


def group_limit() -> int | None:
    """Bytes of memory that the control group may hold: the tightest limit up to the root."""
    limits = [number(folder / "memory.max") for folder in group_folders("")]
    limits += [number(folder / "memory.limit_in_bytes") for folder in group_folders("memory")]
    return min(
        (limit for limit in limits if limit is not None and limit < _UNLIMITED), default=None
    )


def group_available() -> int | None:
    """Bytes that the control group may still take, what the kernel can drop of its files counted as free."""
    found = []
    for controller, limit_name, used_name in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in group_folders(controller):
            limit, used = number(folder / limit_name), number(folder / used_name)
            if limit is not None and used is not None and limit < _UNLIMITED:
                droppable = sum(
                    value
                    for name, value in _lines(folder / "memory.stat")
                    if name in ("inactive_file", "active_file")
                )
                found.append(max(0, limit - max(0, used - droppable)))
    return min(found, default=None)


def oom_kills() -> int | None:
    """Processes of the control group that the kernel killed because memory ran out, so far."""
    for path in [
        *(folder / "memory.events" for folder in group_folders("")),
        *(folder / "memory.oom_control" for folder in group_folders("memory")),
        Path("/proc/vmstat"),  # no group keeps a count: the whole host's
    ]:
        for name, value in _lines(path):
            if name == "oom_kill":
                return value
    return None


# Files of control groups, version 2 or 1


def group_folders(controller: str) -> list[Path]:
    """The folders of this process's control group under `controller` ("" is version 2), innermost first."""
    mount = _GROUPS / controller if controller else _GROUPS
    for line in text(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if (controller in names.split(",")) if controller else names == "":
            inner = mount / path.lstrip("/")
            # A container often sees its own group mounted as the root, under a path that only the host knows.
            start = inner if inner.is_dir() else mount
            return [start, *(parent for parent in start.parents if parent.is_relative_to(mount))]
    return []


def text(path: Path | str) -> str:
    """What a file says; "" where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The number that a file says."""
    found = text(path).strip()
    return int(found) if found.lstrip("-").isdigit() else None


def _lines(path: Path | str) -> Iterator[tuple[str, int]]:
    """The lines of a file that are a name and a number."""
    for line in text(path).splitlines():
        with suppress(ValueError):
            name, value = line.split()[:2]
            yield name, int(value)
