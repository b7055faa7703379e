"""Checkpoints of format 1, whose manifests list every fragment: they are read as before.

`format_1/` was written by that zrun: two ranks at stage 2, a batch norm of which each has its own
averages. Other steps of these tests are made from steps of today.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import format_one
import pytest
import torch
from checkpoint_toys import (
    forged,
    fragments_of,
    nested,
    read_step_state,
    set_to,
    toy_state,
    write_step,
)
from safetensors.torch import load_file

from zrun_core.checkpoint.export import export
from zrun_core.checkpoint.folder import CheckpointFolder, read_step
from zrun_core.checkpoint.manifest import Manifest
from zrun_core.checkpoint.step_index import open_index
from zrun_core.checkpoint.verify import read_back, verify
from zrun_core.errors import CheckpointError

WRITTEN = Path(__file__).parent / "format_1" / "step-00000002"


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Steps 10 and 20, the latter of format 1."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (10, 20):
        write_step(folder, step, scale=4)
    format_one.rewrite(folder.step_path(20))
    return folder


def test_what_an_older_zrun_wrote_is_read() -> None:
    manifest = read_step(WRITTEN)
    assert (manifest.format, manifest.step, manifest.world_size) == (1, 2, 2)
    assert verify(WRITTEN, manifest) == read_back(WRITTEN, manifest) == []
    assert json.loads((WRITTEN / "manifest.json").read_bytes())["digest"] == manifest.digest
    weight = manifest.tensors[0]
    assert weight.states == dict.fromkeys(("value", "exp_avg", "exp_avg_sq"), "float32")
    index = open_index(WRITTEN, manifest)
    own = [[each.tensor for each in index.own_fragments(rank)] for rank in (0, 1)]
    assert "rng/0/torch" in own[0]
    assert "buffer/1/1.running_mean" in own[1]
    state = index.rank_state(1)
    assert state is not None
    assert state.rng["python"]["version"] == 3
    assert index.rank_state(2) is None
    with pytest.raises(ValueError, match="format 1 is read only"):
        manifest.to_json()


def test_it_is_exported_to_the_bit(tmp_path: Path) -> None:
    export(WRITTEN, read_step(WRITTEN), tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    saved = load_file(WRITTEN / "rank-00000.safetensors")
    assert len(exported) == 9
    for name, tensor in exported.items():
        assert torch.equal(tensor.view(-1), saved[f"value/{name}"])


def test_both_formats_hold_the_same(folder: CheckpointFolder, tmp_path: Path) -> None:
    """The writer of these tests, the reader, and the tables that are made of both."""
    other = CheckpointFolder(tmp_path / "other")
    write_step(other, 20, scale=4)
    new, old = (each.step_path(20) for each in (other, folder))
    of_new, of_old = read_step(new), read_step(old)
    assert (of_new.format, of_old.format) == (2, 1)
    assert of_old.tensors == of_new.tensors
    assert [each.own_bytes for each in of_old.files] == [each.own_bytes for each in of_new.files]
    keys = [
        [(each.key, each.start, each.stop, each.dtype, each.digest) for each in found]
        for found in (fragments_of(new, of_new), fragments_of(old, of_old))
    ]
    assert keys[0] == keys[1]
    for name, tensor in toy_state(20, 4).items():
        assert torch.equal(read_step_state(old, of_old)[name], tensor)


def test_a_step_of_each_format_is_listed_and_pruned(folder: CheckpointFolder) -> None:
    write_step(folder, 30)
    assert [found.problem for found in folder.scan()] == [None] * 3
    assert folder.prune(2) == [10]
    write_step(folder, 40)
    assert folder.prune(2, thorough=True) == [20]


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "manifest.json"])
def test_every_damage_is_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / "step-00000002"
    shutil.copytree(WRITTEN, path)
    content = (path / name).read_bytes()
    manifest = read_step(path)
    for place in range(0, len(content), 97):
        damaged = bytearray(content)
        damaged[place] ^= 4
        (path / name).write_bytes(damaged)
        if name == "manifest.json":
            with pytest.raises(CheckpointError, match=name):
                read_step(path)
        else:
            assert f"{name} is damaged: the checksum of" in verify(path, manifest)[0]
    os.truncate(path / name, len(content) - 1)
    with pytest.raises(CheckpointError, match=name):
        read_step(path)


def _shift(raw: Any) -> None:
    raw["fragments"][1]["offset"] = raw["fragments"][0]["offset"]


def _of_state(state: str, field: str, value: Any) -> Callable[[Any], None]:
    """A change of every fragment of a state."""

    def change(raw: Any) -> None:
        for fragment in raw["fragments"]:
            if fragment["state"] == state:
                fragment[field] = value

    return change


def _set_random(key: str, value: Any) -> Callable[[Any], None]:
    """A change of the first fragment of the random streams."""
    return lambda raw: next(
        each for each in raw["fragments"] if each["state"] == "rank"
    ).__setitem__(key, value)


def _as_integers(raw: Any) -> None:
    for fragment in raw["fragments"]:
        if (fragment["tensor"], fragment["state"]) == ("layer.weight", "value"):
            fragment["dtype"] = "int32"


_ORDER = {"order": None, "late": []}


def _swap_ranges(raw: Any) -> None:
    first, second = (
        each
        for each in raw["fragments"]
        if (each["tensor"], each["state"]) == ("layer.bias", "value")
    )
    first["start"], first["stop"], second["start"] = 0, 17, 16
    first["num_bytes"] = 34


HOSTILE = {
    "absolute path": (set_to("files", 0, "name", "/etc/passwd"), "plain name"),
    "parent": (set_to("files", 0, "name", "../manifest.json"), "plain name"),
    "dots": (set_to("fragments", 0, "file", ".."), "plain name"),
    "null byte": (set_to("files", 0, "name", "a\0b"), "printable"),
    "the manifest as a shard": (
        set_to("files", 0, "name", "manifest.json"),
        "manifest.json as a file",
    ),
    "a huge shape": (set_to("tensors", 0, "shape", [10**12, 33]), "strides|elements"),
    "an impossible shape": (set_to("tensors", 0, "shape", [2**61, 2**61]), "no possible shape"),
    "a thousand dimensions": (set_to("tensors", 0, "shape", [1] * 1000), "no possible shape"),
    "a huge fragment": (set_to("fragments", 0, "stop", 10**12), "bytes"),
    "a huge file": (set_to("files", 0, "num_bytes", 10**15), "its parts"),
    "a number beyond 64 bits": (set_to("files", 0, "num_bytes", 10**400), "whole number"),
    "a negative offset": (set_to("fragments", 0, "offset", -8), "whole number"),
    "an infinite size": (set_to("fragments", 0, "num_bytes", float("inf")), "JSON"),
    "a size that is no number": (set_to("files", 0, "num_bytes", float("nan")), "JSON"),
    "a fractional size": (set_to("fragments", 0, "num_bytes", 1.5), "whole number"),
    "a truth for a number": (set_to("step", True), "whole number"),
    "an overlap in the file": (_shift, "overlaps|gap"),
    "an overlap in the tensor": (_swap_ranges, "overlaps|bytes|gap"),
    "an overlap of strides": (set_to("tensors", 0, "stride", [0, 0]), "gaps or overlap"),
    "an unknown format of numbers": (set_to("fragments", 0, "dtype", "object"), "unknown"),
    "an escape sequence": (set_to("tensors", 0, "name", "\x1b[2Jweight"), "printable"),
    "a tensor twice": (set_to("tensors", 1, "name", "tied.weight"), "twice"),
    "a missing tensor": (lambda raw: raw["tensors"].pop(0), "does not list"),
    "a missing fragment": (lambda raw: raw["fragments"].pop(0), "gap|parts|digest"),
    "a missing file": (lambda raw: raw["files"].pop(0), "does not list"),
    "a missing key": (lambda raw: raw.pop("step"), "keys"),
    "another key": (set_to("pickle", "cos\nsystem"), "keys"),
    "another key of a file": (
        set_to("files", 1, "mode", 0o777),
        r"files\[1\] does not have the keys",
    ),
    "another key of a scaler": (
        set_to("progress", "scaler", {"scale": 2.0, "good": 1, "bad": 1, "ugly": 1}),
        "progress, scaler does not have the keys scale, good, bad",
    ),
    "groups that are null": (set_to("progress", "groups", None), "groups: not an object"),
    "other parts that are null": (set_to("layout", "others", None), "layout, others: not a list"),
    "a size that is a tree": (set_to("step", nested(300)), "step: an object is not a whole number"),
    "another digest": (set_to("files", 0, "digest", "0" * 32), "not that of its parts"),
    "no object": (lambda raw: raw["files"].__setitem__(0, "x"), "keys"),
    "no ranks": (set_to("world_size", 0), "too few"),
    "a counter in words": (
        set_to("progress", "steps", "many"),
        "progress, steps: 'many' is not a whole number",
    ),
    "a counter below 0": (set_to("progress", "cursor", -1), "progress, cursor"),
    "a dataset of nothing": (
        set_to("progress", "dataset_samples", 0),
        "dataset_samples: 0 is too few",
    ),
    "a loss in words": (set_to("progress", "loss", "low"), "is not a number"),
    "a number beyond floats": (set_to("progress", "loss", 10**400), "is not a number"),
    "a scale of 0": (
        set_to("progress", "scaler", {"scale": 0, "good": 1, "bad": 1}),
        "scale: 0.0 is not more than 0",
    ),
    "half a scaler": (set_to("progress", "scaler", {"scale": 2.0}), "scale, good, bad"),
    "groups in words": (set_to("progress", "groups", {"": 7}), "groups: not a list"),
    "parameters for options": (
        set_to("progress", "groups", {"": [{"params": []}]}),
        "params are no option",
    ),
    "extras in a list": (set_to("progress", "extra", [1, 2]), "extra: not an object"),
    "models in a number": (
        set_to("layout", "models", 5),
        "models: not an object|layout: not an object",
    ),
    "a model in a number": (
        set_to("layout", "models", {"a": 5}),
        "layout, models, a: not an object",
    ),
    "other models": (set_to("layout", "models", {"a": {}}), "not of the models in layout"),
    "other parts in a number": (set_to("layout", "others", 5), "layout, others: not a list"),
    "another part in a number": (
        set_to("layout", "others", [{}, 5]),
        r"layout, others\[1\]: not an object",
    ),
    "a state too few": (lambda raw: raw["rank_states"].pop(), "states of 2 ranks"),
    "a rank twice": (set_to("rank_states", 1, "rank", 0), "states of 2 ranks"),
    "a rank without streams": (
        lambda raw: raw["rank_states"][0].pop("rng"),
        "keys rank, rng, learnt",
    ),
    "an order that is none": (
        set_to("rank_states", 0, "learnt", {**_ORDER, "order": 5}),
        "learnt, order: not a list",
    ),
    "an order of numbers": (
        set_to("rank_states", 0, "learnt", {**_ORDER, "order": [1]}),
        "not a text",
    ),
    "half an order": (set_to("rank_states", 0, "learnt", {"order": None}), "keys order, late"),
    "streams of nobody": (_set_random("tensor", "torch"), "belongs to no rank"),
    "streams of a rank that is not": (_set_random("tensor", "rng/2/torch"), "belongs to no rank"),
    "a buffer of no tensor": (_set_random("tensor", "buffer/0/layer.scale"), "is not listed"),
    "a buffer of another size": (_set_random("tensor", "buffer/0/norm.count"), "elements"),
    "a buffer of another kind": (
        _set_random("tensor", "buffer/0/layer.weight"),
        "is uint8, and the tensor float32",
    ),
    "values of another kind": (_as_integers, "is int32, and the tensor float32"),
    "a job without a bottom": (set_to("job", "a", nested(200)), "inside of more than 100"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest(folder: CheckpointFolder, name: str) -> None:
    change, message = HOSTILE[name]
    with pytest.raises(CheckpointError, match=message):
        Manifest.from_json(forged((folder.step_path(20) / "manifest.json").read_bytes(), change))
