"""Check and explain what updates by gradients of older parameters: an asynchronous server."""

from __future__ import annotations

from collections.abc import Iterator

from zrun_core.errors import JobError
from zrun_core.sizes import several
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import BatchPlan


def check_device(job: JobConfig, device: str) -> None:
    """Refuse an asynchronous server on GPUs.

    Raises:
        JobError: it is so.
    """
    if job.sync == "async_server" and device != "cpu":
        raise JobError(
            "sync: async_server trains on CPUs, and this host has GPUs: its server updates in "
            "threads beside the one that computes; write device: cpu, or sync: server"
        )


def notes_on_late_gradients(job: JobConfig, batch: BatchPlan) -> Iterator[str]:
    """Say what an asynchronous server changes in the numbers of a job, and what it keeps."""
    if job.sync != "async_server":
        return
    if job.staleness == 0:
        yield (
            "sync: async_server with staleness 0 has the numbers of sync: server: all ranks wait "
            "for each other after each step"
        )
        return
    ahead = "any number of pushes until all meet, after 32 steps at most"
    if job.staleness != "any":
        ahead = f"up to {job.staleness} of its pushes"
    share = batch.global_size // batch.ranks
    yield (
        f"sync: async_server changes numerics: each push of {several(share, 'sample')} is an "
        f"update of 1/{batch.ranks} of the learning rate, by a gradient that may be late, of a "
        f"rank that may be ahead of the slowest by {ahead}; only rank 0 has optimizer states"
    )
