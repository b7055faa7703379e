"""Number formats: stages agree to the bit; overflow and clipping are decided over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from toys import build, data, full_state, make_sharded, same_bits, train, train_plain, world

from zrun_core.distributed.named_vector import NamedVector

MATRIX = [
    {},
    {"optim": {"clip": 0.05}},
    {"precision": "bf16"},
    {"precision": "bf16", "optim": {"clip": 0.05}},
]


@pytest.mark.parametrize(
    "options",
    [*MATRIX, {"precision": {"compute": "bf16", "reduce": "compute"}}, {"precision": "fp16"}],
)
@pytest.mark.at_most(2)
def test_stages_are_bit_equal_in_every_precision(ranks, options):
    runs = [ranks(2).run(train, stage, options)[0] for stage in range(4)]
    for run in runs[1:]:
        same_bits(run, runs[0])


@pytest.mark.thorough
def test_accumulated_stages_agree_to_round_off(ranks):
    runs = [ranks(2).run(train, stage, {}, 3)[0]["losses"] for stage in range(4)]
    assert runs[1] == runs[0]
    assert runs[3] == runs[2]
    assert runs[2] == pytest.approx(runs[0], abs=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.at_most(1)
def test_clipping_is_the_plain_loops(ranks, stage):
    plain = train_plain(build(), data(6), clip=0.05)
    for world_size in (1, 2, 3):
        ours = ranks(world_size).run(train, stage, {"optim": {"clip": 0.05}})[0]["losses"]
        assert ours == pytest.approx(plain, abs=3e-6)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.at_most(1)
def test_hybrid_sharding_equals_one_copy(ranks, stage):
    whole = ranks(4).run(train, 0, {})[0]["losses"]
    hybrid = ranks(4).run(train, stage, {"shard_group": 2})[0]["losses"]
    assert hybrid == pytest.approx(whole, abs=2e-6)


def overflow(stage: int) -> dict[str, Any]:
    """The third step's gradient overflows on the last rank only."""
    precision = {"compute": "fp16", "loss_scale": {"init": 1024.0, "window": 2}}
    sharded = make_sharded(build(), stage, precision=precision)
    rank, size = world()
    scales, skips, states = [], [], []
    for number, (x, y) in enumerate(data(5)):
        sharded.begin_step()
        with sharded.forward() as micro:
            loss = sharded.module(x.chunk(size)[rank].half(), y.chunk(size)[rank])
        bad = number == 2 and rank == size - 1
        sharded.backward(loss * (float("inf") if bad else 1 / size), micro, boundary=True)
        sums = NamedVector.of(sharded.comm.device, weight=1.0)
        result = sharded.step(1e-2, sums, lambda sums: sums["weight"] / size)
        skips.append(bool(result.skipped))
        scales.append(float(sharded.scaler.scale))
        states.append({name: value.numpy() for name, value in full_state(sharded).items()})
    return {"scales": scales, "skips": skips, "states": states}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_ranks_skip_an_overflow_of_one(ranks, stage):
    runs = ranks(2).run(overflow, stage)
    for run in runs:
        assert run["skips"] == [False, False, True, False, False]
        assert run["scales"] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
        before, after = run["states"][1], run["states"][2]
        assert all((before[name] == after[name]).all() for name in before), (
            "a skipped step changed the parameters"
        )
    for name, value in runs[0]["states"][-1].items():
        assert (value == runs[1]["states"][-1][name]).all()
