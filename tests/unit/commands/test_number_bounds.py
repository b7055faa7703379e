"""Numbers of any size at every key that takes one: a plan or a message, at once, and no memory."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from zrun.hosts.cluster import Cluster, HostFacts
from zrun.job.load import load_job
from zrun.job.schema import keys
from zrun.placement.plan import make_plan
from zrun.watch.preface import preface
from zrun_core.errors import JobError, PreflightError

JOB = (
    "name: t\nmodel: m:f\ndata: m:d\nsteps: 9\nbatch: 8\neval: {data: m:d}\n"
    "checkpoint: 5\nprecision: fp16\n"
)
CLUSTER = Cluster((HostFacts("box", cores=2, memory_bytes=16 << 30),))
NUMBERS = (
    "0",
    "-1",
    "1e300",
    "-1e300",
    ".nan",
    ".inf",
    "-.inf",
    str(2**63),
    "1000000000",
    "1e-300",
)
SMALL_BYTES = 100 << 20
OF_OPTIMIZERS = (
    "optim={name: lars, args: {momentum: @}}",
    "optim={name: lars, args: {trust_coefficient: @}}",
    "optim={name: lars, args: {ratio_clamp: [0, @]}}",
    "optim={name: lamb, args: {norm_clamp: [@, @]}}",
    "optim.betas=[0.9, @]",
)


def numeric_keys() -> list[str]:
    return [str(key) for key in keys() if "number" in key.takes or "size" in key.takes]


def overrides_of(key: str) -> list[str]:
    """What sets `key` to @, and makes room for it."""
    instead = ["steps=null"] if key in ("tokens", "epochs") else []
    return [*instead, key if "=" in key else f"{key}=@"]


def test_every_number_has_a_bound() -> None:
    assert {"slots", "threads", "steps", "batch.global", "limits.start_s", "zero.bucket"} <= set(
        numeric_keys()
    )
    numeric = [key for key in keys() if str(key) in numeric_keys() and key.section is None]
    assert [str(key) for key in numeric if key.most is None and "<" not in key.takes] == []


@pytest.mark.parametrize("key", [*numeric_keys(), *OF_OPTIMIZERS])
@pytest.mark.at_most(30)
def test_any_number_is_planned_or_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    for number in NUMBERS:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        try:
            loaded = load_job(
                tmp_path / "job.yaml", [each.replace("@", number) for each in overrides_of(key)]
            )
            preface(make_plan(loaded.config, CLUSTER), CLUSTER)
        except (JobError, PreflightError):
            pass
        assert time.process_time() - start < 1, number
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < SMALL_BYTES, (
            number
        )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "slots=1000000000",
            "slots: expected whole number > 0 and <= 1024 | auto, found 1000000000",
        ),
        ("threads=100000", "threads: expected whole number > 0 and <= 1024 | auto, found 100000"),
        (
            "limits.start_s=1e300",
            "limits.start_s: expected number > 0, at most 1e+06, found 1e+300",
        ),
        (
            f"batch.global={2**63}",
            "batch.global: expected whole number > 0 | auto, at most 1e+09, found "
            "9223372036854775808; write for",
        ),
        ("steps=1e300", "steps: expected whole number > 0 | null, at most 1e+12, found 1e+300"),
        ("zero.bucket=9999TiB", "zero.bucket: expected size such as 64MiB | auto"),
    ],
)
def test_what_is_too_large_is_told(tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    with pytest.raises(JobError) as caught:
        load_job(tmp_path / "job.yaml", [override])
    assert message in str(caught.value)


def test_more_ranks_than_can_be_planned_are_refused() -> None:
    hosts = tuple(HostFacts(f"box{number}", 2, 1 << 30, slots=1024) for number in range(129))
    job = {"name": "t", "model": "m:f", "data": "m:d", "steps": 1, "batch": {"micro": 1}}
    from zrun_core.spine.config import JobConfig

    with pytest.raises(JobError, match="132096 ranks on 129 hosts"):
        make_plan(JobConfig.model_validate(job), Cluster(hosts))
