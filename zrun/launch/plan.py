"""Where each rank of a job sits, and what `auto` means on this machine: `make_plan(job, probe_host())`.

`probe_host` looks, and never fails; `make_plan` is pure, so that a plan for another machine is one `HostFacts` away.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from zrun.launch import cgroup
from zrun_core.config import JobConfig
from zrun_core.errors import PreflightError
from zrun_core.sizes import format_size
from zrun_core.spec import BatchPlan, LaunchPlan, RankPlace, resolve_batch


@dataclass(frozen=True)
class Gpu:
    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class HostFacts:
    """What one machine offers to a job."""

    hostname: str
    cores: int  # usable: CPU affinity, cut by the control group's quota
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()  # those that CUDA_VISIBLE_DEVICES leaves, in its order

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        gpus = f"{len(self.gpus)} x {self.gpus[0].name}" if self.gpus else "no GPU"
        return f"{self.hostname}: {cores}, {format_size(self.memory_bytes)}, {gpus}"


@dataclass(frozen=True)
class Reason:
    """A key that the job left open, the value it got, and why."""

    key: str
    value: str
    why: str


@dataclass(frozen=True)
class Resolved:
    plan: LaunchPlan
    batch: BatchPlan
    reasons: tuple[Reason, ...]


def make_plan(job: JobConfig, host: HostFacts) -> Resolved:
    """Seat the ranks of `job` on `host` and fill in what it leaves to auto.

    Raises:
        PreflightError: the host lacks the GPUs that the job asks for.
        JobError: the batch does not divide over the ranks.
    """
    reasons: list[Reason] = []
    device = _device(job, host, reasons)
    slots = _slots(job, host, device, reasons)
    batch = _batch(job, slots, reasons)
    ranks = [
        RankPlace(rank=rank, host=host.hostname, local_rank=rank, device=f"cuda:{rank}" if device == "cuda" else "cpu")
        for rank in range(slots)
    ]
    plan = LaunchPlan(ranks=ranks, threads=_threads(job, host, slots, reasons))
    return Resolved(plan, batch, tuple(reasons))


def _device(job: JobConfig, host: HostFacts, reasons: list[Reason]) -> str:
    if job.device == "cuda" and not host.gpus:
        raise PreflightError(f"device: cuda, but {host.hostname} has no usable NVIDIA GPU: write device: cpu or auto")
    if job.device != "auto":
        return job.device
    device = "cuda" if host.gpus else "cpu"
    reasons.append(Reason("device", device, str(host)))
    return device


def _slots(job: JobConfig, host: HostFacts, device: str, reasons: list[Reason]) -> int:
    num_gpus = len(host.gpus)
    if job.slots == "auto":
        slots = num_gpus if device == "cuda" else 1
        why = (
            f"one rank per GPU of {host.hostname}" if device == "cuda" else "one rank on a CPU; ask for more by number"
        )
        reasons.append(Reason("slots", str(slots), why))
        return slots
    if device == "cuda" and job.slots > num_gpus:
        raise PreflightError(
            f"more ranks than slots: slots: {job.slots}, but {host.hostname} has {num_gpus} "
            f"GPU{'s' if num_gpus > 1 else ''}: write slots: {num_gpus} or device: cpu"
        )
    return job.slots


def _batch(job: JobConfig, slots: int, reasons: list[Reason]) -> BatchPlan:
    batch = resolve_batch(job, slots)
    if job.batch.global_ == "auto":
        reasons.append(Reason("batch.global", str(batch.global_size), f"micro {batch.micro} x {slots} ranks"))
    if job.batch.micro == "auto":
        reasons.append(
            Reason("batch.micro", str(batch.micro), f"global {batch.global_size} / {slots} ranks, no accumulation")
        )
    return batch


def _threads(job: JobConfig, host: HostFacts, slots: int, reasons: list[Reason]) -> int:
    threads = max(1, host.cores // slots) if job.threads == "auto" else job.threads
    crowded = f": {slots * threads} threads share {host.cores} cores, which is slow" * (slots * threads > host.cores)
    if job.threads == "auto":
        reasons.append(Reason("threads", str(threads), f"{host.cores} usable cores / {slots} ranks{crowded}"))
    elif crowded:
        reasons.append(Reason("threads", str(threads), f"as written{crowded}"))
    return threads


def probe_host() -> HostFacts:
    """What this machine offers. Reads only; takes a few milliseconds without a GPU."""
    affinity = len(os.sched_getaffinity(0))
    quota = cgroup.cpu_quota()
    cores = affinity if quota is None else max(1, min(affinity, int(quota)))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min(total, cgroup.memory_limit() or total)
    return HostFacts(
        socket.gethostname(), cores, memory, _visible(_nvml_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    )


def _nvml_gpus() -> tuple[Gpu, ...]:
    """The host's GPUs in PCI order; none where NVML, its driver or a device fails."""
    import pynvml  # type: ignore[import-untyped]  # 50 ms that `zrun --help` must not pay

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                pynvml.nvmlDeviceGetUUID(handle),
                pynvml.nvmlDeviceGetName(handle),
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        )
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _visible(gpus: tuple[Gpu, ...], wanted: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects, by index or start of a UUID; like CUDA, up to the first miss."""
    if wanted is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in wanted.split(","):
        name = entry.strip()
        if name.isdigit():
            match = gpus[int(name)] if int(name) < len(gpus) else None
        else:
            match = next((gpu for gpu in gpus if name and gpu.uuid.startswith(name)), None)
        if match is None:
            break
        chosen.append(match)
    return tuple(chosen)
