"""What training steps send, from layouts alone: the runtime is held to it, and a plan says it beforehand.

Elements moved per optimizer step, for P trainable parameters, K micro-batches and N ranks, times (N-1)/N: stage 0
all-reduce P (2P sent); stage 1 gather P + reduce-scatter P; stage 2 gather P + reduce-scatter KP; stage 3 gather 2KP +
reduce-scatter KP. The bytes are exact because units are padded to equal shards.

Frozen parameters are gathered at stage 3 alone: once per micro-batch for forward, and once more for backward where a
gradient flows through their unit, or a block with them is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zrun_core.memory.layout import MeshInfo, StatePolicy, UnitLayout
from zrun_core.zero.exchange import Exchange

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
    layouts: Sequence[UnitLayout],
    states: StatePolicy,
    exchange: Exchange,
    how_often: Steps,
    mesh_info: MeshInfo,
    *,
    gathers: Sequence[int] | None = None,
) -> dict[str, int]:
    """Return the bytes that a rank sends, by kind of collective.

    It holds for models whose modules each run once per forward.

    Args:
        peers: the rank's place.
        gathers: of each layout that is given up after use, per micro-batch; None: one in forward, one in backward.
    """
    expected = dict.fromkeys(KINDS, 0)
    reductions = how_often.micro_batches if states.zero.reduce_now(False) else how_often.steps
    for unit, per_micro in zip(layouts, gathers or [2] * len(layouts), strict=True):
        if states.reshard_after_use(unit):
            num_gathers = per_micro * how_often.micro_batches
        else:
            num_gathers = how_often.refreshes * unit.trainable
        sent = exchange.sent_bytes(
            unit,
            states,
            mesh_info,
            gathers=num_gathers,
            reductions=reductions * unit.trainable,
            sums=how_often.steps * unit.trainable,
        )
        for kind, num_bytes in sent.items():
            expected[kind] += num_bytes
    return {kind: num_bytes for kind, num_bytes in expected.items() if num_bytes}
