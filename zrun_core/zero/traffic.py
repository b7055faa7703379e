"""What training steps send, from layouts alone: the runtime is held to it, and a plan says it beforehand.

Elements moved per optimizer step, for P trainable parameters, K micro-batches and N ranks, times (N-1)/N: stage 0
all-reduce P (2P sent); stage 1 gather P + reduce-scatter P; stage 2 gather P + reduce-scatter KP; stage 3 gather 2KP +
reduce-scatter KP. The bytes are exact because units are padded to equal shards.

Frozen parameters are gathered at stage 3 alone: once per micro-batch for forward, and once more for backward where a
gradient flows through their unit, or a block with them is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zrun_core.comm import slice_start
from zrun_core.layout import Sharded, StatePolicy, UnitLayout

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "push", "pull")


@dataclass(frozen=True)
class Steps:
    """How often what happens.

    Attributes:
        micro_batches: of all steps together.
        refreshes: forward passes that found parameters stale: one for each update, and the first.
    """

    steps: int
    micro_batches: int
    refreshes: int


def expected_traffic(
    layouts: Iterable[UnitLayout],
    states: StatePolicy,
    how_often: Steps,
    *,
    gathers: Sequence[int] | None = None,
    index: int = 0,
    copies: int = 1,
    copy_index: int = 0,
) -> dict[str, int]:
    """Bytes that a rank sends, by kind of collective. It holds for models whose modules each run once per forward.

    Args:
        layouts: divided over the ranks that share one copy of the states; at stage 0 over all.
        gathers: of each layout that is given up after use, per micro-batch; None: one in forward, one in backward.
        index: of the rank among these.
        copies: groups like that; `copy_index` is the rank's own.
    """
    expected = dict.fromkeys(KINDS, 0)
    reduce_size, sharded = states.reduce_dtype.itemsize, states.zero.sharded
    layouts = list(layouts)
    for unit, per_micro in zip(layouts, gathers or [2] * len(layouts), strict=True):
        peers, shard, frees = unit.num_shards - 1, unit.shard_numel, states.frees(unit)
        num_gathers = per_micro * how_often.micro_batches if frees else how_often.refreshes
        is_gathered = frees or (unit.trainable and Sharded.OPTIMIZER in sharded)
        expected["all_gather"] += num_gathers * is_gathered * peers * shard * unit.dtype.itemsize
        if not unit.trainable:
            continue
        reductions = how_often.micro_batches if Sharded.GRADIENT in sharded else how_often.steps
        if Sharded.OPTIMIZER in sharded:
            expected["reduce_scatter"] += reductions * peers * shard * reduce_size
            own = slice_start(shard, copies, copy_index + 1) - slice_start(shard, copies, copy_index)
            expected["all_reduce"] += how_often.steps * (copies > 1) * (shard + (copies - 2) * own) * reduce_size
        elif states.server:
            is_server, numel = index == 0, unit.padded_numel
            expected["push"] += reductions * (peers > 0) * (not is_server) * numel * reduce_size
            expected["pull"] += how_often.refreshes * peers * is_server * numel * unit.dtype.itemsize
        else:
            expected["all_reduce"] += 2 * reductions * peers * shard * reduce_size
    return {kind: num_bytes for kind, num_bytes in expected.items() if num_bytes}
