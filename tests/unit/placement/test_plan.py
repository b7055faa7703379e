"""Seats, threads and batch on machines that this one is not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zrun.hosts.cluster import Cluster, Gpu, HostFacts, probe_host
from zrun.placement.gpus import check_gpus
from zrun.placement.plan import ResolvedJob, plan_every_gpu
from zrun.placement.plan import make_plan as make_plan_on
from zrun.watch.preface import brief, places, preface
from zrun_core.errors import ExitCode, JobError, PreflightError
from zrun_core.spine.config import JobConfig

GPUS = tuple(Gpu(f"GPU-{index}abc", "H200", 141 << 30, index) for index in range(4))
CPU_HOST = HostFacts("box", cores=8, memory_bytes=16 << 30)
GPU_HOST = HostFacts("node", cores=64, memory_bytes=1 << 40, gpus=GPUS)


def job(**keys: Any) -> JobConfig:
    base = {
        "name": "t",
        "model": "m:f",
        "data": "m:d",
        "steps": 1,
        "batch": {"global": 24, "micro": 3},
    }
    return JobConfig.model_validate(base | keys)


def make_plan(asked: JobConfig, *hosts: HostFacts) -> ResolvedJob:
    return make_plan_on(asked, Cluster(hosts))


def reason(resolved: ResolvedJob, key: str) -> str:
    return next(f"{each.value} ({each.why})" for each in resolved.reasons if each.key == key)


def test_auto_without_gpu_is_one_rank_with_all_cores() -> None:
    resolved = make_plan(job(), CPU_HOST)
    assert [place.device for place in resolved.plan.ranks] == ["cpu"]
    assert [place.threads for place in resolved.plan.ranks] == [8]
    assert reason(resolved, "slots").startswith("1 (")
    assert reason(resolved, "threads") == "8 (8 usable cores / 1 rank)"


def test_topo_shows_where_ranks_on_cpus_go() -> None:
    ranks = plan_every_gpu(Cluster((CPU_HOST,)), 3, 2).ranks
    assert [(place.device, place.pp, place.tp) for place in ranks] == [
        ("cpu", stage, number) for stage in range(2) for number in range(3)
    ]
    with pytest.raises(PreflightError, match=r"box has no usable GPU.*and the others have some"):
        plan_every_gpu(Cluster((CPU_HOST, GPU_HOST)), 2, 1)


def test_auto_with_gpus_is_one_rank_each() -> None:
    resolved = make_plan(job(), GPU_HOST)
    assert [(place.rank, place.local_rank, place.device) for place in resolved.plan.ranks] == [
        (0, 0, "cuda:0"),
        (1, 1, "cuda:1"),
        (2, 2, "cuda:2"),
        (3, 3, "cuda:3"),
    ]
    assert resolved.plan.hosts == ["node"]
    assert {place.threads for place in resolved.plan.ranks} == {16}
    assert str(resolved.batch) == "global 24 = micro 3 x accumulation 2 x 4 data-parallel ranks"


def test_what_the_job_says_needs_no_reason() -> None:
    optim = {"betas": [0.9, 0.95], "eps": 1e-8}
    keys = {
        "slots": 2,
        "device": "cpu",
        "threads": 1,
        "zero": {"bucket": "1MiB"},
        "optim": optim,
        "bind": "off",
    }
    resolved = make_plan(job(**keys), CPU_HOST)
    assert resolved.reasons == ()


def test_no_auto_is_left() -> None:
    asked = job(batch=6, steps=50, lr={"schedule": "wsd"}, zero=2, launch="local")
    resolved = make_plan(asked, CPU_HOST).job
    of_the_model = {"parallel": {"split", "plan"}}  # it is divided once it is built
    assert "auto" not in resolved.model_dump_json(exclude=of_the_model)
    assert (resolved.batch.global_, resolved.batch.micro) == (6, 6)
    assert (resolved.zero.bucket, resolved.lr.decay_steps) == (12 << 20, 10)
    assert make_plan(resolved, CPU_HOST).job == resolved


def test_a_decay_needs_an_end() -> None:
    with pytest.raises(JobError, match=r"cosine needs the number of steps.* write lr\.decay_steps"):
        make_plan(job(steps=None, tokens=100, lr="cosine"), CPU_HOST)
    lr = {"schedule": "cosine", "decay_steps": 70}
    assert make_plan(job(steps=None, tokens=100, lr=lr), CPU_HOST).job.lr.decay_steps == 70
    assert make_plan(job(steps=None, tokens=100), CPU_HOST).job.lr.decay_steps == "auto"


def test_a_training_begins_with_what_the_job_says_itself() -> None:
    asked = job(slots=2, zero={"stage": 2, "prefetch": 3}, optim={"lr": 3e-4}, precision="fp32")
    told = brief(make_plan(asked, CPU_HOST), asked, Cluster((CPU_HOST,)))
    head, batch, said, autos = told.splitlines()
    assert (head, batch[:6]) == ("t: 2 ranks on box: 8 cores, 16.0 GiB, no GPU", "batch:")
    assert said.endswith("precision fp32, zero 2, zero.prefetch 3, optim.lr 0.0003, slots 2")
    assert "threads 4 (8 usable cores / 2 ranks)" in autos
    assert "betas" not in told
    assert "clip" not in told
    narrow = brief(make_plan(asked, CPU_HOST), asked, Cluster((CPU_HOST,)), 60).splitlines()
    assert max(map(len, narrow[2:5])) <= 60


def test_output_of_ranks_that_do_not_exist_is_warned_of() -> None:
    assert make_plan(job(slots=2, log={"ranks": [0, 1]}), CPU_HOST).warnings == ()
    assert make_plan(job(slots=2, log={"ranks": "all"}), CPU_HOST).warnings == ()
    (warning,) = make_plan(job(slots=2, log={"ranks": [0, 2, 9]}), CPU_HOST).warnings
    assert warning == "log.ranks: there is no rank 2, 9: the run has ranks 0 to 1"


def test_whose_output_is_shown_is_told() -> None:
    def whose(shown: Any) -> str:
        return places(Path("/runs/a"), shown, 4).splitlines()[1].partition(" is shown here")[0]

    assert [whose(shown) for shown in ([0], [0, 3, 9], [], "all")] == [
        "output: rank 0",
        "output: rank 0, 3",
        "output: no rank",
        "output: every rank",
    ]


def test_a_shard_group_divides_the_ranks() -> None:
    with pytest.raises(JobError, match="groups of 3 do not divide 2 ranks"):
        make_plan(job(slots=2, zero={"stage": 3, "shard_group": 3}), CPU_HOST)
    make_plan(job(slots=2, zero={"stage": 0, "shard_group": 3}), CPU_HOST)


def test_a_shard_group_of_a_node_needs_nodes_that_are_alike() -> None:
    hosts = [replace(CPU_HOST, hostname=name, slots=slots) for name, slots in (("a", 2), ("b", 4))]

    def plan(hosts: list[HostFacts], stage: int) -> ResolvedJob:
        zero = {"stage": stage, "shard_group": "node"}
        return make_plan(job(batch={"micro": 1}, zero=zero), *hosts)

    with pytest.raises(JobError, match="node, but some hosts have 2 data-parallel ranks and"):
        plan(hosts, 3)
    plan(hosts, 0)
    plan([replace(host, slots=2) for host in hosts], 3)


def test_cpu_ranks_may_outnumber_cores_and_that_is_said() -> None:
    resolved = make_plan(job(slots=12, batch={"micro": 1}), CPU_HOST)
    assert resolved.plan.world_size == 12
    assert "12 threads share 8 cores" in reason(resolved, "threads")
    assert reason(resolved, "batch.global") == "12 (micro 1 x 12 ranks)"


def test_more_ranks_than_cores_are_warned_of() -> None:
    crowded = make_plan(job(slots=12, batch={"micro": 1}), CPU_HOST)
    assert [warning.partition(":")[0] for warning in crowded.warnings] == [
        "12 ranks share 8 cores of box"
    ]
    assert crowded.warnings[0].endswith("write slots: 8")
    assert "\nwarning: 12 ranks share 8 cores" in preface(crowded, Cluster((CPU_HOST,)))
    assert make_plan(job(slots=8, batch={"micro": 1}), CPU_HOST).warnings == ()
    few_cores = replace(GPU_HOST, cores=2)
    assert make_plan(job(batch={"micro": 1}), few_cores).warnings == ()  # the work is the GPUs'


@pytest.mark.parametrize(
    ("keys", "notes"),
    [
        ({"offload": "host"}, ["offload: host: this machine computes in the host's memory, so"]),
        ({"offload": "disk"}, []),
        ({"offload": {"optimizer": "disk", "grad": "host"}}, ["offload.grad: host: this machine"]),
        (
            {"activations": {"checkpoint": "full", "offload": "host"}, "offload": "host"},
            ["offload: host: ", "activations.offload: host: "],
        ),
    ],
)
def test_where_the_host_is_the_device_nothing_moves_to_it(
    keys: dict[str, Any], notes: list[str]
) -> None:
    asked = job(**keys)
    found = make_plan(asked, CPU_HOST)
    assert len(found.notes) == len(notes)
    for note, start in zip(found.notes, notes, strict=True):
        assert note.startswith(start)
        assert f"note: {note}" in brief(found, asked, Cluster((CPU_HOST,)))
    assert make_plan(asked, GPU_HOST).notes == ()


def test_states_on_a_host_that_may_lock_little_memory_are_remarked_on() -> None:
    host = replace(GPU_HOST, memlock_bytes=8 << 20)
    (note,) = make_plan(job(offload="host"), host).notes
    assert note.startswith("ulimit -l (locked memory) is 8.0 MiB on ")
    assert "set memlock unlimited in /etc/security/limits.conf" in note
    assert make_plan(job(), host).notes == ()
    assert make_plan(job(offload="disk"), host).notes == ()


def test_gpus_are_not_replaced_by_cpus() -> None:
    with pytest.raises(PreflightError) as missing:
        check_gpus(2, job(), Cluster((CPU_HOST,)))
    assert str(missing.value) == (
        "--gpus 2 asks for GPUs, and box has none that is usable "
        "(found box: 8 cores, 16.0 GiB, no GPU): write --slots 2 for 2 ranks on CPUs"
    )
    with pytest.raises(PreflightError, match="and box has none"):
        check_gpus(2, job(), Cluster((GPU_HOST, CPU_HOST)))
    with pytest.raises(
        JobError, match="the job has device: cpu: write --slots 1 for 1 rank on CPUs"
    ):
        check_gpus(1, job(device="cpu"), Cluster((GPU_HOST,)))
    check_gpus(None, job(), Cluster((CPU_HOST,)))
    check_gpus(2, job(), Cluster((GPU_HOST,)))


def test_more_threads_than_cores_are_said_even_if_written() -> None:
    resolved = make_plan(job(slots=2, threads=8, device="cpu"), CPU_HOST)
    assert "16 threads share 8 cores" in reason(resolved, "threads")


@pytest.mark.parametrize(
    ("keys", "host", "words"),
    [
        (
            {"slots": 5},
            GPU_HOST,
            "more ranks than slots: slots: 5, but node has 4 GPUs: write slots: 4 or device: cpu",
        ),
        ({"device": "cuda"}, CPU_HOST, "box has no usable GPU: write device: cpu or auto"),
    ],
)
def test_missing_gpus_stop_the_job(keys: dict[str, Any], host: HostFacts, words: str) -> None:
    with pytest.raises(PreflightError) as caught:
        make_plan(job(**keys), host)
    assert words in str(caught.value)
    assert caught.value.exit_code is ExitCode.PREFLIGHT


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_variable_that_names_no_gpu_is_refused(device: str) -> None:
    """Without a word CUDA would take fewer GPUs, and the job train on those, or on CPUs."""
    limited = GPU_HOST.limited({"CUDA_VISIBLE_DEVICES": "GPU-1abc,GPU-7abc"})
    with pytest.raises(PreflightError) as caught:
        make_plan(job(device=device), limited)
    assert str(caught.value) == (
        "node: CUDA_VISIBLE_DEVICES: 'GPU-7abc' is no GPU of this host, which has GPU-0abc, "
        "GPU-1abc, GPU-2abc, GPU-3abc, so CUDA shows only the 1 before it: correct it, unset it "
        "for all GPUs, or write device: cpu"
    )
    assert make_plan(job(device="cpu"), limited).job.device == "cpu"


def test_gpus_may_be_hidden_on_purpose() -> None:
    hidden = GPU_HOST.limited({"CUDA_VISIBLE_DEVICES": ""})
    resolved = make_plan(job(), hidden)
    assert (resolved.job.device, resolved.warnings) == ("cpu", ())
    why = "node trains on its CPUs, for CUDA_VISIBLE_DEVICES='' hides its 4 GPUs"
    assert why in resolved.notes
    with pytest.raises(PreflightError) as caught:
        make_plan(job(device="cuda"), hidden)
    assert str(caught.value) == (
        "device: cuda, but node has no usable GPU (CUDA_VISIBLE_DEVICES='' hides its 4 GPUs): "
        "unset it, or write device: cpu"
    )
    with pytest.raises(PreflightError, match=r"hides its 4 GPUs\): unset it, or write --slots 2"):
        check_gpus(2, job(), Cluster((hidden,)))


def test_the_job_s_own_environment_may_hide_gpus() -> None:
    resolved = make_plan(job(env={"CUDA_VISIBLE_DEVICES": "-1"}), GPU_HOST)
    assert resolved.job.device == "cpu"
    why = "node trains on its CPUs, for CUDA_VISIBLE_DEVICES=-1 hides its 4 GPUs"
    assert why in resolved.notes
    wanted = make_plan(job(env={"CUDA_VISIBLE_DEVICES": "-1"}, device="cpu"), GPU_HOST)
    assert why not in wanted.notes


def test_hosts_whose_gpus_are_hidden_are_told_from_the_others() -> None:
    one = GPU_HOST.limited({"CUDA_VISIBLE_DEVICES": "-1"}).called("dark")
    words = re.escape("dark has no usable GPU (CUDA_VISIBLE_DEVICES=-1 hides its 4 GPUs): leave")
    with pytest.raises(PreflightError, match=words):
        make_plan(job(), one, GPU_HOST)


def test_the_job_s_own_environment_chooses_gpus() -> None:
    chosen = make_plan(job(env={"CUDA_VISIBLE_DEVICES": "3,1"}), GPU_HOST)
    assert [place.uuid for place in chosen.plan.ranks] == ["GPU-3abc", "GPU-1abc"]
    with pytest.raises(PreflightError, match="slots: 4, but node has 2 GPUs"):
        make_plan(job(env={"CUDA_VISIBLE_DEVICES": "3,1"}, slots=4), GPU_HOST)
    with pytest.raises(PreflightError, match="'9' is no GPU of this host, which has 0, 1, 2, 3"):
        make_plan(job(env={"CUDA_VISIBLE_DEVICES": "9"}), GPU_HOST)


def test_a_driver_without_a_gpu_is_named() -> None:
    """With device: auto it is a warning: a cluster's image has the driver on all hosts."""
    idle = replace(CPU_HOST, no_gpus="NVIDIA driver 550 sees none")
    resolved = make_plan(job(), idle)
    assert resolved.job.device == "cpu"
    assert resolved.warnings[0] == (
        "box trains on its CPUs, for it has no usable GPU: NVIDIA driver 550 sees none"
    )
    assert not make_plan(job(device="cpu"), idle).warnings
    with pytest.raises(PreflightError, match=r"no usable GPU \(NVIDIA driver 550 sees none\)"):
        make_plan(job(device="cuda"), idle)


def test_of_several_mistakes_one_that_others_depend_on_is_told_first() -> None:
    """Axes, places, the batch, groups of ranks, the decay."""
    hosts = [CPU_HOST.called("a", 5), CPU_HOST.called("b", 3)]
    keys: dict[str, Any] = {
        "tokens": 100,
        "steps": None,
        "lr": "cosine",
        "zero": {"stage": 1, "shard_group": 3},
        "batch": {"global": 7, "micro": 1},
        "parallel": {"tp": 2, "dp": 2},
    }
    told: list[tuple[str, dict[str, Any]]] = [
        ("tp 2 x pp 1 x dp 2 = 4 ranks, but the hosts have 8 slots", {"parallel": {"tp": 2}}),
        ("2 ranks of one tp group would sit on several hosts", {"parallel": {}}),
        ("batch.global: 7 samples do not divide over 8", {"batch": {"micro": 1}}),
        ("groups of 3 do not divide 8 ranks", {"zero": {"stage": 1, "shard_group": "node"}}),
        ("zero.shard_group: node, but some hosts have", {"zero": 1}),
        ("lr.schedule: cosine needs the number of steps", {"lr": "constant"}),
    ]
    for words, correction in told:
        with pytest.raises((JobError, PreflightError), match=words):
            make_plan(job(**keys), *hosts)
        keys |= correction
    assert make_plan(job(**keys), *hosts).plan.world_size == 8


def test_ranks_follow_the_order_of_the_hosts() -> None:
    """Each host has the slots that it is given, and its ranks are contiguous."""
    big, small = (
        HostFacts("z", 16, 1 << 34).called("big", 3),
        HostFacts("a", 4, 1 << 33).called("small", 2),
    )
    resolved = make_plan(job(batch={"micro": 1}), big, small)
    assert [(p.rank, p.host, p.local_rank, p.threads) for p in resolved.plan.ranks] == [
        (0, "big", 0, 5),
        (1, "big", 1, 5),
        (2, "big", 2, 5),
        (3, "small", 0, 2),
        (4, "small", 1, 2),
    ]
    assert resolved.plan.hosts == ["big", "small"]
    assert reason(resolved, "slots") == "3 on big; 2 on small (the slots given to each host)"
    assert "5 on big; 2 on small" in reason(resolved, "threads")
    assert (resolved.job.slots, resolved.job.threads) == ("auto", "auto")
    again = make_plan(resolved.job, big, small)
    assert (again.job, again.plan) == (resolved.job, resolved.plan)


def test_hosts_that_are_given_nothing_have_a_rank_each() -> None:
    resolved = make_plan(job(batch={"micro": 1}), CPU_HOST.called("b"), CPU_HOST.called("a"))
    assert [(place.host, place.local_rank) for place in resolved.plan.ranks] == [("b", 0), ("a", 0)]
    assert (resolved.job.slots, resolved.job.threads) == (1, 8)


def test_chosen_slots_are_gpus() -> None:
    resolved = make_plan(job(batch={"micro": 1}), GPU_HOST.called("n", 4, (1, 3)))
    assert [(p.device, p.uuid) for p in resolved.plan.ranks] == [
        ("cuda:0", GPUS[1].uuid),
        ("cuda:1", GPUS[3].uuid),
    ]
    with pytest.raises(PreflightError, match="slot 4 is wanted, but n has 4 GPUs"):
        make_plan(job(), GPU_HOST.called("n", chosen=(1, 4)))


def test_a_host_without_gpus_among_others_is_named() -> None:
    with pytest.raises(
        PreflightError, match="but box has no usable GPU: leave out the hosts without"
    ):
        make_plan(job(), GPU_HOST, CPU_HOST)
    resolved = make_plan(job(device="cpu", batch={"micro": 1}), GPU_HOST, CPU_HOST)
    assert resolved.plan.hosts == ["node", "box"]


def test_more_ranks_than_given_slots() -> None:
    with pytest.raises(
        PreflightError, match="slots: 3, but box is given 2 slots: write slots: 2 or auto"
    ):
        make_plan(job(slots=3), CPU_HOST.called("box", 2))


def test_a_cluster_names_each_host_once() -> None:
    with pytest.raises(ValueError, match="each once"):
        Cluster((CPU_HOST, CPU_HOST))


def test_facts_travel_as_json() -> None:
    facts = GPU_HOST.called("n", 4, (1, 3))
    assert HostFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_probe_finds_this_machine() -> None:
    host = probe_host()
    assert host.cores >= 1
    assert host.memory_bytes > 1 << 28
    assert host.hostname in str(host)


# Pipelines


def notes_of(micro_batches: int, **parallel: Any) -> list[str]:
    """Notes on 4 ranks with micro-batches of 2 samples."""
    replicas = 4 // parallel["pp"]
    batch = {"global": 2 * replicas * micro_batches, "micro": 2}
    resolved = make_plan(job(parallel=parallel, batch=batch), GPU_HOST)
    return [note for note in resolved.notes if note.startswith("parallel")]


def test_fewer_micro_batches_than_stages_are_told_with_the_batch_that_would_do() -> None:
    assert notes_of(2, pp=4) == [
        "parallel.pp: 2 micro-batches per step for 4 stages: each waits 60% of the time; "
        "batch.global: 32 (16 micro-batches of 2 x 1 data-parallel ranks) would make it 16%"
    ]
    (one,) = notes_of(1, pp=2)
    assert one.startswith("parallel.pp: 1 micro-batch per step for 2 stages: each waits 50% of")
    assert "batch.global: 24 (6 micro-batches of 2 x 2 data-parallel ranks)" in one
    (pieces,) = notes_of(3, pp=4, schedule="interleaved", virtual=4)
    assert "batch.global: 8 (4 micro-batches" in pieces, "chunks make the wait shorter"
    assert notes_of(4, pp=4) == notes_of(1, pp=1) == []
    assert notes_of(1, pp=4, schedule="pipedream") == [
        "parallel.schedule: pipedream changes numerics: each micro-batch of 2 samples is a step, "
        "with gradients up to 3 updates late; stage 0 keeps 4 versions of its weights, and the "
        "last one 1"
    ]


def test_pipedream_has_steps_of_one_micro_batch() -> None:
    asked = job(parallel={"pp": 2, "schedule": "pipedream"}, batch={"global": 24, "micro": 3})
    with pytest.raises(JobError) as caught:
        make_plan(asked, GPU_HOST)
    assert str(caught.value) == (
        "parallel.schedule: pipedream updates after each micro-batch, of micro 3 x 2 data-parallel "
        "ranks = 6 samples, and batch.global is 24: write global: 6, or micro: 12"
    )


# An asynchronous parameter server


def test_an_asynchronous_server_says_that_it_changes_numerics() -> None:
    def notes(**keys: Any) -> list[str]:
        asked = job(sync="async_server", slots=4, **keys)
        return [note for note in make_plan(asked, CPU_HOST).notes if note.startswith("sync")]

    assert notes(staleness=3) == [
        "sync: async_server changes numerics: each push of 6 samples is an update of 1/4 of the "
        "learning rate, by a gradient that may be late, of a rank that may be ahead of the slowest "
        "by up to 3 of its pushes; only rank 0 has optimizer states"
    ]
    (unbounded,) = notes(staleness="any")
    assert "by any number of pushes" in unbounded
    (none,) = notes()
    assert none.startswith("sync: async_server with staleness 0 has the numbers of sync: server")


def test_an_asynchronous_server_is_refused_where_auto_finds_gpus() -> None:
    with pytest.raises(JobError, match="trains on CPUs, and this host has GPUs"):
        make_plan(job(sync="async_server"), GPU_HOST)
