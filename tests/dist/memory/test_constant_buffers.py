"""Buffers that do not grow with depth: rings, slots, scratch of casts, updates and norms.

Layer-wise optimizers are an exception by their nature: they propose all updates before one is made.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from toys import Net, data, make_sharded, train_sharded

from zrun_core.memory.buffers import Placement, Tier
from zrun_core.telemetry.peak_memory import PeakMemory
from zrun_core.zero.account import grown_rings

DEPTH = 3
ON_DISK = Placement(grad=Tier.DISK, optimizer=Tier.DISK)
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": {"compute": "bf16", "reduce": "compute"}, "optim": {"clip": 0.05}},
    "bf16 moments": {"precision": "bf16", "optim": {"moments": "bf16"}},
    "on disk": {"precision": "bf16", "placement": ON_DISK},
}


class Held(NamedTuple):
    """Bytes that a rank holds beside its states.

    Attributes:
        beyond: what one update takes and gives back, at most; 0 where threads make it.
    """

    gathering: int
    reducing: int
    slots: int
    scratch: int
    beyond: int


def held(stage: int, settings: dict[str, Any], depth: int) -> Held:
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        sharded = make_sharded(Net(depth=depth), stage, disk_folder=folder, **settings)
        train_sharded(sharded, data(2), accumulation=2)
        assert not grown_rings(sharded)
        peak = PeakMemory(torch.device("cpu"))
        step = sharded.step

        def watched(*args: Any) -> Any:
            with peak:
                return step(*args)

        if sharded.tiers is None:
            sharded.step = watched  # type: ignore[method-assign]
        train_sharded(sharded, data(1))
        sharded.settle_updates()
        scratch = {each.scratch for each in sharded.optimizer._updates}
        return Held(
            *sharded.ring_bytes,
            slots=0 if sharded.tiers is None else sharded.tiers.slot_bytes,
            scratch=sum(each.num_bytes for each in scratch),
            beyond=peak.num_bytes or 0,
        )


def walk(depth: int) -> dict[tuple[str, int], Held]:
    return {
        (name, stage): held(stage, settings, depth)
        for name, settings in CASES.items()
        for stage in range(4)
    }


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.thorough
def test_buffers_do_not_grow_with_depth(ranks: Callable[[int], Any], num_ranks: int) -> None:
    shallow, deep = (ranks(num_ranks).run(walk, depth) for depth in (DEPTH, 4 * DEPTH))
    for own, other in zip(shallow, deep, strict=True):
        for case, found in own.items():
            many = other[case]
            assert many[:-1] == found[:-1], case
            # Numbers of a unit, such as its norm and which of its six parameters got a gradient.
            assert many.beyond - found.beyond <= 3 * DEPTH * 512, case
    sizes = shallow[0]
    assert sizes["fp32", 3].gathering > 0 or num_ranks == 1
    assert sizes["fp32", 2].reducing > 0 or num_ranks == 1
    assert sizes["bf16", 0].scratch > 0
    assert sizes["bf16", 0].beyond > 1024
    assert sizes["on disk", 1].slots > 0
