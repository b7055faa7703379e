"""The papers' tables, to the precision that they print, and the planner by the same formulas.

Where a paper rounds or slips, the test says how.
"""

from __future__ import annotations

import paper_formulas as paper
import pytest
import torch
from formulas import TransformerShape

from zrun_core.memory.buffers import Kind, Placement, Tier
from zrun_core.models.gpt import gpt
from zrun_core.plan.memory.states import PlannedModel, plan_model, rank_buffers, settings_of
from zrun_core.plan.question.size import gpt_of_size
from zrun_core.spine.config import JobConfig
from zrun_core.spine.parallel_dims import ParallelDims
from zrun_core.zero.wrap.sharding_config import ShardingConfig

GB, GIB, TIB = 1e9, 2**30, 2**40
B, T = 1e9, 1e12
A100 = 312e12  # half precision


# The planner by the papers' formulas

SIZED_7B5 = gpt_of_size("7.5B")


def planned(stage: int) -> tuple[ShardingConfig, PlannedModel]:
    """What zrun would allocate, with gradients of 2 bytes as the papers have them."""
    job = {
        "name": "plan",
        "model": "m:m",
        "data": "d:d",
        "steps": 1,
        "batch": 8,
        "precision": {"compute": "bf16", "reduce": "compute"},
        "zero": stage,
    }
    settings = settings_of(JobConfig.model_validate(job), lambda name: None, "cuda")
    with torch.device("meta"):
        model = gpt(**SIZED_7B5.args())
    return settings, plan_model(model, settings)


def state_bytes(
    stage: int, dp: int, placement: Placement | None = None, tier: Tier = Tier.DEVICE
) -> int:
    settings, model = planned(stage)
    buffers = rank_buffers(
        model, settings, ParallelDims(dp), placement=placement or Placement(), device="cuda"
    )
    states = (Kind.PARAM, Kind.GRAD, Kind.OPTIM)
    return sum(b.num_bytes for b in buffers if b.kind in states and b.tier is tier)


@pytest.mark.parametrize("dp", [1, 4, 64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_planned_states_are_those_of_the_papers(stage, dp):
    """7.5B parameters of table 1 and figure 1: all but the padding of units to equal shards of
    whole pages.
    """
    expected = paper.model_states(SIZED_7B5.num_params, stage, dp)
    assert expected <= state_bytes(stage, dp) <= expected * 1.005


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("optimizer", [False, True])
def test_planned_offload_is_that_of_the_paper(grads, optimizer):
    """ZeRO-Offload, table 1, of a model on one device."""
    expected = paper.offload(SIZED_7B5.num_params, grads=grads, optimizer=optimizer)
    placement = Placement(
        grad=Tier.HOST if grads else Tier.DEVICE,
        optimizer=Tier.HOST if optimizer else Tier.DEVICE,
    )
    found = [state_bytes(2, 1, placement, tier) for tier in (Tier.DEVICE, Tier.HOST)]
    assert found == pytest.approx([expected.device, expected.host], rel=0.001)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(48, 1600, 25), (125, 8192, 64)])
def test_planned_checkpoints_and_parameters_are_those_of_the_papers(layers, hidden, heads):
    """One input per layer (ZeRO, section 6.1), and 12 * layers * hidden^2 in matrices."""
    shape = TransformerShape.gpt(layers, hidden, heads, seq=1024)
    kept = layers * shape.block_activations(32, recompute="full")
    assert kept == paper.checkpoints(32, 1024, hidden, layers)
    infinity = paper.Infinity(layers, hidden, heads)
    assert kept == infinity.checkpoints(32)
    assert layers * shape.layer_params == pytest.approx(infinity.params, rel=13 / (12 * hidden))


@pytest.mark.parametrize("tokens", [300 * B, 450 * B])
def test_planned_operations_take_the_days_of_the_paper(tokens):
    """Narayanan et al. 2021, equation 4, which leaves attention and the logits out."""
    shape = TransformerShape.gpt(96, 12288, 96)
    samples = tokens / shape.seq
    days = shape.hardware_flops(1, "full") * samples / (1024 * 140 * T) / 86400
    assert days == pytest.approx(paper.days(tokens, shape.num_params, 1024, 140 * T), rel=0.03)


# Rajbhandari et al. 2020, "ZeRO"

# Table 1: GB per device of Pos / Pos+g / Pos+g+p, for 7.5B, 128B and 1T parameters.
TABLE_1 = {
    1: [(120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)],
    4: [(52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)],
    16: [(35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)],
    64: [(31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)],
    256: [(30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)],
    1024: [(30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)],
}


@pytest.mark.parametrize("dp", TABLE_1)
def test_zero_table_1(dp):
    """It rounds some numbers and cuts others off (4187.5 is printed as 4187, 257.75 as 257): within
    one last digit.
    """
    for params, row in zip((7.5 * B, 128 * B, T), TABLE_1[dp], strict=True):
        for stage, printed in enumerate(row, 1):
            digits = len(str(printed).partition(".")[2])
            assert abs(paper.model_states(params, stage, dp) / GB - printed) < 10.0**-digits, (
                params,
                stage,
            )


def test_zero_table_1_to_the_byte():
    assert [paper.model_states(7.5 * B, stage, 64) / GB for stage in range(4)] == [
        120,
        31.40625,
        16.640625,
        1.875,
    ]
    assert [paper.model_states(T, stage, 1024) / GB for stage in (1, 2, 3)] == [
        4011.71875,
        2013.671875,
        15.625,
    ]


def test_zero_figure_1():
    assert [round(paper.model_states(7.5 * B, stage, 64) / GB, 1) for stage in range(4)] == [
        120,
        31.4,
        16.6,
        1.9,
    ]


def test_zero_table_2():
    """Largest models on 32 GB.

    Its rows below the first are multiples of the rounded first row: 15.2B is 2 * 7.6B.
    """
    first = [paper.largest_model(32 * GB, stage, 64) / B for stage in range(4)]
    assert [round(value, 1) for value in first] == [2, 7.6, 14.4, 128]
    printed = {
        2: (4, 15.2, 28.8, 256),
        4: (8, 30.4, 57.6, 512),
        8: (16, 60.8, 115.2, 1024),
        16: (32, 121.6, 230.4, 2048),
    }
    for mp, row in printed.items():
        assert [round(mp * round(value, 1), 1) for value in first] == list(row)
        exact = [paper.largest_model(32 * GB, stage, 64, mp) / B for stage in range(4)]
        assert exact == pytest.approx(row, rel=0.006)
    assert [round(paper.largest_model(32 * GB, 1, 64, mp) / B, 2) for mp in (1, 2, 4, 8, 16)] == [
        7.64,
        15.28,
        30.57,
        61.13,
        122.27,
    ]
    # Measured beside it: 1.3B and 6.2B of 2B and 7.6B; activations and buffers take the rest.
    assert (round(1.3 / first[0], 2), round(6.2 / first[1], 2)) == (0.65, 0.81)


def test_zero_traffic():
    """Section 7: 2P, 2P, 2P, 3P elements.

    With accumulation stage 3 is dearer than the paper's case of one.
    """
    assert [paper.traffic(1, stage).total for stage in range(4)] == [2, 2, 2, 3]
    assert [paper.traffic(1, stage, 4).total for stage in range(4)] == [2, 2, 5, 12]
    assert paper.on_the_wire(paper.traffic(1, 3).total, 4) == 2.25
    mp, added = paper.partition_traffic(32, 1024, 8192)
    assert added / mp < 0.1
    assert round(100 * added / mp, 1) == 8.3


def test_zero_gpt2():
    """1.5B parameters of 48 x 1600: 24 GB of states, 60 GB of activations, 8 GB with checkpoints.

    The footnote says 12 * hidden * batch * seq * layers bytes; 60 GB are that many elements of two
    bytes. The 8 GB are
    the square root of 48 layers: a checkpoint per layer and a live one take 6.3 GB.
    """
    assert paper.model_states(1.5 * B, 0, 1) / GB == 24
    activations = paper.block_activations(32, 1024, 1600, 48)
    assert round(activations / GB, 1) == 60.4
    assert round(activations / 48**0.5 / GB, 1) == 8.7
    kept = paper.checkpoints(32, 1024, 1600, 48) + activations / 48
    assert round(kept / GB, 1) == 6.3
    assert kept / GB == pytest.approx(8, rel=0.3)


def test_what_an_eager_gpt2_keeps_is_more_than_the_papers_estimate():
    """Korthikanti's count of tensors, with the attention matrix: several times "12 * hidden"."""
    sizes = []
    for heads in (16, 25):
        shape = TransformerShape.gpt(48, 1600, heads, seq=1024, flash=False)
        sizes.append(round(48 * shape.block_activations(32) / GB))
    assert sizes == [214, 287]


def test_zero_100b_with_partitioned_checkpoints():
    """125 x 8192, seq 1024: 33 GB are 2 GB with Pa at 16.

    The text says batch 32, of which they are half: batch 16.
    """
    assert round(paper.checkpoints(16, 1024, 8192, 125) / GB, 2) == 33.55
    sizes = [
        paper.checkpoints(batch, 1024, 8192, 125, mp) / GB
        for batch, mp in ((16, 1), (16, 16), (32, 1))
    ]
    assert [round(size, 2) for size in sizes] == [33.55, 2.1, 67.11]
    assert round(sizes[2] * GB / GIB, 1) == 62.5, 'the text\'s "about 60 GB"'


def test_zero_fused_buffers():
    assert [paper.fused_buffer(params) / GB for params in (1.5 * B, 3 * B)] == [6, 12]


def test_a_trillion_parameters():
    assert paper.model_states(T, 0, 1) == 16 * T == 400 * 40 * GB
    assert paper.model_states(T, 3, 400) / GB == 40
    per_device = T / (8 * 64)  # on 4,096 devices, 8 of each layer and 64 stages, 8 times
    assert 8 * 64 * 8 == 4096
    assert round(per_device / B, 3) == 1.953
    assert [round(paper.model_states(per_device, stage, 8) / GB, 2) for stage in (0, 1)] == [
        31.25,
        10.74,
    ]


def test_pipeline_efficiency():
    """81 and 90 percent are those of 16 stages with 4 and 8 micro-batches each; 64 stages have 80
    and 89.
    """
    found = {
        stages: [
            round(100 * paper.pipeline_efficiency(stages, per_stage * stages), 1)
            for per_stage in (4, 8)
        ]
        for stages in (8, 9, 16, 64)
    }
    assert found == {8: [82.1, 90.1], 9: [81.8, 90.0], 16: [81.0, 89.5], 64: [80.3, 89.0]}
    assert paper.pipeline_efficiency(8, 32, virtual=7) == 32 / 33


# Ren et al. 2021, "ZeRO-Offload"


def test_offload_placements():
    cases = [(False, False), (True, False), (False, True), (True, True)]
    assert [paper.offload(1, grads=g, optimizer=o).device for g, o in cases] == [16, 14, 4, 2]
    assert [paper.offload(1, grads=g, optimizer=o).host for g, o in cases] == [0, 2, 12, 14]
    assert [paper.offload(1, grads=g, optimizer=o).moved for g, o in cases] == [0, 4, 4, 4], (
        "4P is the least there is"
    )


def test_cpu_adam():
    """The paper measures 0.22 s per billion parameters, on a host of about 150 GB/s."""
    assert paper.cpu_adam_seconds(B, 150 * GB) == pytest.approx(0.2)


# Rajbhandari et al. 2021, "ZeRO-Infinity"

# Figure 2a: parameters (T), layers, hidden, heads -> states, activations and checkpoints (TiB; the
# latter two of a node with a batch of 32), and per GPU with a batch of 2 working memory of states
# and of activations (GiB).
INFINITY = [
    (
        (0.10, 80, 10240, 128),
        (1.83, 2.03, 0.05, 1.56, 1.63),
    ),  # the paper prints 1.95 for 1.56, as no other row does
    ((0.50, 100, 20480, 160), (9.16, 3.91, 0.12, 6.25, 2.50)),
    ((1.01, 128, 25600, 256), (18.31, 7.13, 0.20, 9.77, 3.56)),
    ((10.05, 195, 65536, 512), (182.81, 24.38, 0.76, 64.00, 8.00)),
    ((101.47, 315, 163840, 1024), (1845.70, 88.59, 3.08, 400.00, 18.00)),
]


@pytest.mark.parametrize(("model", "row"), INFINITY)
def test_infinity_figure_2a(model, row):
    params, *numbers = model
    shape = paper.Infinity(*numbers)
    assert round(shape.params / T, 2) == params
    found = (
        shape.states / TIB,
        shape.activations(32) / TIB,
        shape.checkpoints(32) / TIB,
        shape.working_states / GIB,
        shape.working_activations(2) / GIB,
    )
    assert [f"{value + 1e-9:.2f}" for value in found] == [f"{value:.2f}" for value in row]


def test_infinity_efficiency():
    """Section 4.2, on V100s that reach 70 TFLOP/s."""
    peak = 70e12
    small, wide = paper.Infinity(1, 2048, 16), paper.Infinity(1, 8192, 16)
    assert round(100 * paper.efficiency(small.intensity_of_params(1), 70 * GB, peak), 1) == 50.6
    assert (
        round(100 * paper.efficiency(small.intensity_of_optimizer(2), 1500 * GB, peak), 1) == 91.6
    )
    assert round(100 * paper.efficiency(small.intensity_of_checkpoints(), 2 * GB, peak)) == 58
    assert round(100 * paper.efficiency(wide.intensity_of_checkpoints(), 1 * GB, peak)) == 74


def test_infinity_intensities_are_operations_per_byte():
    """Forward, backward and recomputation are 8 * tokens * params; 4 trips of 2-byte parameters and
    gradients.
    """
    shape, batch = paper.Infinity(10, 1024, 16), 3
    flops = 8 * batch * shape.seq * shape.params
    assert flops / (8 * shape.params) == shape.intensity_of_params(batch)
    assert flops / (32 * shape.params) == shape.intensity_of_optimizer(batch)
    assert flops / (2 * shape.checkpoints(batch)) == shape.intensity_of_checkpoints(), (
        "written and read"
    )


# Korthikanti et al. 2022: seq 2048, vocabulary 51200, 8 tensor-parallel ranks

# layers, hidden, heads, pipeline stages, parts of each, micro-batch, batch, GPUs ->
# GiB of states (18 bytes), GiB of activations with TP and with SP + selective, percent of TP in
# figure 7.
KORTHIKANTI = {
    "22B": (
        (48, 6144, 64, 1, 1, 4, 4, 8),
        (45.56, 59.25, 9.56),
        (66.8, 49.4, 16.1, 7.6),
        (1.42, 1.10),
        (41.5, 43.7),
    ),
    "175B": (
        (96, 12288, 96, 8, 3, 1, 64, 64),
        (45.56, 66.84, 12.35),
        (62.0, 56.5, 18.5, 8.7),
        (18.13, 13.75),
        (51.4, 52.8),
    ),
    "530B": (
        (105, 20480, 128, 35, 3, 1, 280, 280),
        (31.64, 114.02, 23.08),
        (58.3, 61.9, 20.2, 9.5),
        (49.05, 37.83),
        (56.0, 57.0),
    ),
    "1T": (
        (128, 25600, 160, 64, 1, 1, 512, 512),
        (32.96, 131.25, 26.56),
        (58.3, 61.9, 20.2, 9.5),
        (94.42, 71.49),
        (56.3, 57.0),
    ),
}


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_korthikanti_memory(name):
    """Figures 1 and 7. Its 18 bytes per parameter are the paper's 16, and gradients in fp32."""
    (layers, hidden, heads, pp, virtual, micro, _, _), memory, shares, _, _ = KORTHIKANTI[name]
    shape = TransformerShape.gpt(layers, hidden, heads, flash=False)

    def first_stage(**options):
        return paper.first_stage_activations(shape, micro, tp=8, pp=pp, virtual=virtual, **options)

    plain = first_stage()
    both = first_stage(sequence_parallel=True, recompute="attention")
    states = 18 * 12 * layers * hidden**2 / (8 * pp)
    assert [round(value / GIB, 2) for value in (states, plain, both)] == pytest.approx(
        memory, abs=0.00501
    )
    found = [
        first_stage(sequence_parallel=True),
        first_stage(recompute="attention"),
        both,
        first_stage(recompute="full"),
    ]
    assert [100 * value / plain for value in found] == pytest.approx(shares, abs=0.2)


def test_korthikanti_table_2():
    """Activation bytes per layer, in units of seq * batch * hidden."""
    shape, tp = TransformerShape.gpt(96, 12288, 96, flash=False), 8
    a = 5 * 96 * 2048 / 12288
    unit = 2048 * 12288
    cases = {
        34 + a: {},
        10 + 24 / tp + a / tp: {"tp": tp},
        34 / tp + a / tp: {"tp": tp, "sequence_parallel": True},
        10 + 24 / tp: {"tp": tp, "recompute": "attention"},
        34 / tp: {"tp": tp, "sequence_parallel": True, "recompute": "attention"},
        2: {"tp": tp, "recompute": "full"},
    }
    for expected, options in cases.items():
        assert shape.block_activations(1, **options) / unit == pytest.approx(expected, rel=1e-12)


def test_korthikanti_selective_saves():
    """Section 5: 70 % of GPT-3's activations and 65 % of MT-NLG's, for 2.7 and 1.6 % more
    operations.

    The paper counts 1 + s/3h for hardware: twice the attention of a step. Its two products are made
    again, which is a
    third of that: `hardware_flops` says so, and the paper's HFU is recovered by its own formula.
    """
    found = []
    for layers, hidden, heads in ((96, 12288, 96), (105, 20480, 128)):
        shape = TransformerShape.gpt(layers, hidden, heads, flash=False)
        saved = 1 - shape.block_activations(1, recompute="attention") / shape.block_activations(1)
        step = shape.model_flops(1)
        again = hardware_flops_of_the_paper(shape, 1) / step - 1
        found.append((round(100 * saved, 1), round(100 * again, 1)))
        assert shape.hardware_flops(1, "attention") / step - 1 == pytest.approx(again / 3)
    assert found == [(70.2, 2.7), (65.3, 1.6)]


def hardware_flops_of_the_paper(shape: TransformerShape, samples: int) -> float:
    """Equation 8: 72BLsh^2(1 + s/3h + V/12hL)."""
    h, s, layers = shape.hidden, shape.seq, shape.layers
    return 72 * samples * layers * s * h**2 * (1 + s / (3 * h) + shape.vocab / (12 * h * layers))


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_korthikanti_utilisation(name):
    """Table 5. The seconds are printed to two digits: 22B in 1.10 s computes to 41.7 and 43.8 %."""
    (layers, hidden, heads, _, _, _, batch, devices), _, _, (_, seconds), (mfu, hfu) = KORTHIKANTI[
        name
    ]
    shape = TransformerShape.gpt(layers, hidden, heads)
    per_second = [
        flops / seconds / devices / A100
        for flops in (shape.model_flops(batch), hardware_flops_of_the_paper(shape, batch))
    ]
    assert [100 * value for value in per_second] == pytest.approx([mfu, hfu], abs=0.25)


def test_korthikanti_on_2240_gpus():
    shape = TransformerShape.gpt(105, 20480, 128)
    assert round(100 * shape.model_flops(2240) / 39.15 / 2240 / A100, 1) == 54.2


# Narayanan et al. 2021: seq 2048, vocabulary 51200

# Table 1: billions of parameters, layers, hidden, heads, batch, GPUs, teraFLOP/s per GPU, of the
# peak (%), petaFLOP/s.
NARAYANAN = [
    (1.7, 24, 2304, 24, 512, 32, 137, 44, 4.4),
    (3.6, 30, 3072, 32, 512, 64, 138, 44, 8.8),
    (7.5, 36, 4096, 32, 512, 128, 142, 46, 18.2),
    (18.4, 40, 6144, 48, 1024, 256, 135, 43, 34.6),
    (39.1, 48, 8192, 64, 1536, 512, 138, 44, 70.8),
    (76.1, 60, 10240, 80, 1792, 1024, 140, 45, 143.8),
    (145.6, 80, 12288, 96, 2304, 1536, 148, 47, 227.1),
    (310.1, 96, 16384, 128, 2160, 1920, 155, 50, 297.4),
    (529.6, 105, 20480, 128, 2520, 2520, 163, 52, 410.2),
    (1008.0, 128, 25600, 160, 3072, 3072, 163, 52, 502.0),
]


@pytest.mark.parametrize(
    ("params", "layers", "hidden", "heads", "batch", "gpus", "tflops", "share", "total"), NARAYANAN
)
def test_narayanan_table_1(params, layers, hidden, heads, batch, gpus, tflops, share, total):
    """Its aggregates are of rates that it rounds to whole teraFLOP/s beside them."""
    shape = TransformerShape.gpt(layers, hidden, heads)
    s, v = 2048, 51200
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (v + s) / (12 * layers * hidden))
    assert shape.num_params - 2 * hidden == pytest.approx(formula, rel=1e-12), (
        "it leaves the last norm out"
    )
    assert round(shape.num_params / B, 1) == params
    assert round(100 * tflops * T / A100) == share
    assert gpus * tflops / 1000 == pytest.approx(total, abs=gpus * 0.5 / 1000 + 0.05)
    flops = (
        96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    )
    assert shape.hardware_flops(batch, "full") == pytest.approx(flops, rel=1e-12), "equation 3"


def test_narayanan_times():
    """Section 5.1: a trillion parameters in about three months, GPT-3 in 34 days."""
    shape = TransformerShape.gpt(128, 25600, 160)
    flops = shape.hardware_flops(3072, "full")
    assert f"{flops:.2e}" == "5.14e+19"
    assert round(flops / (3072 * 163 * T), 1) == 102.6
    assert round(paper.days(450 * B, 1008 * B, 3072, 163 * T)) == 84
    assert round(paper.days(300 * B, 175 * B, 1024, 140 * T), 1) == 33.9


# Dubey et al. 2024, "The Llama 3 Herd of Models"

LLAMA_405B = TransformerShape.llama(126, 16384, 128, kv_heads=8, ffn=53248, vocab=128256, seq=8192)


def test_llama_405b():
    assert round(LLAMA_405B.num_params / B, 3) == 405.853
    assert round(LLAMA_405B.layer_params / B, 4) == 3.1877
    assert round(LLAMA_405B.num_params / (8 * 16) / B, 2) == 3.17


@pytest.mark.parametrize(
    ("gpus", "tp", "cp", "pp", "dp", "seq", "tflops", "mfu"),
    [
        (8192, 8, 1, 16, 64, 8192, 430, 43),
        (16384, 8, 1, 16, 128, 8192, 400, 41),
        (16384, 8, 16, 16, 8, 131072, 380, 38),
    ],
)
def test_llama_405b_table_4(gpus, tp, cp, pp, dp, seq, tflops, mfu):
    """Table 4. 400 of 989 teraFLOP/s are 40.4 %, printed as 41: its rates are rounded."""
    assert tp * cp * pp * dp == gpus
    assert 100 * tflops / 989 == pytest.approx(mfu, abs=0.6)
    assert 16 * 2**20 % (seq * dp) == 0, "16M tokens per step are whole samples"


# You et al. 2020, "Large Batch Optimization for Deep Learning"


def test_lamb_takes_what_adam_takes():
    assert paper.LAMB_BYTES == paper.ADAM_BYTES == 12
