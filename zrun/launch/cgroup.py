"""Limits and counters of this process's control group, version 2 or 1. Every read returns a value or None."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from zrun.topology.cpus import parse_cpus

_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as the largest page-aligned number


def cpu_quota() -> float | None:
    """Cores' worth of CPU time that the group may use."""
    for folder in _folders(""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            return int(quota) / int(period)
    for folder in _folders("cpu"):
        limit, interval = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if limit is not None and interval and limit > 0:
            return limit / interval
    return None


def memory_limit() -> int | None:
    """Bytes of memory that the group may hold: the tightest limit up to the root."""
    limits = [_number(folder / "memory.max") for folder in _folders("")]
    limits += [_number(folder / "memory.limit_in_bytes") for folder in _folders("memory")]
    return min((limit for limit in limits if limit is not None and limit < _UNLIMITED), default=None)


def memory_left() -> int | None:
    """Bytes that the group may still take, what the kernel can drop of its files counted as free."""
    found = []
    for controller, limit_name, used_name in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in _folders(controller):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None and limit < _UNLIMITED:
                lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
                droppable = sum(int(line[1]) for line in lines if line[0] in ("inactive_file", "active_file"))
                found.append(max(0, limit - max(0, used - droppable)))
    return min(found, default=None)


def cpuset() -> set[int] | None:
    """The CPUs that a process of the group may run on unless it narrows them down itself."""
    paths = [folder / "cpuset.cpus.effective" for folder in _folders("")]
    paths += [folder / "cpuset.effective_cpus" for folder in _folders("cpuset")]
    for path in [*paths, Path("/sys/devices/system/cpu/online")]:
        if text := _text(path).strip():
            with suppress(ValueError):
                return set(parse_cpus(text))
    return None


def oom_kills() -> int | None:
    """Processes of the group that the kernel killed because memory ran out, so far."""
    for path in [
        *(folder / "memory.events" for folder in _folders("")),
        *(folder / "memory.oom_control" for folder in _folders("memory")),
        Path("/proc/vmstat"),  # no group keeps a count: the whole host's
    ]:
        for line in _text(path).splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.isdigit():
                return int(value)
    return None


def _folders(controller: str) -> list[Path]:
    """The group's folders under `controller` ("" is version 2), innermost first."""
    mount = _ROOT / controller if controller else _ROOT
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if (controller in names.split(",")) if controller else names == "":
            inner = mount / path.lstrip("/")
            # A container often sees its own group mounted as the root, under a path that only the host knows.
            start = inner if inner.is_dir() else mount
            return [start, *(parent for parent in start.parents if parent.is_relative_to(mount))]
    return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None
