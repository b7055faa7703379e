"""Is a host what the job needs? Pure: from what is known of it to sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zrun.hosts.cluster import listed
from zrun.hosts.probe import HostReport, Software
from zrun_core.spine.config import JobConfig
from zrun_core.spine.sizes import format_size

_BUSY = 0.1  # share of a GPU's memory that others may hold


@dataclass(frozen=True)
class HostRequirements:
    """What a job needs of every host.

    Attributes:
        job_dir: its Python files must be the same everywhere.
        shared: folders that must be one and the same on all hosts, and writable. Where one is not there yet, the folder
            is looked at in which it would be made.
        must_share: else it is only said where `shared` are other folders.
        free_bytes: in each of `shared`.
        cuda: ranks run on GPUs.
        chosen: numbers of the GPUs that are used, by host; all of them where it says nothing.
        nofile, nproc, shm_bytes: what the ranks of one host take of its limits.
    """

    job_dir: Path | None = None
    shared: tuple[Path, ...] = ()
    must_share: bool = True
    free_bytes: int = 0
    cuda: bool = False
    chosen: Mapping[str, Sequence[int]] = field(default_factory=dict)
    nofile: int = 256
    nproc: int = 0
    shm_bytes: int = 0


def requirements_of(
    job: JobConfig, job_dir: Path, shared: Sequence[Path], num_ranks: int, ranks_per_host: int
) -> HostRequirements:
    """What a job needs of every host, as far as it can be told before its model is built.

    Args:
        shared: folders in which ranks of several hosts write.
    """
    cuda, loaders = job.device == "cuda", job.data.workers
    return HostRequirements(
        job_dir=job_dir,
        shared=tuple(shared),
        cuda=cuda,
        nofile=256
        + 8 * num_ranks
        + 16 * loaders,  # connections to every rank in several groups; pipes to loaders
        nproc=ranks_per_host * (64 + 4 * loaders),
        # NCCL's buffers between GPUs of a host, and batches on their way from loader processes.
        shm_bytes=ranks_per_host * ((32 << 20) * cuda + (16 << 20) * loaders),
    )


def find_problems(
    report: HostReport,
    here: Software,
    code: Mapping[str, str] | None,
    needs: HostRequirements,
    host: str,
) -> Iterator[str]:
    """Why a host cannot be used, in the order in which one would set it right."""
    yield from _judge_software(report.software, here)
    yield from _judge_code(report, code, needs, host)
    for folder in report.folders:
        if not folder.same:
            if not needs.must_share:
                continue
            yield f"{folder.path} is not the folder of that name here: it must be on a file system that all hosts share"
        elif folder.trouble is not None:
            yield f"{folder.path}: nothing can be written there as {report.user}: {folder.trouble}"
        elif folder.free_bytes is not None and folder.free_bytes < needs.free_bytes:
            yield f"{folder.path}: {format_size(folder.free_bytes)} free, {format_size(needs.free_bytes)} needed"
    if needs.cuda:
        yield from _judge_gpus(report, needs.chosen.get(host))
    yield from _judge_limits(report, needs)


def _judge_software(there: Software, here: Software) -> Iterator[str]:
    if there.python.split(".")[:2] != here.python.split(".")[:2]:
        yield f"Python {there.python} there, {here.python} here: name one that is the same everywhere in launch.python"
    if there.zrun_code != here.zrun_code:
        other = (
            f"zrun {there.zrun} there, {here.zrun} here"
            if there.zrun != here.zrun
            else "its zrun has other code"
        )
        yield f"{other}: install the same version for {there.executable}"
    if there.torch is None:
        yield f"{there.executable} has no torch: install {here.torch} there"
    elif there.torch != here.torch:
        yield f"torch {there.torch} there, {here.torch} here: install the same version for {there.executable}"


def _judge_code(
    report: HostReport, code: Mapping[str, str] | None, needs: HostRequirements, host: str
) -> Iterator[str]:
    if needs.job_dir is None or report.code == code:
        return
    copy = f"share it, or copy it: rsync -a {needs.job_dir}/ {host}:{needs.job_dir}/"
    if report.code is None:
        yield f"the job's folder {needs.job_dir} is not there: {copy}"
        return
    ours = code or {}
    differ = sorted(
        name for name in ours.keys() | report.code.keys() if ours.get(name) != report.code.get(name)
    )
    yield f"the job's code differs in {listed(differ)}: {copy}"


def _judge_gpus(report: HostReport, chosen: Sequence[int] | None) -> Iterator[str]:
    if not report.facts.gpus:
        yield "it has no usable NVIDIA GPU" + (
            "" if report.driver else ", and no driver that answers"
        )
    wheel = re.search(r"\+cu(\d+)\d$", report.software.torch or "")
    if wheel is not None and report.driver is not None and report.driver.cuda[0] < int(wheel[1]):
        serves = ".".join(map(str, report.driver.cuda))
        yield (
            f"its driver {report.driver.version} serves CUDA {serves}, and torch {report.software.torch} needs "
            f"{wheel[1]}: update the driver, or install a torch for an older CUDA"
        )
    numbers = {gpu.uuid: number for number, gpu in enumerate(report.facts.gpus)}
    for state in report.gpus:
        number, used = numbers[state.uuid], state.total_bytes - state.free_bytes
        if (
            (chosen is None or number in chosen)
            and state.foreign
            and used > _BUSY * state.total_bytes
        ):
            pids = listed([str(pid) for pid in state.foreign])
            yield (
                f"GPU {number} is in use, {format_size(used)} of {format_size(state.total_bytes)} are taken: end pid "
                f"{pids}, or leave the GPU out"
            )


def _judge_limits(report: HostReport, needs: HostRequirements) -> Iterator[str]:
    limits = report.limits
    files = "in /etc/security/limits.conf there, or in the unit of its sshd"
    if limits.nofile is not None and limits.nofile < needs.nofile:
        yield f"ulimit -n (open files) is {limits.nofile}, {needs.nofile} are needed: raise nofile {files}"
    if limits.nproc is not None and limits.nproc < needs.nproc:
        yield f"ulimit -u (threads of a user) is {limits.nproc}, {needs.nproc} are needed: raise nproc {files}"
    if (
        needs.cuda
        and report.infiniband
        and limits.memlock_bytes is not None
        and limits.memlock_bytes < 1 << 30
    ):
        yield (
            f"ulimit -l (locked memory) is {format_size(limits.memlock_bytes)}, and InfiniBand locks what it sends: "
            f"set memlock unlimited {files}"
        )
    free = limits.shm_free_bytes
    if needs.shm_bytes and (free is None or free < needs.shm_bytes):
        what = "there is no /dev/shm" if free is None else f"/dev/shm has {format_size(free)} free"
        wanted = format_size(needs.shm_bytes)
        megabytes = -(-needs.shm_bytes >> 20)
        yield (
            f"{what}, {wanted} are needed: mount -o remount,size={megabytes}M /dev/shm, or --shm-size={megabytes}m for "
            "a container"
        )


def find_notes(report: HostReport, here: Software, needs: HostRequirements) -> Iterator[str]:
    """What is worth knowing, and stops nothing."""
    yield from report.facts.problems
    if abs(report.skew_s) > 1.0 + report.skew_error_s:
        yield f"its clock is {report.skew_s:+.1f} s off; nothing depends on it but the times in logs"
    for folder in report.folders:
        if not folder.same and not needs.must_share:
            yield f"{folder.path} is another folder there: runs and checkpoints need one that all hosts share"
    if report.software.python != here.python:
        yield f"Python {report.software.python} there, {here.python} here"
    numbers = {gpu.uuid: number for number, gpu in enumerate(report.facts.gpus)}
    for state in report.gpus:
        if state.foreign and not needs.cuda:
            yield f"GPU {numbers[state.uuid]} is in use by pid {listed([str(pid) for pid in state.foreign])}"
