"""Loading reads each byte of a file once, wherever it goes, in whatever order it lies there."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_toys import Reads, fragments_of, toy_infos, toy_parts, write_files

from zrun_core.checkpoint.folder import CheckpointFolder
from zrun_core.checkpoint.initial_weights import open_weights
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.reader import Reader, Target
from zrun_core.checkpoint.step_index import open_index
from zrun_core.distributed.transport import Group
from zrun_core.memory.tensors import Shape

ALONE = Group("world", (0,), 0, None)
FORMATS = (torch.float32, torch.float64)
STATES = ("value", "exp_avg", "exp_avg_sq")
ORDERS = {
    "as saved": (0, 1, 2, 3),
    "channels_last": (0, 2, 3, 1),
    "turned": (1, 0, 2, 3),
    "backwards": (3, 2, 1, 0),
}


def state() -> dict[str, torch.Tensor]:
    weight = torch.randn(24, 6, 5, 5, generator=torch.Generator().manual_seed(1))
    return {"layer.weight": weight, "layer.bias": torch.arange(33.0)}


def save(path: Path, ranks: int) -> tuple[Path, Manifest]:
    folder, tensors = CheckpointFolder(path), state()
    tmp = folder.begin(1)
    parts = [toy_parts(tensors, rank, ranks) for rank in range(ranks)]
    manifest = write_files(tmp, 1, parts, toy_infos(tensors))
    folder.commit(tmp, manifest)
    return folder.step_path(1), manifest


def cut_up(shape: Shape, order: tuple[int, ...], state: str, num_pieces: int) -> list[Target]:
    """Targets for all of a tensor, which lies in this order, in pieces of several formats."""
    stride = torch.empty([shape[dim] for dim in order]).permute(np.argsort(order).tolist()).stride()
    numel = int(np.prod(shape))
    borders = [numel * k // num_pieces for k in range(num_pieces + 1)]
    found = []
    for number, (low, high) in enumerate(pairwise(borders)):
        memory = torch.full((high - low,), torch.nan, dtype=FORMATS[number % 2])
        found.append(Target(("layer.weight",), state, shape, stride, low, memory))
    return found


def whole_of(targets: list[Target]) -> torch.Tensor:
    flat = torch.cat([target.memory.float() for target in targets])
    return flat.as_strided(targets[0].shape, targets[0].stride)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_pieces", [1, 7])
def test_a_rank_reads_each_byte_once(tmp_path, monkeypatch, ranks, order, num_pieces):
    path, manifest = save(tmp_path, ranks)
    weight = state()["layer.weight"]
    shape = tuple(weight.shape)
    targets = {name: cut_up(shape, ORDERS[order], name, num_pieces) for name in STATES}
    reads = Reads(monkeypatch)
    Reader(open_index(path, manifest), ALONE).fill(
        [each for of_state in targets.values() for each in of_state]
    )
    for plus, name in enumerate(STATES):
        assert torch.equal(whole_of(targets[name]), weight + plus)
    assert reads.most == 1
    records = sum(file.record_bytes for file in manifest.files)
    assert reads.num_bytes == 3 * weight.nbytes + records


def test_a_rank_reads_only_the_fragments_of_which_it_needs_something(tmp_path, monkeypatch):
    """Of six ranks' files the last third of the rows, which are columns to whom they are for."""
    path, manifest = save(tmp_path, 6)
    weight = state()["layer.weight"]
    turned = (1, 24, 144, 720)  # backwards
    targets = [
        Target(("layer.weight",), "value", tuple(weight.shape), turned, start, torch.empty(8))
        for start in range(16, weight.numel(), 24)
    ]
    reads = Reads(monkeypatch)
    Reader(open_index(path, manifest), ALONE).fill(targets)
    found = torch.stack([target.memory for target in targets], 1)
    assert torch.equal(found, weight[16:].permute(0, 3, 2, 1).flatten(1))
    records = sum(file.record_bytes for file in manifest.files[4:])
    assert reads.num_bytes == weight.nbytes // 3 + records


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_pieces", [1, 7])
def test_weights_of_others_are_read_once_too(tmp_path, monkeypatch, order, num_pieces):
    """Of a file much larger than the pieces that it is read in."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    weight = torch.randn(64, 48, 20, 20)
    save_file({"layer.weight": weight, "other": torch.zeros(5)}, tmp_path / "model.safetensors")
    torch.save({"layer.weight": weight}, tmp_path / "model.pt")
    reads = Reads(monkeypatch)
    for name in ("model.safetensors", "model.pt"):
        targets = cut_up(tuple(weight.shape), ORDERS[order], "value", num_pieces)
        open_weights(tmp_path / name, ALONE).fill(targets)
        assert torch.equal(whole_of(targets), weight)
    assert reads.most == 1
    assert reads.num_bytes == weight.nbytes


def test_a_part_that_is_damaged_is_refused_in_whatever_order_it_is_wanted(tmp_path):
    path, manifest = save(tmp_path, 2)
    fragments = fragments_of(path, manifest)
    fragment = next(each for each in fragments if each.key == "value/layer.weight")
    with (path / fragment.file).open("r+b") as file:
        file.seek(fragment.offset)
        file.write(b"\xff")
    for order in ORDERS.values():
        targets = cut_up((24, 6, 5, 5), order, "value", 3)
        with pytest.raises(Exception, match="is damaged: the checksum of value/layer"):
            Reader(open_index(path, manifest), ALONE).fill(targets)
