"""What a planner lists from the job alone is, to the byte, what ranks then hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from runs import PoolWorker, Speaker, make_spec
from small_jobs import NO_DROPOUT, transformer
from torch import nn
from toys import world

from zrun_core.distributed import comm
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.memory.arena import PagePool, PageWindow
from zrun_core.memory.buffers import Kind
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.memory.states import plan_model, rank_buffers, settings_of
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.trace.profile import Profile
from zrun_core.plan.trace.tracer import trace_job
from zrun_core.sizes import format_size
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import Coordinates, ParallelDims, resolve_shard_size
from zrun_core.zero.account import allocated_memory
from zrun_core.zero.sharded_model import ShardedModel

# Tied and frozen parameters, batch norms and their statistics; of odd sizes, so that nothing
# divides.
ODD = {"model": {"call": "runs.py:Speaker", "args": {"dim": 37, "depth": 3, "dropout": 0.0}}}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"zero": {"bucket": "8kB", "prefetch": 2}},
    "bf16": {
        "precision": "bf16",
        "zero": {"bucket": "8kB", "persist_below": 300},
        "activations": {"checkpoint": "full"},
    },
    "narrow": {
        "precision": {"compute": "bf16", "reduce": "compute"},
        "optim": {"name": "lamb", "moments": "bf16", "no_decay": ["norm"]},
    },
    "moments": {
        "optim": {"name": "sgd", "args": {"momentum": 0.9}},
        "zero": {"leaf": [r"blocks\.1"]},
    },
}
ALL = [(stage, name, {}) for stage in range(4) for name in CASES]
HYBRID: list[tuple[int, str, dict[str, Any]]] = [
    (stage, name, {"shard_group": group})
    for group in (1, 2)
    for stage, name in ((1, "narrow"), (2, "bf16"), (3, "fp32"))
]
SERVER: list[tuple[int, str, dict[str, Any]]] = [
    (0, "fp32", {"sync": "server"}),
    (0, "narrow", {"sync": "server"}),
    (0, "fp32", {"sync": "async_server"}),
    (0, "bf16", {"sync": "async_server"}),
]
CHOSEN = {1: ALL[::5], 2: ALL[::2] + HYBRID[:3] + SERVER, 3: ALL[1::4], 4: ALL[3::4] + HYBRID[3:]}


def job(stage: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A small job of one step."""
    options = dict(options)
    keys = {
        **ODD,
        "steps": 1,
        "lr": "constant",
        "checkpoint": None,
        "batch": {"global": 12},
        **CASES[name],
    }
    if "sync" in options:
        keys["sync"] = options.pop("sync")
    return runs.job(**{**keys, "zero": {**keys.get("zero", {}), "stage": stage, **options}})


def held(sharded: ShardedModel) -> dict[str, int]:
    """Bytes of the memory in which this rank's states and scratch lie, each once, by kind."""
    found: dict[int, tuple[Kind, int]] = {}

    def see(kind: Kind, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), (kind, storage.nbytes()))

    for unit in sharded.units:
        if isinstance(
            unit.param.window, PageWindow
        ):  # a range of addresses, of which the own shard has memory
            found[unit.param.window.full.data_ptr()] = Kind.PARAM, unit.param.shard.nbytes
        else:
            see(Kind.PARAM, unit.param.windows[0].full)
            see(Kind.PARAM, unit.param.windows[-1].full)
        if unit.trainable:
            see(Kind.GRAD, unit.grad.local)
            see(Kind.OPTIM, unit.master)
    for tensor in sharded.optimizer.tensors():
        if tensor.dim():  # not a count of steps
            see(Kind.OPTIM, tensor)
    for tensor in sharded.reducer.ring.tensors:
        see(Kind.RING, tensor)
    assert isinstance(sharded._pool, PagePool)
    for region in sharded._pool._regions:
        found[region.address] = Kind.RING, region.num_bytes
    for buffer in sharded.module.buffers():
        see(Kind.BUFFER, buffer)
    sums = dict.fromkeys((kind.value for kind in allocated_memory(sharded).by_kind), 0)
    for kind, num_bytes in found.values():
        sums[kind.value] += num_bytes
    return sums


def growth_told(worker: PoolWorker) -> list[str]:
    """What was told of rings that have outgrown their plan."""
    messages = (event["message"] for event in worker.told.events if event["type"] == "warning")
    return [message for message in messages if message.startswith("the ring of")]


def train(
    cases: list[tuple[int, str, dict[str, Any]]], run_dir: str, direct: int
) -> list[dict[str, int]]:
    """Bytes that this rank holds after a step of each job."""
    comm.DIRECT_MAX_RANKS, default = direct, comm.DIRECT_MAX_RANKS
    try:
        found = []
        for number, case in enumerate(cases):
            path = Path(run_dir) / str(number)
            path.mkdir(exist_ok=True)
            worker = PoolWorker(make_spec(job(*case), str(path), None), world()[0])
            trainer = worker.prepare()
            trainer.run()
            worker.close()
            sums = held(trainer.sharded)
            told = {
                kind.value: size for kind, size in allocated_memory(trainer.sharded).by_kind.items()
            }
            assert told == sums, (case, told, sums)
            assert not growth_told(worker), case
            found.append(sums)
        return found
    finally:
        comm.DIRECT_MAX_RANKS = default


class Interleaved(Speaker):
    """Runs one half of every block, then the other: all are in use, and have some of their
    gradients, at once.
    """

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = torch.relu(block.up(block.norm(x))).unflatten(-1, (2, -1)).sum(-2)
        for block in self.blocks:
            x = block.down(torch.cat([x, x], -1))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def outgrow(keys: dict[str, Any], run_dir: str) -> tuple[list[str], list[tuple[int, int]]]:
    """What is told of rings after a run, and how many bytes were planned for each and are held."""
    worker = PoolWorker(make_spec(keys, run_dir, None), world()[0])
    trainer = worker.prepare()
    before = trainer.sharded.ring_bytes
    trainer.run()
    worker.close()
    return growth_told(worker), list(zip(before, trainer.sharded.ring_bytes, strict=True))


def planned(keys: dict[str, Any], world_size: int, rank: int) -> dict[str, int]:
    """The same from the job, in a process that has no ranks and gives the model no memory."""
    config = JobConfig.model_validate(keys)
    settings = settings_of(config, lambda name: None, "cpu")
    with torch.device("meta"):
        cut = plan_model(Speaker(**config.model.args), settings)
    dims = ParallelDims(world_size, shard=resolve_shard_size(config.zero, world_size, world_size))
    found = dict.fromkeys(
        (kind.value for kind in (Kind.PARAM, Kind.GRAD, Kind.OPTIM, Kind.RING, Kind.BUFFER)), 0
    )
    for buffer in rank_buffers(cut, settings, dims, rank=Coordinates(dp=rank), device="cpu"):
        assert (buffer.tier, buffer.pinned, buffer.phases) == ("device", False, None)
        if buffer.kind is not Kind.TEMP:  # which a process has once: `test_plan_states.py`
            found[buffer.kind.value] += buffer.num_bytes
    return found


@pytest.mark.parametrize("world_size", CHOSEN)
@pytest.mark.at_most(1)
def test_what_is_planned_from_the_job_is_what_ranks_hold(ranks, world_size, tmp_path):
    cases = CHOSEN[world_size]
    for rank, sums in enumerate(
        ranks(world_size).run(train, cases, str(tmp_path), comm.DIRECT_MAX_RANKS)
    ):
        for case, held_here in zip(cases, sums, strict=True):
            assert planned(job(*case), world_size, rank) == held_here, (rank, *case)
            assert held_here["optim"] or rank, "it has been trained"


def test_backends_that_sum_on_the_way_need_less_room(ranks, monkeypatch, tmp_path):
    cases = [(2, "bf16", {}), (3, "fp32", {}), (0, "narrow", {}), (1, "fp32", {"shard_group": 1})]
    direct = [planned(job(*case), 3, 0) for case in cases]
    monkeypatch.setattr(comm, "DIRECT_MAX_RANKS", 1)
    for rank, sums in enumerate(ranks(3).run(train, cases, str(tmp_path), 1)):
        assert [planned(job(*case), 3, rank) for case in cases] == sums
    assert all(
        sum(own["rings"] for own in (few, many)) for few, many in zip(sums, direct, strict=True)
    )
    assert sums[0]["rings"] < direct[0]["rings"]


def test_rings_that_outgrow_their_plan_are_told(ranks, tmp_path):
    model = {
        "call": "memory/test_plan_bytes.py:Interleaved",
        "args": {"dim": 36, "depth": 4, "dropout": 0.0},
    }
    keys = job(3, "moments", {}) | {
        "model": model,
        "steps": 3,
        "zero": {"stage": 3, "bucket": "64kB"},
    }
    for rank, (told, rings) in enumerate(ranks(2).run(outgrow, keys, str(tmp_path))):
        assert all(held > planned for planned, held in rings)
        expected = [
            f"the ring of {purpose} holds {format_size(held)}, {format_size(held - planned)} more "
            "than the "
            f"{format_size(planned)} that were planned: "
            for purpose, (planned, held) in zip(("gathering", "reducing"), rings, strict=True)
        ]
        assert [any(message.startswith(each) for message in told) for each in expected] == [
            rank == 0,
            True,
        ], told


SIZES = {"dim": 128, "depth": 4, "heads": 4, "seq_len": 128, "vocab_size": 2003}
PIPEDREAM = {  # a window of 64 steps per stage, and the next, at whose end peaks are told
    "model": {"call": "zrun_core.models.gpt:gpt", "args": {**SIZES, "tied": False}},
    "batch": {"global": 1, "micro": 1},
    "optim": {"lr": 1e-2, "clip": None},
}
PIPELINES: list[tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = [
    ({"dp": 2, "pp": 2}, {}, {"zero": 2, "activations": {"checkpoint": "full"}}),
    ({"dp": 1, "pp": 4}, {}, {}),
    ({"dp": 1, "pp": 2, "virtual": 2}, {"schedule": "interleaved"}, {"zero": 1}),
    ({"dp": 1, "pp": 2}, {"schedule": "gpipe"}, {"precision": "bf16"}),
    ({"dp": 1, "pp": 2}, {"schedule": "zero_bubble"}, {}),
    ({"dp": 1, "pp": 4}, {"schedule": "zero_bubble"}, {"precision": "bf16"}),
    ({"dp": 1, "pp": 2}, {"schedule": "pipedream"}, {**PIPEDREAM, "steps": 129}),
    ({"dp": 1, "pp": 2}, {"schedule": "pipedream_vertical"}, {**PIPEDREAM, "steps": 129}),
    ({"dp": 1, "pp": 3}, {"schedule": "pipedream_vertical"}, {**PIPEDREAM, "steps": 193}),
]


WIDE = {"vocab_size": 2003, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128}
GPT2 = {"model": transformer("GPT2LMHeadModel", **NO_DROPOUT, **WIDE)["model"]}
LLAMA = {
    "model": transformer(
        "LlamaForCausalLM",
        vocab_size=2003,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=344,
    )["model"]
}
SEQUENCE = {"sequence": True}
# Of ranks with slices of layers: each model, each ZeRO stage, with and without a pipeline.
SLICES: list[tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = [
    ({"dp": 1, "tp": 2}, {}, {"activations": {"checkpoint": "full", "partition": True}}),
    ({"dp": 2, "tp": 2}, SEQUENCE, {"zero": 1, "activations": {"checkpoint": "full"}}),
    ({"dp": 1, "tp": 2, "pp": 2}, SEQUENCE, {"zero": 2}),
    ({"dp": 2, "tp": 2}, {}, {"zero": 3, "precision": "bf16", **GPT2}),
    ({"dp": 1, "tp": 2, "pp": 2}, {}, {"zero": 3, **GPT2}),
    ({"dp": 2, "tp": 2}, SEQUENCE, {"zero": 2, **LLAMA}),
    ({"dp": 1, "tp": 4}, {"plan": "auto"}, {"zero": 3, **GPT2}),
]


@pytest.mark.parametrize(("sizes", "parallel", "keys"), PIPELINES + SLICES)
@pytest.mark.thorough
def test_parts_of_a_model_hold_what_is_planned(
    ranks, tmp_path, sizes: dict[str, int], parallel: dict[str, Any], keys: dict[str, Any]
) -> None:
    axes = {axis: sizes[axis] for axis in ("tp", "pp") if axis in sizes}
    keys = runs.job(
        **{
            "model": {"call": "zrun_core.models.gpt:gpt", "args": {**SIZES, "tied": True}},
            "data": {"call": "memory/test_plan_bytes.py:tokens"},
            "steps": 3,
            "batch": {"global": 32, "micro": 4},
            "checkpoint": None,
            "hooks": {},
            "parallel": {**axes, **parallel},
            **keys,
        }
    )
    dims = ParallelDims(**sizes)
    found = ranks(dims.world_size).run(runs.run, keys, str(tmp_path), None, None, None, sizes)
    job = JobConfig.model_validate(keys)
    policies = (job.activations.checkpoint,)

    def divided(tp: int, sequence: bool) -> Profile:
        changed = job.parallel.model_copy(update={"tp": tp, "sequence": sequence})
        asked = job.model_copy(update={"parallel": changed})
        micros = (asked.batch.micro,)
        return trace_job(asked, runs.JOB_DIR, micros=micros, checkpoints=policies, threads=1)

    hardware = parse_simulate(f"{dims.world_size}xCPU")
    planner = Planner(divided(1, False), hardware, job, divide=divided)
    candidate = Candidate(
        job.zero.stage,
        dims,
        job.batch.micro,
        job.batch.global_ // job.batch.micro // dims.dp,
        job.activations.checkpoint,
        job.precision.compute,
        sequence_parallel=job.parallel.sequence,
        schedule=job.parallel.schedule,
        split=() if job.parallel.split == "auto" else tuple(job.parallel.split),
        partition=job.activations.partition,
    )
    told = {event["type"]: event for event in found[0]["events"]}
    assert_sent(told["end"]["traffic"], planner.traffic(candidate), job.steps)
    apart = planner.sent_apart(candidate)
    for axis in ("tensor", "pipe"):
        sent = told["end"]["traffic"].get(axis, {}).get("by_kind", {})
        assert sent == {
            kind: job.steps * num_bytes for kind, num_bytes in apart.get(axis, {}).items()
        }
    for number, of_rank in enumerate(found):
        told = {event["type"]: event for event in of_rank["events"]}
        if dims.pp > 1:
            of_stage = planner.sent_to_stages(candidate, dims.coordinates(number).pp)
            sent = dict(told["memory"]["pipe_sent"])
            assert sent.pop("stage") == dims.coordinates(number).pp
            count = sent.pop("micro_batches")
            assert sent == {kind: count * size for kind, size in of_stage.items() if size}, number
        rank = planner.rank(candidate, dims.coordinates(number).pp)
        if dims.coordinates(number).dp == 0:
            for kind in (Kind.PARAM, Kind.GRAD, Kind.OPTIM, Kind.RING, Kind.BUFFER):
                planned = sum(b.num_bytes for b in rank.buffers if b.kind is kind)
                assert planned == told["memory"][kind.value], (number, kind)
        measured = told["peak"]["peak_bytes"]
        messages = 2 * planner.stage(candidate, dims.coordinates(number).pp).message
        # Whether others have read what was sent is a matter of time.
        close = 0.005 if dims.tp == 1 else 0.02
        assert abs(rank.allocated - measured) < close * measured + messages, number


def assert_sent(of_run: dict[str, dict[str, int]], of_step: dict[str, int], steps: int) -> None:
    """Check that a rank has sent what was expected when it ended, and planned beforehand."""
    for kind, each in of_run.items():
        measured = each["measured_bytes"]
        assert each.get("expected_bytes", measured) == measured, kind
        # What the last update made stale is not gathered.
        assert measured == steps * of_step[kind] or kind == "all_gather", kind
    assert of_step.keys() == of_run.keys()


def tokens() -> list[dict[str, torch.Tensor]]:
    rows = torch.arange(64 * 128).remainder(2003).view(64, 128)
    return [{"input_ids": row, "labels": row} for row in rows]
