"""CPU limits of this process's control group, version 2 or 1."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from zrun.topology.cpus import parse_cpus
from zrun_core.spine.memory_limits import group_folders, number, text


def cpu_quota() -> float | None:
    """Return the cores' worth of CPU time that the group may use; None: no limit."""
    for folder in group_folders(""):
        quota, _, period = text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            return int(quota) / int(period)
    for folder in group_folders("cpu"):
        limit = number(folder / "cpu.cfs_quota_us")
        interval = number(folder / "cpu.cfs_period_us")
        if limit is not None and interval and limit > 0:
            return limit / interval
    return None


def cpuset() -> set[int] | None:
    """Return the CPUs that the group lets its processes run on; None: not known."""
    paths = [folder / "cpuset.cpus.effective" for folder in group_folders("")]
    paths += [folder / "cpuset.effective_cpus" for folder in group_folders("cpuset")]
    for path in [*paths, Path("/sys/devices/system/cpu/online")]:
        if found := text(path).strip():
            with suppress(ValueError):
                return set(parse_cpus(found))
    return None
