"""Files of weights that are not what they seem are refused in words, before anything is read into
the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import fragments_of, write_step

from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.initial_weights import Weights, open_weights
from zrun_core.checkpoint.reader import Target
from zrun_core.distributed.transport import Group
from zrun_core.errors import CheckpointError

ALONE = Group("world", (0,), 0, None)
GOOD: dict[str, Any] = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def safetensors(path: Path, entries: dict[str, Any], num_bytes: int) -> Path:
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    return path


@pytest.mark.parametrize(
    ("entries", "num_bytes", "words"),
    [
        ({"a": GOOD, "b": GOOD}, 16, "b does not begin where the tensor before it ends"),
        ({"a": GOOD, "b": {**GOOD, "data_offsets": [8, 24]}}, 24, "b does not begin"),
        ({"a": {**GOOD, "data_offsets": [16, 32]}}, 32, "a does not begin"),
        ({"a": {**GOOD, "shape": [2.9, "2"]}}, 16, "'2.9' is no size"),
        ({"a": {**GOOD, "shape": [True, 4]}}, 16, "'True' is no size"),
        ({"a": {**GOOD, "shape": [-2, -2]}}, 16, "'-2' is no size"),
        ({"a": {**GOOD, "shape": [2**62, 2**62]}}, 16, "a has a wrong size"),
        ({"a": {**GOOD, "data_offsets": [0.0, 16.0]}}, 16, "'0.0' is no size"),
        ({"a": {**GOOD, "data_offsets": [0]}}, 16, "not a whole safetensors file"),
        ({"a": GOOD}, 8, "it is cut off"),
        ({"a": [1]}, 16, "not a whole safetensors file"),
    ],
)
def test_a_header_that_cannot_be(
    tmp_path: Path, entries: dict[str, Any], num_bytes: int, words: str
) -> None:
    path = safetensors(tmp_path / "a.safetensors", entries, num_bytes)
    with pytest.raises(CheckpointError, match=words):
        open_weights(path, ALONE)


def test_a_header_as_it_should_be(tmp_path: Path) -> None:
    entries = {
        "b": {**GOOD, "data_offsets": [16, 32]},
        "none": {**GOOD, "shape": [0], "data_offsets": [16, 16]},
        "a": GOOD,
    }
    assert set(
        open_weights(safetensors(tmp_path / "a.safetensors", entries, 32), ALONE).shapes
    ) == {"a", "b", "none"}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, which makes odd tensors
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.ones(3, device="meta"), "without values"),
    ],
)
def test_a_state_dict_of_other_than_dense_tensors(
    tmp_path: Path, make: Callable[[], torch.Tensor], kind: str
) -> None:
    torch.save({"good": torch.ones(2), "odd": make()}, tmp_path / "a.pt")
    with pytest.raises(
        CheckpointError, match=rf"odd of .*a\.pt is {kind}: write it as a dense tensor"
    ):
        open_weights(tmp_path / "a.pt", ALONE)


def fill(weights: Weights) -> None:
    state = torch.empty(48 * 33)
    weights.fill([Target(("layer.weight",), "value", (48, 33), (33, 1), 0, state)])


def test_a_damaged_newest_step_is_no_reason_to_begin_with_older_weights(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    for step in (10, 20, 30):
        write_step(folder, step)
    fill(open_weights(tmp_path / "run", ALONE))
    shard = folder.step_path(30) / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    step = folder.step_path(30)
    held = fragments_of(step, read_step(step), shard.name)
    content[
        next(each.offset for each in held if (each.tensor, each.state) == ("layer.weight", "value"))
    ] ^= 1
    shard.write_bytes(content)
    weights, other = (
        open_weights(tmp_path / "run", ALONE),
        f"; name another, such as {folder.step_path(20)}",
    )
    with pytest.raises(CheckpointError, match=f"^init_from: .*is damaged: .*{other}$"):
        fill(weights)
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(
        CheckpointError, match=f"the newest step of {folder.path} is not valid: .*{other}$"
    ):
        open_weights(tmp_path / "run", ALONE)
    (folder.step_path(20) / "manifest.json").unlink()
    (folder.step_path(10) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"is not valid: [^;]*$"):
        open_weights(folder.path, ALONE)
