"""Where parameters lie: shards are equal and page-aligned, pieces tile parameters, buffers follow
the formulas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zrun_core.memory.buffers import Buffer, Kind
from zrun_core.memory.layout import PAGE_BYTES, UnitLayout, dense_stride, lay_out
from zrun_core.memory.state_policy import (
    MeshInfo,
    Ownership,
    RankPlaces,
    StatePolicy,
    ZeroPolicy,
    module_buffers,
    slices_of,
)
from zrun_core.zero.unit.exchange import planned_gathers
from zrun_core.zero.unit.server import ParameterServer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def unit(
    *shapes: tuple[int, ...],
    name: str = "unit",
    dtype: torch.dtype = torch.float32,
    num_shards: int = 2,
    trainable: bool = True,
    num_parts: int | None = None,
    **options: bool,
) -> UnitLayout:
    params = [
        (f"p{number}", torch.empty(shape, device="meta"), 0) for number, shape in enumerate(shapes)
    ]
    return lay_out(
        name,
        params,
        dtype=dtype,
        num_shards=num_shards,
        num_parts=num_parts,
        trainable=trainable,
        **options,
    )


def policy(stage: int, reduce_dtype: torch.dtype = torch.float32, moments: int = 2) -> StatePolicy:
    return StatePolicy(ZeroPolicy(stage), reduce_dtype, moments)


def of_ranks(
    stage: int,
    ranks: int,
    *shapes: tuple[int, ...],
    **options: Any,
) -> tuple[UnitLayout, list[MeshInfo]]:
    """A unit at this stage on so many ranks, and the place of each."""
    if stage:
        peers = [MeshInfo(ranks, index, direct_up_to=8) for index in range(ranks)]
    else:  # a shard group of one
        peers = [
            MeshInfo(num_replicas=ranks, replica_index=index, direct_up_to=8)
            for index in range(ranks)
        ]
    num_parts = ZeroPolicy(stage).num_parts(peers[0])
    return unit(*shapes, num_shards=peers[0].shard_size, num_parts=num_parts, **options), peers


def test_a_stage_is_two_questions():
    assert [ZeroPolicy(stage).divides for stage in range(4)] == [False, True, True, True]
    assert [ZeroPolicy(stage).reshard_after_use for stage in range(4)] == [
        False,
        False,
        False,
        True,
    ]
    assert [ZeroPolicy(stage).reduce_now(boundary=False) for stage in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert all(ZeroPolicy(stage).reduce_now(boundary=True) for stage in range(4))


@given(
    numels=st.lists(st.integers(0, 5000), min_size=1, max_size=8),
    num_shards=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_pieces_of_all_shards_tile_every_parameter_exactly(numels, num_shards, dtype):
    layout = unit(*[(numel,) for numel in numels], dtype=dtype, num_shards=num_shards)
    covered: dict[str, list[tuple[int, int]]] = {slot.name: [] for slot in layout.slots}
    end = 0
    for index in range(num_shards):
        start, stop = layout.shard_range(index)
        assert start == end
        end = stop
        last = 0
        for piece in layout.pieces(start, stop):
            assert last <= piece.start < piece.stop <= stop - start, (
                "in order, and inside of the shard"
            )
            last = piece.stop
            assert layout.slots[piece.index] is piece.slot
            first = start + piece.start - piece.slot.offset
            covered[piece.slot.name].append((first, first + piece.stop - piece.start))
    assert end == layout.padded_numel >= layout.numel == sum(numels)
    for slot in layout.slots:
        border = 0
        for first, last in covered[slot.name]:
            assert first == border
            border = last
        assert border == slot.numel


@given(numel=st.integers(0, 100_000), num_shards=st.integers(1, 9), dtype=st.sampled_from(DTYPES))
def test_shards_are_equal_and_whole_pages_with_less_than_a_page_each_to_spare(
    numel, num_shards, dtype
):
    layout = unit((numel,), dtype=dtype, num_shards=num_shards)
    assert layout.shard_numel * dtype.itemsize % PAGE_BYTES == 0
    assert layout.padded_numel == layout.shard_numel * num_shards
    spare = (layout.padded_numel - numel) * dtype.itemsize
    assert 0 <= spare < num_shards * (PAGE_BYTES + dtype.itemsize)


def test_optimizer_groups_are_contiguous_ranges_in_order_of_registration():
    params = [
        (name, torch.empty(size, device="meta"), group)
        for name, size, group in [("w1", 4, 0), ("b1", 1, 1), ("w2", 5, 0), ("b2", 2, 1)]
    ]
    layout = lay_out("unit", params, dtype=torch.float32, trainable=True, num_shards=1)
    assert [(slot.name, slot.group, slot.offset, slot.stop) for slot in layout.slots] == [
        ("w1", 0, 0, 4),
        ("w2", 0, 4, 9),
        ("b1", 1, 9, 10),
        ("b2", 1, 10, 12),
    ]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(2, 3), (3, 1)),
        (torch.empty(2, 3).t(), (1, 3)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(()), ()),
        (torch.empty(0, 3), (3, 1)),
        (torch.empty(1, 7), (7, 1)),
        (torch.empty(1).expand(4, 3), (3, 1)),  # every element the same: not dense
        (torch.empty(4, 6)[:, :3], (3, 1)),  # gaps: not dense
        (torch.empty(4, 6)[::2], (6, 1)),
    ],
)
def test_a_dense_tensor_keeps_its_stride(tensor, expected):
    assert dense_stride(tensor) == expected


@given(
    shape=st.lists(st.integers(1, 4), max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_any_permuted_tensor_fits_its_slot_exactly(shape, order):
    dims = list(range(len(shape)))
    order.shuffle(dims)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).permute(dims)
    flat = torch.full((tensor.numel(),), -1)
    flat.as_strided(tensor.shape, dense_stride(tensor)).copy_(tensor)
    assert sorted(flat.tolist()) == sorted(tensor.flatten().tolist()), "every place is used once"


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_buffers_are_the_papers(num_shards, reduce_dtype):
    """16P, 4P + 12P/N, 2P + 14P/N, 16P/N with bf16 gradients; fp32 gradients take 2 bytes more."""
    n, g, p = num_shards, reduce_dtype.itemsize, 64 * 1024
    expected = [
        (14 + g) * p,
        (2 + g) * p + 12 * p // n,
        2 * p + (g + 12) * p // n,
        (14 + g) * p // n,
    ]
    for stage in range(4):
        layout, peers = of_ranks(stage, num_shards, (64, 1024), dtype=torch.bfloat16)
        assert layout.padded_numel == p
        for index in range(num_shards):
            buffers = policy(stage, reduce_dtype).buffers(layout, peers[index])
            assert sum(buffer.num_bytes for buffer in buffers) == expected[stage], (stage, index)


def test_fp32_parameters_are_their_own_master_and_frozen_ones_have_no_states():
    fp32, frozen = unit((1024,), num_shards=1), unit((1024,), num_shards=1, trainable=False)
    names = [buffer.name for buffer in policy(0).buffers(fp32, MeshInfo())]
    assert names == ["unit/param", "unit/grad", "unit/moment0", "unit/moment1"]
    assert [(b.name, b.kind, b.num_bytes) for b in policy(2).buffers(frozen, MeshInfo())] == [
        ("unit/param", Kind.PARAM, 4096)
    ]


def test_padding_has_no_moments_and_persistent_units_stay_whole():
    layout = unit((1000,), num_shards=2)  # 1024 elements a shard: the second one is padding only
    by_rank = [policy(3).buffers(layout, MeshInfo(2, index)) for index in range(2)]
    moments = [[b.num_bytes for b in buffers if "moment" in b.name] for buffers in by_rank]
    assert moments == [[4000, 4000], [0, 0]]
    small = unit((1000,), num_shards=2, keep_unsharded=True)
    assert policy(3).buffers(small, MeshInfo(2))[0].num_bytes == 8192
    assert policy(3).buffers(layout, MeshInfo(2))[0].num_bytes == 4096


def test_the_gather_ring_holds_the_unit_in_use_and_those_ahead():
    units = [
        unit((pages, 1024), name=f"u{pages}") for pages in (2, 8, 4)
    ]  # 1, 4 and 2 foreign pages
    ring = [policy(3).gather_ring_bytes(units, prefetch) // PAGE_BYTES for prefetch in range(4)]
    assert ring == [4, 7, 7, 7], "never more than all of them"
    kept = [*units, unit((6, 1024), num_shards=2, keep_until_pass_ends=True)]
    assert policy(3).gather_ring_bytes(kept, 0) // PAGE_BYTES == 4 + 3
    assert [policy(stage).gather_ring_bytes(units, 1) for stage in range(3)] == [0, 0, 0]
    frozen = unit(
        (6, 1024), name="u8", trainable=False
    )  # of the same modules as the largest: in use together
    assert policy(3).gather_ring_bytes([*units, frozen], 0) // PAGE_BYTES == 4 + 3


def test_where_pages_do_not_move_a_whole_unit_has_its_own_shard_twice():
    units = [unit((pages, 1024), name=f"u{pages}") for pages in (2, 8, 4)]
    assert policy(3).gather_ring_bytes(units, 1, moves_pages=False) // PAGE_BYTES == 8 + 4 + 2
    assert policy(3).gather_ring_bytes(units, 0, moves_pages=False) // PAGE_BYTES == 8
    alone = [unit((8, 1024), num_shards=1)]
    assert policy(3).gather_ring_bytes(alone, 1, moves_pages=False) == 0, "it is never given up"


def test_units_of_a_block_that_is_recomputed_are_whole_together():
    units = [unit((pages, 1024), name=f"u{pages}", block="block") for pages in (2, 8, 4)]
    apart, together = policy(3), replace(policy(3), recomputes_blocks=True)
    assert apart.gather_ring_bytes(units, 0) // PAGE_BYTES == 4
    assert together.gather_ring_bytes(units, 0) // PAGE_BYTES == 4 + 2 + 1
    peers = MeshInfo(2, direct_up_to=8)
    leaving_and_arriving = [page + page // 2 for page in (2, 8, 4)]
    assert apart.reduce_ring_bytes(units, RankPlaces(peers)) == 2 * 12 * PAGE_BYTES
    assert (
        together.reduce_ring_bytes(units, RankPlaces(peers))
        == (sum(leaving_and_arriving) + 12) * PAGE_BYTES
    )


def test_the_units_of_a_slice_are_unsharded_together_in_layer_major_order():
    blocks = ["", "b0", "b0", "b1", "", ""]
    units = [unit((8, 1024), name=f"u{number}", num_shards=2) for number in range(len(blocks))]
    units = [replace(each, block=block) for each, block in zip(units, blocks, strict=True)]
    units[0] = replace(units[0], keep_until_pass_ends=True)
    apart, sliced = policy(3), replace(policy(3), layer_major=True)
    assert slices_of(units) == ["", "b0", "b0", "b1", "b1", "b1"]
    assert apart.gather_ring_bytes(units, 0) // PAGE_BYTES == 4 + 4
    assert sliced.gather_ring_bytes(units, 0) // PAGE_BYTES == 3 * 4 + 4
    assert planned_gathers(units, apart) == [2] * 6
    assert planned_gathers(units, sliced) == [1, 2, 2, 1, 1, 1]


def test_sums_of_copies_have_room_also_where_nothing_is_divided():
    """Hybrid sharding with groups of one: each rank has all states, and gradients are summed like
    equal shards.
    """
    units = [unit((8, 1024), num_shards=1)]
    assert (
        policy(2).reduce_ring_bytes(units, RankPlaces(MeshInfo(1, num_replicas=4, direct_up_to=8)))
        == 3 * 2 * PAGE_BYTES
    )
    assert (
        policy(2).reduce_ring_bytes(units, RankPlaces(MeshInfo(1, num_replicas=4)))
        == 2 * PAGE_BYTES
    )


def test_a_unit_has_the_bytes_of_the_groups_that_it_lies_on():
    """On 4 ranks: one divided by all of them, one by pairs, and one that each of them has."""
    usual = unit((8, 1024), name="usual", num_shards=4)
    pairs = replace(unit((8, 1024), name="pairs", num_shards=2), groups="pairs")
    alone = replace(unit((32, 1024), name="alone", num_shards=1), groups="alone")
    places = RankPlaces(
        MeshInfo(4, direct_up_to=8),
        {
            "pairs": MeshInfo(2, num_replicas=2, direct_up_to=8),
            "alone": MeshInfo(num_replicas=4, direct_up_to=8),
        },
    )
    buffers = policy(3).rank_buffers([usual, pairs, alone], places, prefetch=0, moves_pages=True)
    pages = {buffer.name: buffer.num_bytes // PAGE_BYTES for buffer in buffers}
    assert [pages[f"{name}/grad"] for name in ("usual", "pairs", "alone")] == [2, 4, 32]
    assert [pages[f"{name}/moment0"] for name in ("usual", "pairs", "alone")] == [2, 4, 32]
    # 8 leave of `usual` and `pairs`, and 3 * 2 or 4 arrive. Of `alone` 3 * 8 arrive, while another
    # unit is filled.
    assert policy(2).reduce_ring_bytes([usual, pairs], places) // PAGE_BYTES == 2 * (8 + 6)
    assert pages["reduce ring"] == 8 + 6 + 24


def test_a_ranks_buffers_are_its_units_and_two_rings():
    units = [unit((pages, 1024), name=f"u{pages}") for pages in (2, 8)]
    peers = MeshInfo(2, shard_index=1, direct_up_to=8)
    found = policy(3).rank_buffers(units, RankPlaces(peers), prefetch=1, moves_pages=True)
    assert [buffer.name for buffer in found] == [
        *(
            f"{name}/{part}"
            for name in ("u2", "u8")
            for part in ("param", "grad", "moment0", "moment1")
        ),
        "gather ring",
        "reduce ring",
    ]
    assert [buffer.num_bytes for buffer in found[-2:]] == [
        policy(3).gather_ring_bytes(units, 1),
        policy(3).reduce_ring_bytes(units, RankPlaces(peers)),
    ]
    assert {(buffer.tier, buffer.pinned, buffer.phases) for buffer in found} == {
        ("device", False, None)
    }


def test_buffers_of_modules_count_once():
    model = torch.nn.ModuleList([torch.nn.BatchNorm1d(4), torch.nn.Module()])
    model[1].same = model[0].running_mean
    model[1].register_buffer("again", model[0].running_mean)
    assert module_buffers(model) == [
        Buffer("0.running_mean", Kind.BUFFER, 16),
        Buffer("0.running_var", Kind.BUFFER, 16),
        Buffer("0.num_batches_tracked", Kind.BUFFER, 8),
    ]


def test_the_reduce_ring_holds_two_units_leaving_and_arriving():
    units = [
        unit((pages, 1024), name=f"u{pages}", num_shards=4) for pages in (4, 8)
    ]  # shards of 1 and 2 pages
    direct, native = MeshInfo(4, direct_up_to=4), MeshInfo(4)
    kept, sharded = (
        policy(1).reduce_ring_bytes(units, RankPlaces(direct)),
        policy(2).reduce_ring_bytes(units, RankPlaces(direct)),
    )
    assert kept == 2 * 3 * 2 * PAGE_BYTES
    assert sharded == 2 * (8 + 3 * 2) * PAGE_BYTES
    assert policy(2).reduce_ring_bytes(units, RankPlaces(native)) == 2 * (8 + 2) * PAGE_BYTES
    frozen = [unit((64, 1024), num_shards=4, trainable=False)]
    assert policy(2).reduce_ring_bytes([*units, *frozen], RankPlaces(direct)) == sharded
    kept = [unit((4, 1024), num_shards=4, keep_until_pass_ends=True)]
    assert (
        policy(2).reduce_ring_bytes([*units, *kept], RankPlaces(direct)) == sharded + 4 * PAGE_BYTES
    )


def test_units_that_are_updated_together_cast_their_gradients_in_the_same_ring():
    apart = policy(0, torch.bfloat16)
    together = replace(apart, updates_together=True)
    units = [unit((pages, 1024), name=f"u{pages}", num_shards=1) for pages in (4, 8)]
    assert apart.reduce_ring_bytes(units, RankPlaces(MeshInfo())) == 0, (
        "chunks have scratch of their own"
    )
    assert together.reduce_ring_bytes(units, RankPlaces(MeshInfo())) == (4 + 8) * PAGE_BYTES
    in_fp32 = replace(together, reduce_dtype=torch.float32)
    assert in_fp32.reduce_ring_bytes(units, RankPlaces(MeshInfo())) == 0, (
        "they are used as they are"
    )
    copies = MeshInfo(num_replicas=4)
    assert apart.reduce_ring_bytes(units, RankPlaces(copies)) < together.reduce_ring_bytes(
        units, RankPlaces(copies)
    )


def test_moments_in_bf16_take_half():
    for stage in (0, 2):
        layout, (first, _) = of_ranks(stage, 2, (64, 1024))
        wide, narrow = policy(stage), replace(policy(stage), moment_dtype=torch.bfloat16)
        by_width = [each.buffers(layout, first) for each in (wide, narrow)]
        of = [sum(b.num_bytes for b in buffers if b.is_moment) for buffers in by_width]
        assert of[0] == 2 * of[1] == 2 * 4 * layout.numel // (2 if stage else 1)


def test_a_server_has_all_states_and_counts_all_parts():
    alone = replace(policy(0), ownership=ParameterServer())
    layout, peers = of_ranks(0, 4, (64, 1024), dtype=torch.bfloat16)
    by_rank = [alone.buffers(layout, each) for each in peers]
    sizes = [sum(b.num_bytes for b in buffers if b.kind is Kind.OPTIM) for buffers in by_rank]
    assert sizes == [12 * layout.numel, 0, 0, 0]
    counted = [list(alone.ownership.counted_parts(layout, each)) for each in peers]
    assert counted == [[0, 1, 2, 3], [], [], []]
    ring = [alone.reduce_ring_bytes([layout], RankPlaces(each)) for each in peers[:2]]
    assert ring == [2 * 3 * layout.padded_numel * 4, 0], (
        "the gradients of all others arrive, of two units at a time"
    )


def test_every_stage_counts_the_same_parts_and_stage_0_deals_them_out():
    for stage in range(4):
        layout, peers = of_ranks(stage, 4, (64, 1000))
        counted = [list(Ownership().counted_parts(layout, each)) for each in peers]
        assert counted == [[0], [1], [2], [3]]
        ranges = [layout.part_range(part) for part in range(layout.num_parts)]
        assert ranges == [(n * 16384, (n + 1) * 16384) for n in range(4)]


@given(shards=st.integers(1, 4), num_replicas=st.integers(1, 4), each=st.integers(1, 6))
def test_each_part_counts_once_over_all_ranks(shards, num_replicas, each):
    layout = unit((1000,), num_shards=shards, num_parts=shards * each)
    counted = [
        part
        for shard in range(shards)
        for copy in range(num_replicas)
        for part in Ownership().counted_parts(layout, MeshInfo(shards, shard, num_replicas, copy))
    ]
    assert sorted(counted) == list(range(layout.num_parts))


@pytest.mark.parametrize("stage", range(1, 4))
@pytest.mark.parametrize("num_replicas", [2, 3, 8, 9, 64])
@pytest.mark.parametrize("direct_up_to", [0, 8])
def test_sums_of_copies_fit_where_the_shards_arrived(stage, num_replicas, direct_up_to):
    """Hybrid sharding: a ring is as large as that of one copy."""
    units = [unit((pages, 1000), name=f"u{pages}", num_shards=2) for pages in (1, 8)]
    alone = MeshInfo(2, direct_up_to=direct_up_to)
    ring = policy(stage).reduce_ring_bytes(units, RankPlaces(alone))
    assert (
        policy(stage).reduce_ring_bytes(
            units, RankPlaces(replace(alone, num_replicas=num_replicas))
        )
        == ring
    )
