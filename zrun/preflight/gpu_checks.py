"""Checks of a host's GPUs against what the job needs. Pure: from what is known to sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zrun.hosts.cluster import listed
from zrun.hosts.probe import GpuState, HostReport, Software
from zrun.topology.boards import POWER_CAP
from zrun_core.sizes import format_size, several

_BUSY = 0.1  # share of a GPU's memory that others may hold
# By the major version of CUDA: NVIDIA's oldest driver, and torch's index of wheels.
_LEAST_DRIVER = {12: 525, 13: 580}
_INDEXES = {12: "cu126", 13: "cu130"}


@dataclass(frozen=True)
class _Tools:
    """Commands of a vendor that reset a GPU, and that show its links."""

    reset: str
    links: str


_NVIDIA = _Tools("nvidia-smi --gpu-reset", "nvidia-smi nvlink --status")
_AMD = _Tools("amd-smi reset --gpureset", "amd-smi xgmi")


def find_gpu_problems(report: HostReport, chosen: Sequence[int] | None) -> Iterator[str]:
    """Yield why the GPUs of a host cannot be used by a job that wants some.

    Args:
        chosen: numbers of the GPUs that are used; None: all of them.
    """
    facts = report.facts
    if not facts.gpus and facts.why_no_gpus:
        yield f"it has no usable GPU: {facts.why_no_gpus}"
    elif not facts.gpus:
        yield "it has no usable GPU, and no driver that answers"
    elif facts.misnamed is not None:
        yield facts.misnamed
    yield from _driver_problems(report)
    for number, state in _numbered(report):
        if chosen is not None and number not in chosen:
            continue
        used = state.total_bytes - state.free_bytes
        if state.foreign and used > _BUSY * state.total_bytes:
            pids = listed([str(pid) for pid in state.foreign])
            yield (
                f"GPU {number} is in use, {format_size(used)} of {format_size(state.total_bytes)} "
                f"are taken: end pid {pids}, or leave the GPU out"
            )
        if state.health.remap == "failed":
            yield (
                f"GPU {number} has damaged memory and no spare rows left to replace it with: "
                "leave it out, and have the GPU replaced"
            )


def _driver_problems(report: HostReport) -> Iterator[str]:
    """Yield why the driver does not serve torch's CUDA.

    One of the same major version does, whatever the minor one: CUDA calls it minor version
    compatibility.
    """
    software, driver = report.software, report.driver
    needed = re.match(r"CUDA (\d+)", software.torch_for or "")
    if needed is None or driver is None or driver.cuda[0] >= int(needed[1]):
        return
    least = _LEAST_DRIVER.get(int(needed[1]))
    advice = "update the driver" if least is None else f"update the driver to {least} or newer"
    if driver.cuda[0] in _INDEXES:
        advice += f", or {_install(software, _INDEXES[driver.cuda[0]])}"
    yield (
        f"its driver {driver.version} supports CUDA {driver.cuda[0]}.{driver.cuda[1]}, and torch "
        f"{software.torch} needs {software.torch_for}: {advice}"
    )


def _wheel_notes(report: HostReport) -> Iterator[str]:
    """Yield why torch computes on none of these GPUs, as far as its files say.

    Ranks ask torch itself, and say so in the end.
    """
    software, driver = report.software, report.driver
    target = software.torch_for
    are_rocm = any(gpu.is_rocm for gpu in report.facts.gpus)
    wanted = "ROCm" if are_rocm else "CUDA"
    if target is None or target.startswith(wanted):
        return
    advice = "install the wheel that https://pytorch.org/get-started names for its ROCm"
    if not are_rocm:
        newest = max(_INDEXES)
        major = newest if driver is None else driver.cuda[0]
        advice = _install(software, _INDEXES.get(major, _INDEXES[newest]))
    yield f"torch {software.torch} is a wheel for {target}, without {wanted}: {advice}"


def _install(software: Software, index: str) -> str:
    """Return the command that installs the same release of torch for other devices."""
    release = (software.torch or "").partition("+")[0]
    return (
        f"{software.executable} -m pip install --force-reinstall torch=={release} --index-url "
        f"https://download.pytorch.org/whl/{index} (or another one that "
        "https://pytorch.org/get-started names for its driver)"
    )


def find_gpu_notes(report: HostReport, *, is_wanted: bool) -> Iterator[str]:
    """Yield what is worth knowing of a host's GPUs, and stops nothing.

    Args:
        is_wanted: a job is to run on them, whose problems `find_gpu_problems` tells.
    """
    facts = report.facts
    if not is_wanted:
        yield from filter(None, (facts.misnamed, facts.hidden, facts.no_gpus))
    kinds = Counter(gpu.name for gpu in facts.gpus)
    if len(kinds) > 1:
        shown = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        yield f"its GPUs differ ({shown}): the ranks of a job, or of a stage, need the same kind"
    if facts.gpus:
        yield from _wheel_notes(report)
    most_links: Counter[str] = Counter()
    names = {gpu.uuid: gpu.name for gpu in facts.gpus}
    for state in report.gpus:
        name = names[state.uuid]
        most_links[name] = max(most_links[name], state.num_links or 0)
    tools = _AMD if any(gpu.is_rocm for gpu in facts.gpus) else _NVIDIA
    for number, state in _numbered(report):
        if state.foreign and not is_wanted:
            pids = listed([str(pid) for pid in state.foreign])
            yield f"GPU {number} is in use by pid {pids}"
        most = most_links[names[state.uuid]]
        for what in _ailments(state, most, tools, is_wanted=is_wanted):
            yield f"GPU {number} {what}"


def _numbered(report: HostReport) -> list[tuple[int, GpuState]]:
    numbers = {gpu.uuid: number for number, gpu in enumerate(report.facts.gpus)}
    return [(numbers[state.uuid], state) for state in report.gpus]


def _ailments(state: GpuState, most_links: int, tools: _Tools, *, is_wanted: bool) -> Iterator[str]:
    """Yield what ails a GPU, as the rest of a sentence about it."""
    health = state.health
    if health.remap == "failed" and not is_wanted:
        yield "has damaged memory and no spare rows left to replace it with: have the GPU replaced"
    if health.remap == "pending":
        yield f"has damaged memory, which a reset replaces ({tools.reset}, with no process on it)"
    if health.uncorrected:
        errors = several(health.uncorrected, "uncorrectable memory error")
        yield f"has had {errors} since its driver was loaded: look at dmesg"
    slowed = [why for why in health.slowed if why != POWER_CAP]  # usual for one at work
    if slowed:
        yield f"is slowed down{health.strain}: {slowed[0]}"
    if health.pcie_width and health.max_pcie_width and health.pcie_width < health.max_pcie_width:
        yield (
            f"uses {health.pcie_width} of {health.max_pcie_width} PCIe lanes, so copies to and "
            "from the host take longer: reseat the board, and check its riser"
        )
    if state.num_links and state.num_links < most_links:
        yield f"has {state.num_links} of {most_links} fast links up: see {tools.links}"
