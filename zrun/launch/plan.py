"""Where each rank of a job sits, and what `auto` means on this machine: `make_plan(job, probe_host())`.

`probe_host` looks, and never fails; `make_plan` is pure, so that a plan for another machine is one `HostFacts` away.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any, Literal

from zrun.launch import cgroup
from zrun_core.config import OWN_DEFAULTS, JobConfig
from zrun_core.errors import JobError, PreflightError
from zrun_core.sizes import format_size
from zrun_core.spec import BatchPlan, LaunchPlan, RankPlace, resolve_batch, resolve_bucket

_DECAYING = ("linear", "cosine", "polynomial", "wsd")


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
        gpus = f"{len(self.gpus)} x {self.gpus[0].name}" if self.gpus else "no GPU"
        return f"{self.hostname}: {_several(self.cores, 'core')}, {format_size(self.memory_bytes)}, {gpus}"


@dataclass(frozen=True)
class Reason:
    """A key that the job left open, the value it got, and why."""

    key: str
    value: str
    why: str


@dataclass(frozen=True)
class Resolved:
    job: JobConfig  # without any auto
    plan: LaunchPlan
    batch: BatchPlan
    reasons: tuple[Reason, ...]


def make_plan(job: JobConfig, host: HostFacts) -> Resolved:
    """Seat the ranks of `job` on `host` and fill in what it leaves to auto.

    Raises:
        PreflightError: the host lacks the GPUs that the job asks for.
        JobError: the batch or `zero.shard_group` does not divide over the ranks, or the learning rate has no end to
            decay to.
    """
    reasons: list[Reason] = []
    device = _device(job, host, reasons)
    slots = _slots(job, host, device, reasons)
    threads = _threads(job, host, slots, reasons)
    batch = _batch(job, slots, reasons)
    _check_shard_group(job, slots)
    ranks = [
        RankPlace(rank=rank, host=host.hostname, local_rank=rank, device=f"cuda:{rank}" if device == "cuda" else "cpu")
        for rank in range(slots)
    ]
    resolved = job.model_copy(
        update={
            "device": device,
            "slots": slots,
            "threads": threads,
            "batch": job.batch.model_copy(update={"global_": batch.global_size, "micro": batch.micro}),
            "zero": job.zero.model_copy(update={"bucket": _bucket(job, device, reasons)}),
            "lr": job.lr.model_copy(update={"decay_steps": _decay_steps(job, reasons)}),
            "optim": job.optim.model_copy(update=_own_defaults(job, reasons)),
        }
    )
    return Resolved(resolved, LaunchPlan(ranks=ranks, threads=threads), batch, tuple(reasons))


def _device(job: JobConfig, host: HostFacts, reasons: list[Reason]) -> Literal["cpu", "cuda"]:
    if job.device == "cuda" and not host.gpus:
        raise PreflightError(f"device: cuda, but {host.hostname} has no usable NVIDIA GPU: write device: cpu or auto")
    if job.device != "auto":
        return job.device
    reasons.append(Reason("device", "cuda" if host.gpus else "cpu", str(host)))
    return "cuda" if host.gpus else "cpu"


def _slots(job: JobConfig, host: HostFacts, device: str, reasons: list[Reason]) -> int:
    num_gpus = len(host.gpus)
    if job.slots == "auto":
        slots = num_gpus if device == "cuda" else 1
        why = f"one rank per GPU of {host.hostname}" if device == "cuda" else "one rank where there is no GPU"
        reasons.append(Reason("slots", str(slots), why))
        return slots
    if device == "cuda" and job.slots > num_gpus:
        raise PreflightError(
            f"more ranks than slots: slots: {job.slots}, but {host.hostname} has {_several(num_gpus, 'GPU')}: "
            f"write slots: {num_gpus} or device: cpu"
        )
    return job.slots


def _threads(job: JobConfig, host: HostFacts, slots: int, reasons: list[Reason]) -> int:
    threads = max(1, host.cores // slots) if job.threads == "auto" else job.threads
    why = "as written" if job.threads != "auto" else f"{host.cores} usable cores / {_several(slots, 'rank')}"
    if slots * threads > host.cores:
        why += f"; {slots * threads} threads share {_several(host.cores, 'core')}, which is slow"
    elif job.threads != "auto":
        return threads
    reasons.append(Reason("threads", str(threads), why))
    return threads


def _batch(job: JobConfig, slots: int, reasons: list[Reason]) -> BatchPlan:
    batch, ranks = resolve_batch(job, slots), _several(slots, "rank")
    if job.batch.global_ == "auto":
        reasons.append(Reason("batch.global", str(batch.global_size), f"micro {batch.micro} x {ranks}"))
    if job.batch.micro == "auto":
        why = f"global {batch.global_size} / {ranks}, no accumulation"
        reasons.append(Reason("batch.micro", str(batch.micro), why))
    return batch


def _check_shard_group(job: JobConfig, slots: int) -> None:
    group = job.zero.shard_group
    if isinstance(group, int) and job.zero.stage > 0 and slots % group:
        raise JobError(
            f"zero.shard_group: groups of {group} do not divide {_several(slots, 'rank')}: write a divisor, or all"
        )


def _bucket(job: JobConfig, device: str, reasons: list[Reason]) -> int:
    bucket = resolve_bucket(job.zero, device)
    if job.zero.bucket == "auto":
        reasons.append(Reason("zero.bucket", format_size(bucket), f"on {device}"))
    return bucket


def _decay_steps(job: JobConfig, reasons: list[Reason]) -> int | Literal["auto"]:
    """Left to auto where the schedule has no end, or an end that only the data knows."""
    from zrun_core.optim.lr import make_schedule

    if isinstance(job.lr.schedule, str):
        make_schedule(job.lr, job.steps)  # refuses a decay without an end
    if job.lr.decay_steps != "auto" or job.lr.schedule not in _DECAYING or job.steps is None:
        return job.lr.decay_steps
    is_tail = job.lr.schedule == "wsd"
    steps = max(1, job.steps // 5) if is_tail else job.steps
    reasons.append(Reason("lr.decay_steps", str(steps), "a fifth of the run" if is_tail else "the run's steps"))
    return steps


def _own_defaults(job: JobConfig, reasons: list[Reason]) -> dict[str, Any]:
    """Hyper-parameters that the job leaves to the optimizer."""
    name = job.optim.name.lower()
    found = {key: value for key, value in OWN_DEFAULTS.get(name, {}).items() if getattr(job.optim, key) is None}
    for key, value in found.items():
        shown = f"{value:g}" if isinstance(value, float) else str(list(value))
        reasons.append(Reason(f"optim.{key}", shown, f"{name}'s own"))
    return found


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


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
