"""Checks of a host against what the job needs. Pure: from what is known of it to sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zrun.hosts.cluster import listed
from zrun.hosts.offload_disk import SwapFolder, find_problem
from zrun.hosts.probe import HostReport, Software
from zrun.preflight.gpu_checks import find_gpu_notes, find_gpu_problems
from zrun_core.sizes import format_size
from zrun_core.spine.config import JobConfig


@dataclass(frozen=True)
class HostRequirements:
    """Requirements of a job that every host must meet.

    Attributes:
        job_dir: its Python files must be the same everywhere.
        shared: folders that must be one and the same on all hosts, and writable. Where one does not
            exist yet, the folder in which it would be made is looked at.
        must_share: else it is only noted where `shared` are other folders.
        free_bytes: in each of `shared`.
        cuda: ranks run on GPUs.
        chosen: numbers of the GPUs that are used, by host; all of them where it says nothing.
        nofile, nproc, shm_bytes: what the ranks of one host take of its limits.
        swap: on whose disk, of each host, states are to lie; None: none are.
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
    swap: SwapFolder | None = None


def requirements_of(
    job: JobConfig,
    job_dir: Path,
    shared: Sequence[Path],
    num_ranks: int,
    ranks_per_host: int,
    swap: SwapFolder | None,
) -> HostRequirements:
    """Return what a job needs of every host, as far as it is known before its model is built.

    Args:
        shared: folders in which ranks of several hosts write.
        num_ranks: of all hosts together.
        ranks_per_host: those of the host that has most.
        swap: as of `HostRequirements`.
    """
    cuda = job.device == "cuda"
    loaders = job.data.workers
    # NCCL's buffers between GPUs of a host, and batches on their way from loader processes.
    shm_bytes = loaders * (16 << 20)
    if cuda:
        shm_bytes += 32 << 20
    return HostRequirements(
        job_dir=job_dir,
        shared=tuple(shared),
        cuda=cuda,
        # Connections to every rank in several groups; pipes to loaders.
        nofile=256 + 8 * num_ranks + 16 * loaders,
        nproc=ranks_per_host * (64 + 4 * loaders),
        shm_bytes=ranks_per_host * shm_bytes,
        swap=swap,
    )


def find_problems(
    report: HostReport,
    here: Software,
    code: Mapping[str, str] | None,
    needs: HostRequirements,
    host: str,
) -> Iterator[str]:
    """Yield why a host cannot be used, in the order in which one would set it right.

    Args:
        here: the software of this host.
        code: digests of the job's Python files here, as `job_code` gives them.
        host: what messages call the host.
    """
    yield from _check_software(report.software, here)
    yield from _check_code(report, code, needs, host)
    yield from _check_folders(report, needs)
    if report.facts.disk is not None and (problem := find_problem(report.facts.disk)) is not None:
        yield problem
    if needs.cuda:
        yield from find_gpu_problems(report, needs.chosen.get(host))
    yield from _check_limits(report, needs)


def _check_software(there: Software, here: Software) -> Iterator[str]:
    if there.python.split(".")[:2] != here.python.split(".")[:2]:
        yield (
            f"Python {there.python} there, {here.python} here: name one that is the same "
            "everywhere in launch.python"
        )
    if there.zrun_code != here.zrun_code:
        other = "its zrun has different code"
        if there.zrun != here.zrun:
            other = f"zrun {there.zrun} there, {here.zrun} here"
        yield f"{other}: install the same version for {there.executable}"
    if there.torch is None:
        yield f"{there.executable} has no torch: install {here.torch} there"
    elif there.torch != here.torch:
        yield (
            f"torch {there.torch} there, {here.torch} here: install the same version for "
            f"{there.executable}"
        )
    elif there.torch_for != here.torch_for and None not in (there.torch_for, here.torch_for):
        # of one version, from two indexes
        yield (
            f"torch {there.torch} for {there.torch_for} there, for {here.torch_for} here: install "
            f"the same build for {there.executable}"
        )


def _check_code(
    report: HostReport, code: Mapping[str, str] | None, needs: HostRequirements, host: str
) -> Iterator[str]:
    if needs.job_dir is None or report.code == code:
        return
    copy = f"share it, or copy it: rsync -a {needs.job_dir}/ {host}:{needs.job_dir}/"
    if report.code is None:
        yield f"the job's folder {needs.job_dir} is not there: {copy}"
        return
    ours = code or {}
    names = sorted(ours.keys() | report.code.keys())
    differ = [name for name in names if ours.get(name) != report.code.get(name)]
    yield f"the job's code differs in {listed(differ)}: {copy}"


def _check_folders(report: HostReport, needs: HostRequirements) -> Iterator[str]:
    for folder in report.folders:
        if not folder.same and not needs.must_share:
            continue
        if not folder.same:
            yield (
                f"{folder.path} is another folder there than here: put it on a file system that "
                "all hosts share"
            )
        elif folder.trouble is not None:
            yield f"{folder.path}: nothing can be written there as {report.user}: {folder.trouble}"
        elif folder.free_bytes is not None and folder.free_bytes < needs.free_bytes:
            yield (
                f"{folder.path}: {format_size(folder.free_bytes)} free, "
                f"{format_size(needs.free_bytes)} needed"
            )


def _check_limits(report: HostReport, needs: HostRequirements) -> Iterator[str]:
    limits = report.limits
    files = "in /etc/security/limits.conf there, or in the unit of its sshd"
    if limits.nofile is not None and limits.nofile < needs.nofile:
        yield (
            f"ulimit -n (open files) is {limits.nofile}, {needs.nofile} are needed: raise nofile "
            f"{files}"
        )
    if limits.nproc is not None and limits.nproc < needs.nproc:
        yield (
            f"ulimit -u (threads of a user) is {limits.nproc}, {needs.nproc} are needed: raise "
            f"nproc {files}"
        )
    locked = limits.memlock_bytes
    if needs.cuda and report.infiniband and locked is not None and locked < 1 << 30:
        yield (
            f"ulimit -l (locked memory) is {format_size(locked)}, and InfiniBand locks what it "
            f"sends: set memlock unlimited {files}"
        )
    free = limits.shm_free_bytes
    if needs.shm_bytes and (free is None or free < needs.shm_bytes):
        what = "there is no /dev/shm"
        if free is not None:
            what = f"/dev/shm has {format_size(free)} free"
        wanted = format_size(needs.shm_bytes)
        megabytes = -(-needs.shm_bytes >> 20)
        yield (
            f"{what}, {wanted} are needed: mount -o remount,size={megabytes}M /dev/shm, or "
            f"--shm-size={megabytes}m for a container"
        )


def find_notes(report: HostReport, here: Software, needs: HostRequirements) -> Iterator[str]:
    """Yield what is worth knowing of a host, and stops nothing.

    Args:
        here: the software of this host.
    """
    yield from report.facts.problems
    if abs(report.skew_s) > 1.0 + report.skew_error_s:
        yield (
            f"its clock is {report.skew_s:+.1f} s off; nothing depends on it but the times in logs"
        )
    for folder in report.folders:
        if not folder.same and not needs.must_share:
            yield (
                f"{folder.path} is another folder there: runs and checkpoints need one that all "
                "hosts share"
            )
    if report.software.python != here.python:
        yield f"Python {report.software.python} there, {here.python} here"
    yield from find_gpu_notes(report, is_wanted=needs.cuda)
