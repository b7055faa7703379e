"""Running out of memory.

Recognised, told with its holders, and what a job file can say about it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from zrun_core.distributed.comm import Comm
from zrun_core.distributed.mesh import Mesh
from zrun_core.errors import OutOfMemoryError, PreflightError, UserCodeError
from zrun_core.guards import oom
from zrun_core.optim.resolve import resolve_optimizer
from zrun_core.spine.config import JobConfig
from zrun_core.spine.spec import BatchPlan
from zrun_core.train.parallelize import make_settings
from zrun_core.user_code.user import is_out_of_memory, user_code
from zrun_core.zero.wrap.sharding_config import check_model_fits

BASE = {"name": "j", "model": "m:f", "data": "m:f", "steps": 9, "batch": 4}


def test_what_says_that_there_is_no_memory():
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ):
        assert is_out_of_memory(error)
    with (
        pytest.raises(
            OutOfMemoryError, match=r"backward failed at .*torch.empty.*: out of memory: .*allocate"
        ),
        user_code("backward failed"),
    ):
        torch.empty(1 << 50)
    with (
        pytest.raises(OutOfMemoryError, match=r"forward failed at .*: out of memory: MemoryError"),
        user_code("forward failed"),
    ):
        raise MemoryError
    with pytest.raises(UserCodeError), user_code("forward failed"):
        raise RuntimeError("size mismatch")


def job(**keys: Any) -> JobConfig:
    return JobConfig.model_validate(BASE | keys)


def test_dropping_a_batch_is_refused_where_peers_wait_for_parameters():
    for stage in range(3):
        job(zero=stage, guards={"on_oom": "skip"})
    job(zero=3)
    with pytest.raises(
        ValidationError, match=r"guards.on_oom: skip is impossible at zero.stage 3.*zero.stage: 2"
    ):
        job(zero=3, guards={"on_oom": "skip"})


def test_changes_are_only_what_the_job_does_not_do_yet():
    batch = BatchPlan(global_size=16, micro=8, accumulation=1, ranks=2)
    held = {"activations": 100, "grads": 10, "optim": 7}
    found = oom.changes(job(zero=1), batch, held)
    assert [(each.key, each.value, each.saves) for each in found] == [
        ("batch.micro", "4", 50),
        ("activations.checkpoint", "full", None),
        ("zero.stage", "2", 5),
        ("precision", "bf16", 50),
    ]
    assert str(found[0]) == (
        "batch.micro: 4  # activations halve, the result stays, about 50 B less here"
    )
    small = BatchPlan(global_size=2, micro=1, accumulation=1, ranks=2)
    recomputed = job(zero=3, precision="bf16", activations={"checkpoint": "full"})
    assert oom.changes(recomputed, small, held) == []


def test_a_rank_whose_process_has_taken_all_is_told_so() -> None:
    """Not that it has less than nothing."""
    job = JobConfig.model_validate(BASE)
    chosen = resolve_optimizer(job.optim, lambda name: None, torch.device("cpu"))
    settings = replace(make_settings(job, chosen, torch.device("cpu")), memory_bytes=-107 << 20)
    alone = Mesh.build(0, ["host"], 1)
    with pytest.raises(
        PreflightError, match="has nothing left beside Python and torch: zrun estimate"
    ):
        check_model_fits(torch.nn.Linear(4, 4), settings, alone, Comm(torch.device("cpu")))
