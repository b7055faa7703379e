"""Step times: those that were published, and what must hold of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from formula_cost import FormulaCostModel, FormulaSettings
from formulas import TransformerShape

from zrun_core.hardware.hardware import Hardware
from zrun_core.hardware.simulated import parse_simulate
from zrun_core.memory.buffers import Placement, Tier
from zrun_core.plan.question.candidate import Candidate
from zrun_core.plan.timing.timing import StepTime, step_time
from zrun_core.spine.parallel_dims import ParallelDims

# Korthikanti et al. 2022, tables 3 and 5: layers, width, heads; stages, parts of each; micro-batch
# and batch; seconds of an iteration with full recomputation, and with theirs (sequence parallelism,
# attention recomputed); MFU and HFU.
KORTHIKANTI = {
    "22B": (48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10, 0.415, 0.437),
    "175B": (96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75, 0.514, 0.528),
    "530B": (105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83, 0.560, 0.570),
    "1T": (128, 25600, 160, 64, 1, 1, 512, 94.42, 71.49, 0.563, 0.570),
}
# Megatron's kernels: what lies between products is fused, and gradients are added where they are
# made.
MEGATRON = FormulaSettings(fused=True, fused_accumulation=True)


def megatron(shape: TransformerShape, hardware: Hardware, candidate: Candidate) -> StepTime:
    return step_time(FormulaCostModel(shape, hardware, MEGATRON), candidate, shape.seq)


def korthikanti(name: str, *, present: bool) -> tuple[TransformerShape, StepTime]:
    layers, hidden, heads, pp, virtual, micro, batch, *_ = KORTHIKANTI[name]
    shape = TransformerShape.gpt(layers, hidden, heads, flash=False)
    candidate = Candidate(
        0,
        ParallelDims(1, tp=8, pp=pp, virtual=virtual),
        micro,
        batch // micro,
        "attention" if present else "full",
        "fp16",
        sequence_parallel=present,
        schedule="interleaved" if virtual > 1 else "1f1b",
    )
    return shape, megatron(shape, parse_simulate(f"{pp}x8xA100-80G"), candidate)


@pytest.mark.parametrize("name", KORTHIKANTI)
@pytest.mark.at_most(2)
def test_published_iteration_times_within_nine_percent(name: str) -> None:
    *_, full, present, mfu, hfu = KORTHIKANTI[name]
    assert korthikanti(name, present=False)[1].seconds == pytest.approx(full, rel=0.09)
    found = korthikanti(name, present=True)[1]
    assert found.seconds == pytest.approx(present, rel=0.09)
    assert found.mfu is not None
    assert found.hfu is not None
    assert found.mfu == pytest.approx(mfu, rel=0.09)
    assert found.hfu == pytest.approx(hfu, rel=0.09)


@pytest.mark.parametrize("name", KORTHIKANTI)
@pytest.mark.at_most(2)
def test_operations_are_the_published_formulas(name: str) -> None:
    layers, hidden, _, pp, _, _, batch, *_ = KORTHIKANTI[name]
    seq, vocab = 2048, 51200
    shape, found = korthikanti(name, present=False)
    once = 72 * batch * layers * seq * hidden**2
    model = once * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    assert found.model_flops == pytest.approx(model, rel=1e-9)
    recompute = (
        96
        * batch
        * layers
        * seq
        * hidden**2
        * (1 + seq / (6 * hidden) + vocab / (16 * hidden * layers))
    )
    assert found.hardware_flops == pytest.approx(recompute, rel=1e-9), (
        "Narayanan et al. 2021, equation 3"
    )
    assert found.mfu == pytest.approx(model / (found.seconds * 8 * pp * 312e12), rel=1e-9)
    assert shape.model_flops(batch) == pytest.approx(model, rel=1e-9)


@pytest.mark.thorough
def test_aggregates_of_narayanan_are_in_range() -> None:
    """Their table 1, with full recomputation: 135 to 163 TFLOP/s per A100, 502 PFLOP/s in all for a
    trillion.
    """
    rows = [
        (36, 4096, 32, 4, 1, 128, 512, 142),
        (80, 12288, 96, 8, 8, 1536, 2304, 148),
        (128, 25600, 160, 8, 64, 3072, 3072, 163),
    ]
    for layers, hidden, heads, tp, pp, devices, batch, wanted in rows:
        shape = TransformerShape.gpt(layers, hidden, heads, flash=False)
        virtual = 2 if pp > 1 and layers % (2 * pp) == 0 else 1
        dims = ParallelDims(devices // tp // pp, tp=tp, pp=pp, virtual=virtual)
        schedule = "interleaved" if virtual > 1 else "1f1b"
        candidate = Candidate(0, dims, 1, batch // dims.dp, "full", "fp16", schedule=schedule)
        found = megatron(shape, parse_simulate(f"{devices // 8}x8xA100-80G"), candidate)
        assert found.hardware_flops / found.seconds / devices / 1e12 == pytest.approx(
            wanted, rel=0.2
        )


def test_llama_405b_is_in_range() -> None:
    """Dubey et al. 2024, table 4: 8,192 H100, tp 8, pp 16, dp 64, 16 million tokens.

    They had 430 TFLOP/s each.
    """
    shape = TransformerShape.llama(126, 16384, 128, kv_heads=8, ffn=53248, vocab=128256, seq=8192)
    candidate = Candidate(
        1, ParallelDims(64, tp=8, pp=16), 1, 32, "none", "bf16", sequence_parallel=True
    )
    found = megatron(shape, parse_simulate("1024x8xH100-80G"), candidate)
    assert found.mfu == pytest.approx(0.43, rel=0.2)


# What must hold of all

GPT = TransformerShape.gpt(24, 2048, 16, seq=1024)


def timed(
    hardware: str, stage: int, dims: ParallelDims, count: int = 4, **more: object
) -> StepTime:
    candidate = replace(Candidate(stage, dims, 2, count), **more)  # type: ignore[arg-type]
    return step_time(
        FormulaCostModel(GPT, parse_simulate(hardware), FormulaSettings()), candidate, GPT.seq
    )


def test_the_parts_are_the_step() -> None:
    for dims, schedule in (
        (ParallelDims(8), "1f1b"),
        (ParallelDims(2, tp=4), "1f1b"),
        (ParallelDims(2, pp=4), "1f1b"),
        (ParallelDims(2, pp=4), "gpipe"),
        (ParallelDims(2, pp=4), "zero_bubble"),
        (ParallelDims(2, pp=4, virtual=2), "interleaved"),
    ):
        found = timed("8xA100-80G", 1, dims, schedule=schedule)
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert found.low < found.seconds < found.high
        assert (found.high - found.seconds) / found.seconds == pytest.approx(0.25)
        assert found.tokens_per_s == pytest.approx(2 * 4 * dims.dp * 1024 / found.seconds)


def test_bytes_per_link_are_the_stages_traffic() -> None:
    """In elements: 2P, P + P, P + KP, 2KP + KP, times (N - 1) / N; parameters in bf16, gradients in
    fp32.
    """
    count, share = 4, 7 / 8
    gathered, reduced = 2 * GPT.num_params * share, 4 * GPT.num_params * share
    wanted = [
        2 * reduced,
        gathered + reduced,
        gathered + count * reduced,
        2 * count * gathered + count * reduced,
    ]
    for stage, num_bytes in enumerate(wanted):
        assert timed("8xA100-80G", stage, ParallelDims(8), count).link_bytes == {
            "node": pytest.approx(num_bytes, rel=1e-6)
        }
    across = timed("2x4xA100-80G", 1, ParallelDims(8), count).link_bytes
    assert across["node"] + across["network"] == pytest.approx(wanted[1], rel=1e-6)
    inside = timed("2x4xA100-80G", 1, ParallelDims(8, shard=4), count).link_bytes
    assert inside["network"] == pytest.approx(4 * GPT.num_params / 4, rel=1e-6), (
        "copies are summed across nodes only"
    )


def test_layers_first_gathers_twice_per_step() -> None:
    def first(count: int, layer_major: bool) -> StepTime:
        hardware = "4x8xA100-80G@1x10G"
        return timed(
            hardware, 3, ParallelDims(32), count, schedule="layer_major" if layer_major else "1f1b"
        )

    plain, layers = first(4, False), first(4, True)
    share = 31 / 32
    saved = 2 * 2 * GPT.num_params * share * 3
    assert sum(plain.link_bytes.values()) - sum(layers.link_bytes.values()) == pytest.approx(
        saved, rel=1e-6
    )
    assert layers.seconds < plain.seconds
    assert first(1, True).seconds == first(1, False).seconds


def test_a_slow_network_shows_and_a_fast_one_hides() -> None:
    fast, slow = (timed(f"4x8xA100-80G@{link}", 3, ParallelDims(32)) for link in ("NDR", "1x10G"))
    assert fast.parts.get("exposed transfers", 0) < 0.2 * fast.seconds
    assert slow.parts["exposed transfers"] > slow.parts["compute"]
    assert slow.parts["compute"] == fast.parts["compute"]


def test_recomputation_costs_a_forward_pass() -> None:
    plain, full = (
        timed("1xA100-80G", 0, ParallelDims(1), checkpoint=policy) for policy in ("none", "full")
    )
    assert full.parts["recompute"] == pytest.approx(full.seconds - plain.seconds, rel=1e-6)
    assert 0.2 < full.parts["recompute"] / plain.parts["compute"] < 0.4
    assert full.hfu is not None
    assert full.mfu is not None
    assert plain.mfu is not None
    assert full.mfu < plain.mfu
    assert full.hfu > full.mfu
    half = timed("1xA100-80G", 0, ParallelDims(1), checkpoint="every_n")
    assert half.parts["recompute"] == pytest.approx(full.parts["recompute"] / 2, rel=1e-6)


def test_an_update_on_the_host_hides_under_forward_or_shows() -> None:
    away = Placement(grad=Tier.HOST, optimizer=Tier.HOST)
    there = timed("1xA100-80G", 0, ParallelDims(1), 64)
    short, long = (
        timed("1xA100-80G", 0, ParallelDims(1), count, placement=away) for count in (1, 64)
    )
    assert short.parts["exposed transfers"] > 0
    assert long.seconds == pytest.approx(there.seconds, rel=0.05), "one update for 64 micro-batches"
    some = timed("1xA100-80G", 0, ParallelDims(1), 1, placement=replace(away, fraction=0.25))
    assert there.seconds / 64 < some.seconds < short.seconds
    disk = timed(
        "1xA100-80G",
        0,
        ParallelDims(1),
        1,
        placement=Placement(grad=Tier.HOST, optimizer=Tier.DISK),
    )
    assert disk.seconds > short.seconds


def test_checkpoints_on_the_host_take_their_time_on_the_bus() -> None:
    away = Placement(activation=Tier.HOST)
    found = timed("1xA100-80G", 0, ParallelDims(1), 4, checkpoint="full", placement=away)
    assert found.seconds >= timed("1xA100-80G", 0, ParallelDims(1), 4, checkpoint="full").seconds


def test_time_on_a_cpu_has_no_share_of_a_data_sheet() -> None:
    found = timed("2xCPU", 2, ParallelDims(2))
    assert (found.mfu, found.hfu) == (None, None)
    assert found.parts["exposed transfers"] > 0, "the cores move the bytes themselves"


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_all_that_is_pushed_and_pulled_passes_the_link_of_a_parameter_server(
    num_ranks: int,
) -> None:
    hardware = parse_simulate(f"{num_ranks}xCPU")
    candidate = Candidate(0, ParallelDims(num_ranks), 1, 1, "none", "fp32")

    def time(**settings: bool) -> StepTime:
        model = FormulaCostModel(GPT, hardware, FormulaSettings(**settings))
        return step_time(model, candidate, GPT.seq)

    ring, server = time(), time(through_first=True)
    late = time(through_first=True, updates_apart=True)
    moved = 4 * GPT.num_params * (num_ranks - 1)
    assert server.link_bytes["node"] == pytest.approx(moved, rel=1e-3)
    assert ring.link_bytes["node"] == pytest.approx(2 * moved / num_ranks, rel=1e-3)
    assert late.link_bytes == server.link_bytes
    assert late.parts["update"] > 0.9 * num_ranks * server.parts["update"]
    if num_ranks > 2:
        assert server.seconds > ring.seconds
