"""Who has written what of a model: each element one rank, whatever ranks divide it in whatever way.

And what that takes for thousands of ranks.
"""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import manifests
import pytest
import torch

from zrun_core.checkpoint.divisions import (
    Divisions,
    Share,
    TensorSpan,
    bytes_by_rank,
    part_start,
    single_unit,
    spans_of_part,
)
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.manifest_checks import check_parts
from zrun_core.checkpoint.manifest_fields import MANIFEST, MAX_BYTES, rank_file
from zrun_core.checkpoint.manifest_parts import Division, FileInfo, TensorInfo, UnitInfo, UnitRun
from zrun_core.checkpoint.rank_save import RankPart
from zrun_core.checkpoint.shard_file import WriteItem
from zrun_core.checkpoint.step_index import open_index

MIB = 1 << 20


def random_model(chance: random.Random) -> tuple[list[TensorInfo], list[Division], int]:
    """Tensors in pieces, in units of several divisions, and the number of ranks."""
    world_size = chance.randint(1, 12)
    tensors: list[TensorInfo] = []
    pieces: list[tuple[str, int, int]] = []  # of tensors: first element, and how many
    for number in range(chance.randint(1, 7)):
        numel = chance.choice([1, 2, 7, 30, 301])
        states = {"value": "float32", **({"exp_avg": "float32"} if chance.random() < 0.5 else {})}
        name = f"t{number}"
        tensors.append(TensorInfo(name, (numel,), (1,), "float32", "param", (), {}, states))
        borders = sorted({0, numel, *(chance.randint(0, numel) for _ in range(2))})
        pieces += [(name, low, high - low) for low, high in pairwise(borders)]
    chance.shuffle(pieces)
    divisions = []
    while pieces:
        shards, copies = chance.choice(
            [(s, c) for s in range(1, 13) for c in range(1, 13) if s * c <= world_size]
        )
        units = []
        for _ in range(chance.randint(1, 3)):
            taken = [pieces.pop() for _ in range(min(len(pieces), chance.randint(1, 3)))]
            runs = []
            end = chance.choice([0, 3])
            for tensor, first, numel in taken:
                runs.append(UnitRun(tensor, first, end, numel))
                end += numel + chance.choice([0, 0, 2])
            if runs:
                units.append(UnitInfo("unit", -(-end // shards) * shards, runs))
        ranks = chance.sample(range(world_size), shards * copies)
        divisions.append(Division(ranks, copies, units))
    return tensors, divisions, world_size


def files_of(divisions: list[Division], tensors: list[TensorInfo], ranks: int) -> list[FileInfo]:
    widths = {info.name: 4 * len(info.states) for info in tensors}
    of_model = bytes_by_rank(divisions, widths, ranks).tolist()
    return [
        FileInfo(rank_file(rank), 4096 + num_bytes + 7, 4096, 0, 7, "0" * 32)
        for rank, num_bytes in enumerate(of_model)
    ]


def test_every_element_has_one_writer_whatever_the_layout() -> None:
    chance = random.Random(5)
    for _ in range(300):
        tensors, divisions, world_size = random_model(chance)
        found = Divisions(divisions)
        by_rank = [list(found.of_rank(rank)) for rank in range(world_size)]
        owner: dict[tuple[str, int], int] = {}
        for rank, spans in enumerate(by_rank):
            for span in spans:
                for element in range(span.start, span.stop):
                    assert owner.setdefault((span.tensor, element), rank) == rank
        assert len(owner) == sum(info.numel for info in tensors)
        for info in tensors:
            start = chance.randint(0, info.numel - 1)
            stop = chance.randint(start, info.numel)
            covered = {}
            for span in found.of_tensor(info.name, start, stop):
                covered |= dict.fromkeys(range(span.start, span.stop), span.rank)
            assert covered == {each: owner[info.name, each] for each in range(start, stop)}
        widths = {info.name: 4 * len(info.states) for info in tensors}
        sizes = [sum(widths[s.tensor] * (s.stop - s.start) for s in spans) for spans in by_rank]
        assert bytes_by_rank(divisions, widths, world_size).tolist() == sizes
        check_parts(files_of(divisions, tensors, world_size), tensors, divisions, world_size)


def test_the_example_of_the_page() -> None:
    runs = [UnitRun("a", 0, 0, 5), UnitRun("b", 0, 5, 5)]
    division = Division([0, 2, 1, 3], 2, [UnitInfo("unit", 12, runs)])
    found = Divisions([division])
    assert list(found.of_rank(2)) == [TensorSpan("a", 3, 5), TensorSpan("b", 0, 1)]
    assert list(found.of_rank(3)) == [TensorSpan("b", 4, 5)]
    assert [span.rank for span in found.of_tensor("b", 0, 5)] == [2, 1, 3]


def test_parts_are_those_that_ranks_have_always_written() -> None:
    """A shard of 7 over 3 copies is 3, 3 and 1; and 2 over 4 leaves the last two nothing."""
    assert [part_start(14, 2, 3, index) for index in range(7)] == [0, 3, 6, 7, 10, 13, 14]
    assert [part_start(2, 1, 4, index) for index in range(5)] == [0, 1, 2, 2, 2]
    unit = single_unit("all", [("a", 2), ("empty", 0)])
    assert unit is not None
    assert list(spans_of_part(unit, 1, 4, 2)) == []
    assert single_unit("all", [("empty", 0)]) is None


def test_a_share_is_known_by_what_is_divided_and_how() -> None:
    units = (
        UnitInfo("one", 4, [UnitRun("a", 0, 0, 4)]),
        UnitInfo("two", 4, [UnitRun("b", 0, 0, 3)]),
    )
    share = Share(1, 2, 0, units)
    assert share.identity == replace(share, index=1).identity
    renamed = tuple(replace(unit, name="other") for unit in reversed(units))
    assert share.identity == replace(share, units=renamed).identity
    assert share.identity != replace(share, shards=1, copies=2).identity
    assert share.identity != share.renamed(lambda name: f"{name}.x").identity
    assert share.identity != replace(share, units=units[:1]).identity


@pytest.mark.parametrize("change", ["missing", "shifted", "state too many"])
def test_a_rank_that_writes_what_it_does_not_describe_fails(change: str) -> None:
    """Readers derive fragments from the description: it must be what is written."""
    share = Share(1, 1, 0, (UnitInfo("all", 8, [UnitRun("a", 0, 0, 4), UnitRun("b", 0, 4, 4)]),))
    items = [
        WriteItem(name, state, 0, 4, torch.zeros(4)) for name in "ab" for state in ("value", "m")
    ]
    part = RankPart(items, manifests.saved_rank(0), [share], {})
    part.check()
    if change == "missing":
        items = items[:-1]
        items.append(WriteItem("b", "m", 0, 2, torch.zeros(2)))
    elif change == "shifted":
        items[0] = WriteItem("a", "value", 1, 5, torch.zeros(4))
    else:
        items.append(WriteItem("c", "value", 0, 4, torch.zeros(4)))
    with pytest.raises(ValueError, match="what is written is not what is described"):
        replace(part, items=items).check()


def test_what_a_rank_tells_is_short_unless_it_is_the_first() -> None:
    """Of 246 fragments; the first rank describes the units for all."""
    manifest = manifests.simulated(64)
    (division,) = manifest.divisions
    told = []
    for rank in (0, 32):
        share = Share(1, 64, rank, tuple(division.units))
        items = [
            WriteItem(span.tensor, "value", span.start, span.stop, torch.empty(0))
            for span in share.spans()
        ]
        scalars = {item.tensor: {"step": 2.0} for item in items}
        part = RankPart(items, manifests.saved_rank(rank), [share], scalars)
        told.append(len(part.report(manifest.files[rank])))
    firsts = [span for span in Divisions([division]).of_rank(32) if not span.start]
    assert told[1] < 400 + 120 * len(firsts) < told[0] / 10
    assert len(firsts) < 80


def test_four_thousand_ranks_fit_well_into_a_manifest(tmp_path: Path) -> None:
    """70 billion parameters, three states of each: 8 MiB, and 50 MB of memory, are far away."""
    manifest = manifests.simulated(4096)
    assert len(manifest.tensors) == 723
    elements = sum(info.numel for info in manifest.tensors)
    assert 70e9 < elements < 71e9
    of_model = (
        file.num_bytes - file.header_bytes - file.own_bytes - file.record_bytes
        for file in manifest.files
    )
    assert sum(of_model) == 12 * elements
    text = manifest.to_json()
    assert len(text) < MIB
    manifests.write(tmp_path, manifest)
    Manifest.from_json(manifests.simulated(2).to_json())  # what is made once in a process
    tracemalloc.start()
    try:
        read = Manifest.from_json((tmp_path / MANIFEST).read_bytes())
        index = open_index(tmp_path, read)
        fragments = index.content(rank_file(2048)).fragments
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24 * MIB
    assert read.tensors == manifest.tensors
    assert read.divisions == manifest.divisions
    per_state = Counter(each.state for each in fragments)
    assert per_state["value"] == per_state["exp_avg"] == per_state["exp_avg_sq"] >= 82
    file = read.files[2048]
    assert fragments[-1].offset + fragments[-1].num_bytes == file.num_bytes - file.record_bytes


def test_manifests_grow_by_a_line_for_each_rank() -> None:
    sizes = [len(manifests.simulated(ranks).to_json()) for ranks in (256, 512, 1024)]
    assert 140 < (sizes[2] - sizes[1]) / 512 < 180
    assert 140 < (sizes[1] - sizes[0]) / 256 < 180
    assert sizes[0] + 16384 * 180 < 4 * MIB < MAX_BYTES
