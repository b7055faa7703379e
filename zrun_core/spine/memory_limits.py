"""Memory of the host, of this process's control group, and of processes, in bytes.

What cannot be read, as on another kernel, is None, or no limit.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
# Of Python, torch and zrun, which ranks of a host on its cores have from one process that imported
# them: what they write to they copy, and 140 of 171 MiB were still common to two after some steps.
SHARED_BY_RANKS = 120 << 20
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as the largest page-aligned number


def host_total() -> int:
    """Return the memory that the host has, or that the control group may hold."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, group_limit() or total)


def host_available(*, swap: bool = False) -> int:
    """Return the memory that the control group may still take on the host.

    What the kernel can drop of files counts as available.

    Args:
        swap: free swap space counts too.
    """
    info = dict(_lines(Path("/proc/meminfo")))
    available_kib = info.get("MemAvailable:", 0)
    if swap:
        available_kib += info.get("SwapFree:", 0)
    available = 1024 * available_kib
    group = group_available()
    return available if group is None else min(available, group)


def share_of_rank(host_bytes: int, ranks: int) -> int:
    """Return what each of a host's ranks may hold on its cores, so that they together hold no more.

    What they share counts once for the host, and is a part of what each of them holds.
    """
    return (host_bytes + (ranks - 1) * SHARED_BY_RANKS) // ranks


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the memory that processes hold, without that of files."""
    found = (dict(_lines(f"/proc/{pid}/status")) for pid in pids)
    return 1024 * sum(each.get("RssAnon:", 0) + each.get("RssShmem:", 0) for each in found)


def held_together(pids: Iterable[int]) -> int:
    """Return the memory that processes hold together, what they share counted once.

    The kernel walks through their pages for it, while they wait: it is not for every look.
    """
    found = (dict(_lines(f"/proc/{pid}/smaps_rollup")) for pid in pids)
    return 1024 * sum(each.get("Pss_Anon:", 0) + each.get("Pss_Shmem:", 0) for each in found)


def peak_resident() -> int | None:
    """Return the most memory that this process has held so far, without that of files."""
    found = dict(_lines("/proc/self/status"))
    peak_kib = found.get("VmHWM:", 0) - found.get("RssFile:", 0)
    return 1024 * peak_kib if peak_kib > 0 else None


def process_available() -> int | None:
    """Return the memory that this process may still allocate (`ulimit -d`); None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - _data_bytes())


def _data_bytes() -> int:
    return int(text("/proc/self/statm").split()[5]) * resource.getpagesize()


def limit_growth(num_bytes: int) -> None:
    """Let allocations of this process fail beyond `num_bytes` more.

    They would otherwise succeed, until the kernel kills a process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _data_bytes() + num_bytes
    limits = [limit for limit in (soft, most) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


def group_limit() -> int | None:
    """Return the memory that the control group may hold: the tightest limit up to the root."""
    limits = [number(folder / "memory.max") for folder in group_folders("")]
    limits += [number(folder / "memory.limit_in_bytes") for folder in group_folders("memory")]
    real = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    return min(real, default=None)


def group_available() -> int | None:
    """Return the memory that the control group may still take.

    What the kernel can drop of the group's files counts as free.
    """
    found = []
    for controller, limit_name, used_name in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in group_folders(controller):
            limit = number(folder / limit_name)
            used = number(folder / used_name)
            if limit is None or used is None or limit >= _UNLIMITED:
                continue
            stat = dict(_lines(folder / "memory.stat"))
            droppable = stat.get("inactive_file", 0) + stat.get("active_file", 0)
            held = max(0, used - droppable)
            found.append(max(0, limit - held))
    return min(found, default=None)


def oom_kills() -> int | None:
    """Return how many processes of the control group the kernel has killed for want of memory."""
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
    """Return the folders of this process's control group, innermost first.

    Args:
        controller: of version 1, such as "memory"; "" is version 2.
    """
    mount = _GROUPS / controller if controller else _GROUPS
    for line in text(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        is_asked = controller in names.split(",")  # version 2 has no names: [""]
        if not is_asked:
            continue
        inner = mount / path.lstrip("/")
        # A container often sees its own group mounted as the root, under a path that only the host
        # knows.
        start = inner if inner.is_dir() else mount
        return [start, *(parent for parent in start.parents if parent.is_relative_to(mount))]
    return []


def text(path: Path | str) -> str:
    """Return the text of a file; "" where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """Return the number that a file holds."""
    found = text(path).strip()
    return int(found) if found.lstrip("-").isdigit() else None


def _lines(path: Path | str) -> Iterator[tuple[str, int]]:
    """Yield the lines of a file that are a name and a number."""
    for line in text(path).splitlines():
        with suppress(ValueError):
            name, value = line.split()[:2]
            yield name, int(value)
