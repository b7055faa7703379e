"""Estimates of a model that was traced: its operations and events, part by part."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from formula_cost import FormulaCostModel, FormulaSettings, product_seconds
from formulas import TransformerShape
from plan_rows import Event, Op, trace_of
from torch import nn
from traced_gpt import GPT, planner_of

from zrun.estimate.why import overshoot
from zrun_core.checkpoint.block_writer import HELD_BYTES
from zrun_core.errors import ExitCode, JobError
from zrun_core.hardware.hardware import Hardware
from zrun_core.hardware.measured import Rates, from_rates
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.plan.answer.outcome import RankMemory
from zrun_core.plan.answer.planner import Planner
from zrun_core.plan.answer.search import SearchResult, SearchSpace, SearchState, search
from zrun_core.plan.memory.rank_memory import adds_gradients
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.question.subject import Subject
from zrun_core.plan.timing.cost_model import CostModel
from zrun_core.plan.timing.micro_batch_cost import TimingSettings
from zrun_core.plan.timing.traced_cost import (
    OpColumns,
    columns_of,
    launch_seconds,
    trace_seconds,
)
from zrun_core.plan.trace.module_tree import describe_modules, describe_params
from zrun_core.plan.trace.profile import COMPILER_BYTES, Profile, Trace
from zrun_core.plan.trace.rows import Affine, TracePhase
from zrun_core.spine.config import JobConfig
from zrun_core.spine.memory_limits import SHARED_BY_RANKS, share_of_rank
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.spine.sections.evaluation import EvalConfig
from zrun_core.stages.flow import Leaf, ModelFlow, NodeCall

BLOCKS, WIDTH, TOKENS = 4, 512, 128
KEPT = 2 * TOKENS * WIDTH  # bytes of an activation of one sample, bf16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1000, bias=False)


def product(phase: TracePhase, module: str, block: int, flops: float) -> Op:
    return Op(
        "mm",
        "gemm",
        Affine(0, flops),
        Affine(2 * WIDTH**2, 2 * KEPT),
        phase,
        module,
        block,
        "bfloat16",
        (TOKENS, WIDTH, WIDTH),
    )


def timeline(checkpoint: str) -> Trace:
    """Each block keeps one activation; with checkpointing it makes its products once more in
    backward.
    """
    once = 2.0 * TOKENS * WIDTH**2
    events, ops = (
        [],
        [
            Op(
                "embedding",
                "copy",
                Affine(0, 0),
                Affine(0, KEPT),
                TracePhase.FORWARD,
                "embed",
                -1,
                "bfloat16",
                (),
            )
        ],
    )
    for block in range(BLOCKS):
        name = f"blocks.{block}.linear"
        events.append(
            Event(block, Affine(0, KEPT), True, TracePhase.FORWARD, name, block, "activation")
        )
        ops.append(product(TracePhase.FORWARD, name, block, once))
    ops.append(product(TracePhase.FORWARD, "head", -1, once))
    ops.append(product(TracePhase.BACKWARD, "head", -1, 2 * once))
    for block in reversed(range(BLOCKS)):
        name = f"blocks.{block}.linear"
        ops += [product(TracePhase.BACKWARD, name, block, once)] * (
            3 if checkpoint == "full" else 2
        )
        events.append(
            Event(block, Affine(0, KEPT), False, TracePhase.BACKWARD, name, block, "activation")
        )
        weight = Affine(2 * WIDTH**2, 0)
        events += [
            Event(BLOCKS + block, weight, comes, TracePhase.BACKWARD, name, block, "grad")
            for comes in (True, False)
        ]
    ops.append(
        Op(
            "scatter",
            "copy",
            Affine(0, 0),
            Affine(0, KEPT),
            TracePhase.BACKWARD,
            "embed",
            -1,
            "bfloat16",
            (),
        )
    )
    return replace(trace_of(events, ops), checkpoint=checkpoint)


def profile() -> Profile:
    with torch.device("meta"):
        model = Model()
    return Profile(
        "traced",
        "",
        describe_params(model, torch.bfloat16),
        0,
        BLOCKS,
        Affine(0, 16.0 * TOKENS),
        TOKENS,
        {name: timeline(name) for name in ("none", "full")},
        describe_modules(model),
        "cuda",
    )


JOB = JobConfig.model_validate(
    {
        "name": "j",
        "model": "m:f",
        "data": "d:f",
        "steps": 1,
        "batch": {"micro": 1},
        "precision": "bf16",
    }
)
HARDWARE = parse_simulate("8xA100-80G")


def test_every_operation_and_parameter_belongs_to_one_part() -> None:
    found = profile()
    parts = CostModel(Subject(found), HARDWARE, TimingSettings()).micro_batch(
        Candidate(0, ParallelDims(1), 4, 1).key
    )
    once = 4 * 2.0 * TOKENS * WIDTH**2
    assert [part.flops for part in parts] == [0, *[3 * once] * BLOCKS, 3 * once]
    assert [part.params for part in parts] == [
        1000 * WIDTH,
        *[WIDTH**2 + WIDTH] * BLOCKS,
        1000 * WIDTH,
    ]
    assert parts.before.forward > 0
    assert parts.before.backward > 0
    assert parts.boundary_bytes == 4 * KEPT


def with_host(seconds: float) -> Hardware:
    """GPUs whose host takes so long for an operator."""
    return replace(HARDWARE, device=replace(HARDWARE.device, host_s=seconds))


def test_recomputation_is_what_the_other_timeline_lacks() -> None:
    planner = Planner(profile(), with_host(0.0), JOB)
    none, full = (
        planner.estimate(Candidate(0, ParallelDims(1), 4, 2, policy)).time
        for policy in ("none", "full")
    )
    assert none.model_flops == full.model_flops == none.hardware_flops
    assert full.hardware_flops == pytest.approx(
        none.model_flops + 2 * BLOCKS * 4 * 2.0 * TOKENS * WIDTH**2
    )
    assert full.parts["recompute"] == pytest.approx(full.seconds - none.seconds, rel=1e-6)


def test_gradients_are_added_where_they_are_not_reduced_at_once() -> None:
    added = [adds_gradients(Candidate(stage, ParallelDims(2), 4, 2)) for stage in range(4)]
    assert added == [True, True, False, False]
    assert adds_gradients(Candidate(2, ParallelDims(1), 4, 2))
    assert not adds_gradients(Candidate(0, ParallelDims(2), 4, 1))


def test_the_peak_is_states_and_live_events() -> None:
    planner = Planner(profile(), HARDWARE, JOB)
    one = planner.estimate(Candidate(1, ParallelDims(2), 4, 1)).ranks[0]
    assert one.peak.dynamic == BLOCKS * 4 * KEPT
    assert one.allocated == one.peak.dynamic + sum(buffer.num_bytes for buffer in one.buffers)


def flow() -> ModelFlow:
    """Each block hands its output to the next one; the head costs as much as a block."""
    once = 2.0 * TOKENS * WIDTH**2
    names = tuple(f"blocks.{number}" for number in range(BLOCKS))
    uses = {"embed.weight": (0,), "head.weight": (BLOCKS,)}
    uses |= {
        f"{block}.linear.{name}": (number,)
        for number, block in enumerate(names)
        for name in ("weight", "bias")
    }
    calls = tuple(NodeCall(name, number) for number, name in enumerate(names))
    leaves = tuple(
        Leaf(number, 0, number, number + 1, (1, TOKENS, WIDTH), "bfloat16", requires_grad=True)
        for number in range(BLOCKS)
    )
    return ModelFlow(names, (once,) * (BLOCKS + 1), uses, calls, leaves)


def test_stages_hold_what_their_schedule_has_under_way() -> None:
    planner = Planner(replace(profile(), flow=flow()), HARDWARE, JOB)
    dims = ParallelDims(1, pp=2)
    message = sample = 4 * KEPT  # of a micro-batch of 4
    # A block leaves its input and the gradient of its output to the pass that makes its weight's.
    held = {"1f1b": (2, 1), "gpipe": (6, 6), "zero_bubble": (1 + 2, 2 + 2)}
    for schedule, (most, of_last) in held.items():
        first, last = planner.estimate(Candidate(1, dims, 4, 6, schedule=schedule)).ranks
        assert first.peak.dynamic == most * 3 * sample + message, "three blocks, no head"
        assert last.peak.dynamic == of_last * sample + message, "one block"
    named = planner.estimate(Candidate(1, dims, 4, 6, split=("blocks.1",))).ranks[0]
    assert named.peak.dynamic == 2 * sample + message
    virtual = Candidate(1, ParallelDims(1, pp=2, virtual=2), 4, 6, schedule="interleaved")
    assert planner.split(virtual).starts == (0, 1, 2, 3)
    first = planner.estimate(virtual).ranks[0]
    assert first.peak.dynamic == 5 * sample + 3 * message, "5 of its chunks wait, of one block each"
    first, last = planner.estimate(Candidate(1, dims, 4, 4)).ranks
    with_head = sum(b.num_bytes for b in last.buffers if b.name.startswith("head"))
    assert with_head > 0
    assert not any(b.name.startswith("head") for b in first.buffers)


@pytest.mark.parametrize(
    ("why", "code", "said"),
    [
        ("", ExitCode.PREFLIGHT, "cannot estimate a pipeline of this model"),
        ("parallel.pp: blocks.0 is called twice", ExitCode.USAGE, "blocks.0 is called twice"),
    ],
)
def test_a_flow_that_is_not_known_is_no_mistake_of_the_job(
    why: str, code: ExitCode, said: str
) -> None:
    planner = Planner(replace(profile(), why_no_flow=why), HARDWARE, JOB)
    with pytest.raises(JobError, match=said) as error:
        planner.estimate(Candidate(1, ParallelDims(1, pp=2), 4, 6))
    assert error.value.exit_code is code


def test_a_part_of_a_traced_model_is_traced_too() -> None:
    """No formula stands in for it: of what nobody can trace, nothing is said."""
    halves = Candidate(0, ParallelDims(1, tp=2), 4, 1)
    with pytest.raises(JobError, match="tp 2: how this model is divided is not known"):
        Planner(profile(), HARDWARE, JOB).estimate(halves)
    asked = []

    def divide(tp: int, sequence: bool) -> Profile:
        asked.append((tp, sequence))
        return profile()

    found = Planner(profile(), HARDWARE, JOB, divide=divide).estimate(halves)
    assert found.source == "traced"
    assert asked == [(2, False)]


class Tracing:
    """Counts the ways that are traced at the same time.

    Those of two and of four ranks wait for each other if there are to be two, those of `held` ranks
    until all is ended.
    """

    def __init__(self, at_once: int, held: tuple[int, ...] = ()) -> None:
        self.at_once = at_once
        self.held = held
        self.both = threading.Barrier(2)
        self.is_ended = threading.Event()
        self.lock = threading.Lock()
        self.now = self.most = 0
        self.asked: list[tuple[int, bool]] = []

    def __call__(self, tp: int, sequence: bool) -> Profile:
        with self.lock:
            self.asked.append((tp, sequence))
            self.now += 1
            self.most = max(self.most, self.now)
        if tp in (2, 4) and self.at_once == 2:
            self.both.wait(60)
        if tp in self.held:
            assert self.is_ended.wait(60)
        with self.lock:
            self.now -= 1
        if tp == 8:
            raise JobError("8 does not divide the heads")
        return profile()

    def search(self, watch: Any = None) -> SearchResult:
        end = self.is_ended.set
        planner = Planner(profile(), HARDWARE, JOB, divide=self, at_once=self.at_once, end=end)
        base = Candidate(1, ParallelDims(8), 1, 4)
        space = SearchSpace(32, base=base, virtual=1, offloads=False)
        return search(planner, space, "best", watch or (lambda state: None))


def test_ways_to_divide_layers_are_traced_two_at_a_time() -> None:
    alone, together = Tracing(1), Tracing(2)
    assert together.search() == alone.search()
    assert (alone.most, together.most) == (1, 2)
    assert alone.asked == [(2, True), (4, True), (8, True), (8, False)], "slices, where they can be"
    assert sorted(together.asked) == sorted(alone.asked)


def test_whoever_interrupts_a_search_ends_what_is_traced_ahead() -> None:
    tracing = Tracing(2, held=(4, 8))

    def interrupt(state: SearchState) -> None:
        if state.tp == 4:
            assert state.best is not None
            raise KeyboardInterrupt

    found = tracing.search(interrupt)
    assert found.is_interrupted
    assert {each.candidate.dims.tp for each in found.best} <= {1, 2}
    assert tracing.is_ended.is_set()
    assert set(tracing.asked) <= {(2, True), (4, True), (8, True)}


def test_ranks_with_parts_of_layers_wait_for_each_other() -> None:
    shape = TransformerShape.gpt(BLOCKS, WIDTH, 8, seq=TOKENS, vocab=1000)
    waiting = replace(HARDWARE, wait_s=1e-3, uneven=0.1)
    quiet, real = (FormulaCostModel(shape, each, FormulaSettings()) for each in (HARDWARE, waiting))
    whole = Candidate(0, ParallelDims(1), 4, 1).key
    assert quiet.micro_batch(whole) == real.micro_batch(whole)
    before, after = (each.micro_batch(whole._replace(tp=2)).blocks[0] for each in (quiet, real))
    more = after.tp_forward.seconds - before.tp_forward.seconds
    assert more == pytest.approx(4 * 1e-3 + 0.1 * before.forward), "two sums, each of two exchanges"
    assert after.forward == before.forward


@pytest.mark.parametrize(
    ("stage", "ranks", "micro_batches", "waits"),
    [
        (0, 1, 4, 0),
        (0, 2, 1, 2),
        (1, 2, 4, 2),
        (2, 2, 1, 2),
        (2, 2, 4, 5),
        (3, 2, 1, 3),
        (3, 2, 2, 5),
    ],
)
def test_ranks_on_cores_wait_where_nothing_hides_an_exchange(
    stage: int, ranks: int, micro_batches: int, waits: int
) -> None:
    candidate = Candidate(stage, ParallelDims(ranks), 1, micro_batches)
    cores = from_rates(
        Rates({"fp32": 1e11, "bf16": 1e11}, 1e10), ranks=ranks, host_bytes=20 << 30, cores=2
    )
    on_cores = Planner(profile(), cores, JOB.model_copy(update={"device": "cpu"}))
    parts = on_cores.estimate(candidate).time.parts
    assert parts.get("waits", 0.0) == pytest.approx(waits * 500e-6)
    on_gpus = Planner(profile(), HARDWARE, JOB).estimate(candidate).time.parts
    assert "waits" not in on_gpus


def test_an_evaluation_that_takes_more_than_a_step_counts_and_is_named() -> None:
    hardware = parse_simulate("2xCPU")
    job = JOB.model_copy(update={"device": "cpu", "eval": EvalConfig(data="d:f")})
    base = Candidate(0, ParallelDims(2), 2, 1)
    plain = Planner(profile(), hardware, job).estimate(base)
    small, large = (
        Planner(replace(profile(), evaluation_bytes=Affine(0.0, size)), hardware, job).estimate(
            base
        )
        for size in (1e3, 1e9)
    )
    assert small == plain
    (before,), (after,) = plain.ranks, large.ranks
    assert (before.evaluation, after.peak) == (0, before.peak), "steps are what they were"
    states = before.allocated - before.peak.dynamic
    assert states + 2.2e9 <= after.reserved < states + 2.3e9, "and a tenth for holes"
    assert after.device_used - before.device_used == after.evaluation
    tight = replace(
        hardware, device=replace(hardware.device, memory_bytes=after.device_used - (1 << 20))
    )
    refused = Planner(replace(profile(), evaluation_bytes=Affine(0.0, 1e9)), tight, job).estimate(
        base
    )
    assert not refused.fits
    over = overshoot(refused, tight)
    assert over is not None
    assert " in an evaluation, 1.0 MiB more than its " in str(over)
    none = job.model_copy(update={"eval": None})
    assert (
        Planner(replace(profile(), evaluation_bytes=Affine(0.0, 1e9)), tight, none)
        .estimate(base)
        .fits
    )


def test_hooks_that_take_more_than_a_step_count_and_are_named() -> None:
    hardware = parse_simulate("8xCPU")
    job = JOB.model_copy(update={"device": "cpu"})
    base = Candidate(3, ParallelDims(8), 1, 1)
    plain = profile()

    def rank(stage: int = 3, **known: Any) -> RankMemory:
        planner = Planner(replace(plain, **known), hardware, job)
        (found,) = planner.estimate(replace(base, stage=stage)).ranks
        return found

    without = rank()
    assert rank(hooks_gather=True) == without, "activations take more than a step's hook"
    assert rank(hooks_gather=True, stage=2) == rank(stage=2), "parameters are whole anyway"
    text, both = rank(generation_bytes=10**9), rank(generation_bytes=10**9, hooks_gather=True)
    assert text.reserved - without.reserved == text.hook > 0
    # All but this rank's eighth, and what is gathered at a time in a step; in bf16.
    layouts = Planner(plain, hardware, job).layouts(base)
    others = sum(2 * (unit.padded_numel - unit.shard_numel) for unit in layouts)
    ring = next(each.num_bytes for each in without.buffers if each.name == "gather ring")
    assert both.hook - text.hook == others - ring > 0
    room = both.device_used - (1 << 20)
    tight = replace(hardware, device=replace(hardware.device, memory_bytes=room))
    refused = Planner(
        replace(plain, generation_bytes=10**9, hooks_gather=True), tight, job
    ).estimate(base)
    assert not refused.fits
    assert " in a hook, 1.0 MiB more than its " in str(overshoot(refused, tight))


def test_operators_of_a_kernel_cost_less_and_are_fewer_in_shorter_samples() -> None:
    columns = columns_of(profile().traces["none"].of(4), BLOCKS)
    device = replace(HARDWARE.device, launch_s=1e-5, inner_s=3e-6)
    every_other = np.arange(len(columns.family)) % 2 == 0
    mixed = columns._replace(is_inner=every_other)
    expected = np.where(every_other, 0.25 * 3e-6, 1e-5)
    np.testing.assert_allclose(launch_seconds(mixed, device, 0.25), expected)
    before, after = (trace_seconds(each, 4, device, "fp32", 0.25) for each in (columns, mixed))
    counts = columns.family < 3  # all but exchanges
    np.testing.assert_allclose((before - after)[counts], (1e-5 - expected)[counts], atol=1e-12)
    unknown = replace(device, inner_s=None)
    np.testing.assert_allclose(launch_seconds(mixed, unknown)[1:], 1e-5)


@pytest.mark.parametrize("side", [512, 1536])
@pytest.mark.parametrize(("precision", "rate"), [("fp32", 8.5e10), ("bf16", 4.2e11)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_product_that_was_measured_is_predicted_as_it_took(
    side: int, precision: str, rate: float, ranks: int
) -> None:
    """With its way from memory, which is in what was measured, and is added to each product."""
    rates = Rates(
        cpu_flops={"fp32": 8.5e10 * ranks, "bf16": 4.2e11 * ranks},
        copy=1e10 * ranks,
        cpu_side=side,
        cpu_streams={"fp32": 1.8e10 * ranks, "bf16": 1.2e10 * ranks},
        cpu_layers={"fp32": 1.3e10 * ranks, "bf16": 0.9e10 * ranks},
    )
    device = from_rates(rates, ranks=ranks, host_bytes=20 << 30, cores=ranks).device
    flops, moved = 2.0 * side**3, 3.0 * side**2 * (4 if precision == "fp32" else 2)
    product = OpColumns(
        flops=np.array([[flops, 0.0]]),
        moved=np.array([[moved, 0.0]]),
        family=np.array([0]),
        dims=np.array([[side, side, side]], dtype=float),
        owner=np.array([0]),
        is_backward=np.array([False]),
        is_wide=np.array([precision == "fp32"]),
        is_single=np.array([True]),
        is_inner=np.array([False]),
    )
    (seconds,) = trace_seconds(product, 1, device, precision)
    assert seconds - device.launch_s == pytest.approx(flops / rate, rel=1e-6)
    if precision == "fp32":
        by_formula = product_seconds(device, precision, side, side, side)
        assert by_formula == pytest.approx(seconds, rel=1e-6)
    raw = from_rates(replace(rates, cpu_side=None), ranks=ranks, host_bytes=1 << 30, cores=ranks)
    assert raw.device.flops(precision) == rate, "of a calibration that does not say the side"
    assert device.flops(precision) > rate


def test_the_main_job_is_not_divided_on_two_cores() -> None:
    """Rates of two cores with AVX2: the halves of a micro-batch of 8 for whole ones of 4."""
    rates = Rates(
        cpu_flops={"fp32": 1.7e11},
        copy=1.7e10,
        cpu_streams={"fp32": 2.5e10, "bf16": 1.4e10},
        cpu_attention={"fp32": 1.1e11},
        operator_s=1.3e-5,
        message_s=2e-4,
        message_bytes=3.9e9,
    )
    hardware = from_rates(rates, ranks=2, host_bytes=20 << 30, cores=2)
    assert (hardware.intra.latency, hardware.intra.bandwidth) == (2e-4, 3.9e9)
    planner = planner_of(GPT(6, 384, 6, seq=256, vocab=256), hardware, "fp32", divides=True)
    base = Candidate(2, ParallelDims(2), 4, 1, precision="fp32")
    divided = replace(base, dims=ParallelDims(1, tp=2), micro=8, sequence_parallel=True)
    times = [planner.estimate(each).time.seconds for each in (base, divided)]
    assert times[1] > 1.05 * times[0]
    found = search(planner, SearchSpace(8, base=base, offloads=False), "best")
    assert found.best[0].candidate.dims.tp == 1


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (Candidate(0, ParallelDims(1, tp=2), 4, 1), "tp 2: how this model is divided is not known"),
        (
            Candidate(0, ParallelDims(1), 4, 1, "selective"),
            "checkpoint selective: the model was not traced with it",
        ),
        (
            Candidate(0, ParallelDims(1), 4, 1, precision="fp32"),
            "precision fp32: the model was traced in bf16",
        ),
    ],
)
def test_what_was_not_traced_is_said(candidate: Candidate, said: str) -> None:
    with pytest.raises(JobError, match=said):
        Planner(profile(), HARDWARE, JOB).estimate(candidate)


@pytest.mark.parametrize("optim", ["sgd", "adamw"])
def test_a_save_counts_with_no_more_than_what_it_saves(optim: str) -> None:
    """Masters, and two moments if there are some; of a large model the blocks it writes from."""
    keys = {"name": "j", "model": "m:f", "data": "d:f", "steps": 1, "batch": {"micro": 1}}
    keys |= {"precision": "bf16", "device": "cpu", "optim": {"name": optim, "lr": 0.1}}

    def used(checkpoint: Any) -> int:
        job = JobConfig.model_validate({**keys, "checkpoint": checkpoint})
        planner = Planner(profile(), parse_simulate("1xCPU"), job)
        return planner.estimate(Candidate(0, ParallelDims(1), 1, 1)).ranks[0].device_used

    num_params = profile().num_params
    assert 4 * num_params < HELD_BYTES < 12 * num_params
    saved = used({"every": 1}) - used(None)
    assert saved == (4 * num_params if optim == "sgd" else HELD_BYTES)


def test_what_ranks_share_counts_once_on_their_host() -> None:
    hardware = parse_simulate("8xCPU")
    job = JOB.model_copy(update={"device": "cpu"})
    found = Planner(profile(), hardware, job).estimate(Candidate(0, ParallelDims(8), 1, 1))
    used = found.ranks[0].device_used
    assert found.host_parts["training"] == 8 * used - 7 * SHARED_BY_RANKS
    exactly = replace(hardware, host_bytes=found.host_bytes)
    exactly = replace(
        exactly,
        device=replace(hardware.device, memory_bytes=share_of_rank(found.host_bytes, 8)),
    )
    planner = Planner(profile(), exactly, job)
    assert planner.estimate(Candidate(0, ParallelDims(8), 1, 1)).fits
    less = replace(exactly, device=replace(exactly.device, memory_bytes=used - 1))
    assert not Planner(profile(), less, job).estimate(Candidate(0, ParallelDims(8), 1, 1)).fits


def test_one_rank_that_builds_on_meta_or_recomputes_imports_for_it_too() -> None:
    job = JOB.model_copy(update={"device": "cpu"})
    planner = Planner(profile(), parse_simulate("1xCPU"), job)
    factory = Candidate(0, ParallelDims(1), 1, 1)
    meta = replace(factory, init="meta")
    ranks = Candidate(0, ParallelDims(2), 1, 1)
    assert planner.outside(meta, 0) > planner.outside(factory, 0)
    assert planner.outside(replace(factory, checkpoint="full"), 0) == planner.outside(meta, 0)
    assert planner.outside(replace(ranks, init="meta"), 0) == planner.outside(ranks, 0)


def test_ranks_with_parts_of_layers_or_stages_import_the_compiler() -> None:
    known = replace(profile(), imported_bytes=0, builds_with_compiler=False)
    planner = Planner(known, parse_simulate("4xCPU"), JOB.model_copy(update={"device": "cpu"}))
    whole = planner.outside(Candidate(0, ParallelDims(2), 4, 1), 0)
    for dims in (ParallelDims(1, tp=2), ParallelDims(1, pp=2)):
        assert planner.outside(Candidate(0, dims, 4, 1), 0) == whole + COMPILER_BYTES


def test_what_the_users_code_imports_counts() -> None:
    job = JOB.model_copy(update={"device": "cpu"})
    meta = Candidate(0, ParallelDims(2), 1, 1)
    on_cpu = parse_simulate("2xCPU")
    unknown = Planner(profile(), on_cpu, job).outside(meta, 0)
    measured = replace(profile(), imported_bytes=90 << 20, builds_with_compiler=False)
    planner = Planner(measured, on_cpu, job)
    assert planner.outside(meta, 0) == unknown + (90 << 20) - COMPILER_BYTES
    recomputed = replace(meta, checkpoint="full")
    assert planner.outside(recomputed, 0) == unknown + (90 << 20)
    assert Profile.from_json(measured.to_json()) == measured


def with_experts(known: Profile) -> Profile:
    """A profile whose products are of each expert's own tokens."""
    traces = {}
    for policy, trace in known.traces.items():
        grouped = [
            operator._replace(name="_grouped_mm") if operator.family == "gemm" else operator
            for operator in trace.operators
        ]
        traces[policy] = replace(trace, operators=tuple(grouped))
    return replace(known, traces=traces)


def test_a_process_takes_holes_code_and_libraries_beyond_its_tensors() -> None:
    job = JOB.model_copy(update={"device": "cpu"})
    candidate = Candidate(0, ParallelDims(1), 1, 1)
    on_cpu = parse_simulate("1xCPU")
    known = Planner(profile(), on_cpu, job).rank(candidate, 0)
    assert known.allocated < known.reserved < known.device_used - on_cpu.device.context_bytes
    routed = Planner(replace(profile(), follows_values=True), on_cpu, job).rank(candidate, 0)
    code = routed.device_used - known.device_used
    assert code > 100 * (1 << 20)  # of as many shapes as workers keep
    assert Planner(with_experts(profile()), on_cpu, job).rank(candidate, 0) == routed
    old = replace(on_cpu, device=replace(on_cpu.device, peak={"fp32": 90e9, "bf16": 3e9}))
    bare = Planner(profile(), old, job).rank(candidate, 0)
    assert bare.device_used < known.device_used, "no code without instructions for bf16"
    assert Planner(with_experts(profile()), old, job).rank(candidate, 0) == bare


def test_a_gpu_waits_for_a_host_that_is_slower() -> None:
    """It gives all operators of a step, and some beside the model's own, one after the other."""
    candidate = Candidate(0, ParallelDims(1), 4, 3, "full")
    fast, slow = (Planner(profile(), with_host(each), JOB).time(candidate) for each in (0.0, 1e-3))
    columns = columns_of(profile().traces["full"].of(4), BLOCKS)
    operators = 120 + 3 * (60 + int((columns.family < 3).sum()))
    assert slow.seconds == pytest.approx(operators * 1e-3)
    assert slow.parts["host"] == pytest.approx(slow.seconds - fast.seconds)
    assert sum(slow.parts.values()) == pytest.approx(slow.seconds)
    assert "host" not in fast.parts
    compiled = JOB.model_copy(update={"compile": True})
    assert Planner(profile(), with_host(1e-3), compiled).time(candidate) == Planner(
        profile(), with_host(0.0), compiled
    ).time(candidate)


def test_a_core_computes_or_fetches_and_a_gpu_does_both() -> None:
    columns = columns_of(profile().traces["none"].of(4), BLOCKS)
    columns = columns._replace(moved=np.full_like(columns.moved, 1e6))
    products = columns.family == 0
    times = {}
    for name in ("CPU", "A100-80G"):
        device = replace(parse_simulate(f"2x{name}").device, launch_s=0.0)
        computing, fetching = (
            trace_seconds(
                columns, 4, replace(device, **{slow: getattr(device, slow) * fast}), "fp32"
            )
            for slow, fast in (("bandwidth", 1e9), ("gemm", 1e9))
        )
        both = trace_seconds(columns, 4, device, "fp32")[products]
        times[name] = computing[products], fetching[products], both
    computing, fetching, both = times["CPU"]
    np.testing.assert_allclose(both, computing + fetching, rtol=1e-6)
    computing, fetching, both = times["A100-80G"]
    np.testing.assert_allclose(both, np.maximum(computing, fetching), rtol=1e-6)


def test_batches_of_usual_samples_take_their_share_of_the_time() -> None:
    columns = columns_of(profile().traces["none"].of(4), BLOCKS)
    device = replace(parse_simulate("2xCPU").device, launch_s=0.0)
    whole = trace_seconds(columns, 4, device, "fp32")
    np.testing.assert_allclose(trace_seconds(columns, 4, device, "fp32", 0.25), whole / 4)


def test_speed_is_that_of_the_samples_whose_time_it_is() -> None:
    candidate = Candidate(0, ParallelDims(1), 4, 3)
    longest = replace(profile(), tokens_per_sample=100)
    usual = replace(longest, is_ragged=True, usual_share=0.25)
    all_long, found = (
        Planner(each, HARDWARE, JOB).estimate(candidate) for each in (longest, usual)
    )
    assert found.ranks == all_long.ranks, "memory is that of the longest"
    assert found.time.parts["compute"] < all_long.time.parts["compute"]
    samples = found.time.samples_per_s
    assert found.time.tokens_per_s == pytest.approx(25 * samples)
    assert found.time.model_flops == pytest.approx(all_long.time.model_flops / 4)


def test_a_step_waits_for_its_samples_and_takes_what_the_runtime_takes() -> None:
    job = JOB.model_copy(update={"device": "cpu"})
    on_cpu = parse_simulate("2xCPU")
    candidate = Candidate(0, ParallelDims(2), 4, 3)
    without = Planner(profile(), on_cpu, job).time(candidate)
    slow = replace(profile(), sample_s=0.25)
    found = Planner(slow, on_cpu, job).time(candidate)
    assert found.parts["data"] == pytest.approx(0.25 * 4 * 3)
    assert found.seconds == pytest.approx(without.seconds + 3.0)
    assert found.parts["runtime"] == without.parts["runtime"]
    assert found.parts["runtime"] == pytest.approx((120 + 3 * 60) * on_cpu.device.launch_s)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    ahead = job.model_copy(update={"data": job.data.model_copy(update={"workers": 2})})
    assert Planner(slow, on_cpu, ahead).time(candidate) == without
    on_gpu = Planner(slow, parse_simulate("2xA100-80G"), JOB).time(candidate)
    assert not {"data", "runtime"} & on_gpu.parts.keys()
