"""Check and explain the batch of a pipeline, once the ranks and their micro-batches are known."""

from __future__ import annotations

from collections.abc import Iterator

from zrun_core.errors import JobError
from zrun_core.sizes import several
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import BatchPlan

_SMALL_BUBBLE = 0.2


def check_micro_batches(job: JobConfig, batch: BatchPlan) -> None:
    """Refuse steps of several micro-batches where each micro-batch is a step.

    Raises:
        JobError: PipeDream has such a batch.
    """
    if not job.parallel.facts.updates_each or batch.accumulation == 1:
        return
    of_one = batch.micro * batch.ranks
    raise JobError(
        f"parallel.schedule: {job.parallel.schedule} updates after each micro-batch, of micro "
        f"{batch.micro} x {batch.ranks} data-parallel ranks = {of_one} samples, and batch.global "
        f"is {batch.global_size}: write global: {of_one}, or micro: "
        f"{batch.micro * batch.accumulation}"
    )


def notes_on_bubble(job: JobConfig, batch: BatchPlan) -> Iterator[str]:
    """Say how long stages wait where a step has fewer micro-batches than the pipeline stages."""
    from zrun_core.pipeline.grid import bubble

    parallel = job.parallel
    count = batch.accumulation
    if count >= parallel.pp or parallel.facts.updates_each:
        return

    def share(micro_batches: int) -> float:
        return bubble(parallel.schedule, parallel.pp, parallel.virtual, micro_batches)

    rounds = next(n for n in range(1, 5) if share(n * parallel.pp) < _SMALL_BUBBLE)
    enough = rounds * parallel.pp
    micro_batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    yield (
        f"parallel.pp: {micro_batches} per step for {parallel.pp} stages: each waits "
        f"{share(count):.0%} of the time; batch.global: "
        f"{enough * batch.micro * batch.ranks} ({enough} micro-batches of {batch.micro} x "
        f"{batch.ranks} data-parallel ranks) would make it {share(enough):.0%}"
    )


def notes_on_late_weights(job: JobConfig, batch: BatchPlan) -> Iterator[str]:
    """Say what PipeDream changes in the numbers of a job, and what it keeps."""
    schedule, pp = job.parallel.schedule, job.parallel.pp
    if not job.parallel.facts.updates_each:
        return
    keeps = f"stage 0 keeps {pp} versions of its weights, and the last one 1"
    if job.parallel.facts.keeps_version:
        keeps = f"every stage keeps {pp} versions of its weights"
    yield (
        f"parallel.schedule: {schedule} changes numerics: each micro-batch of "
        f"{batch.global_size} samples is a step, with gradients up to "
        f"{several(pp - 1, 'update')} late; {keeps}"
    )
